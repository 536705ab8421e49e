#include "ballast/services/gateway/call_reactor.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/status_codec.h"

namespace ballast::services {
namespace {

// The next message of a caller takes the memory of one as large as this from the system, not beside what malloc kept.
// No push is as large.
constexpr size_t kTrimmedBytes = size_t{5} << 20;

}  // namespace

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const std::chrono::system_clock::time_point point = context.deadline();
  if (point == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  const absl::Time deadline = absl::FromChrono(point);
  const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
  return deadline - std::min(left / 10, absl::Milliseconds(200));
}

void CallReactor::ReadMessage(const std::string& who, const std::string& connection, bool push,
                              std::function<void(grpc::ByteBuffer*)> run) {
  run_ = std::move(run);
  if (!reads_->Ask(who, connection, push, this)) BeCrowdedOut();
}

void CallReactor::BeCrowdedOut() {
  Fail(model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                    absl::StrCat("more than ", reads_->waiting_max(),
                                 " calls of the same caller wait until their messages are read; send it again")));
}

void CallReactor::OnReadDone(bool ok) {
  if (!reads_->Come(this)) return;
  const std::function<void(grpc::ByteBuffer*)> run = std::move(run_);
  grpc::ByteBuffer message;
  message.Swap(&bytes_);
  const size_t length = message.Length();
  if (ok) {
    run(&message);
  } else {
    Fail(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                      "expected one message; the call ended before it came"));
  }
  message.Clear();
  if (!elsewhere_) EndRead(length);  // gRPC keeps the call until this returns
}

void CallReactor::EndRead(size_t bytes) {
  if (bytes <= kTrimmedBytes) return reads_->End(this);
  holders_.fetch_add(1, std::memory_order_relaxed);
  trimmer_->Trim([this] {
    reads_->End(this);
    Release();
  });
}

void CallReactor::GoOn(Executor* executor, const grpc::ByteBuffer& message,
                       std::function<void(grpc::ByteBuffer*)> run) {
  if (!executor->Prepare().ok()) {  // the system makes no thread now
    grpc::ByteBuffer here(message);
    return run(&here);
  }
  elsewhere_ = true;
  holders_.fetch_add(1, std::memory_order_relaxed);
  executor->Post([this, bytes = message, run = std::move(run)]() mutable {
    const size_t length = bytes.Length();
    run(&bytes);
    bytes.Clear();
    EndRead(length);
    Release();
  });
}

void CallReactor::OnCancel() {
  caller_->Leave();
  if (reads_->Leave(this)) Fail(absl::CancelledError("the client is gone"));
}

void CallReactor::BeLate() {
  Fail(model::Error(absl::StatusCode::kDeadlineExceeded, model::kBadRequest,
                    absl::StrCat("expected a whole message within ", absl::FormatDuration(Reads::kPatience),
                                 " of when the server began to read it; less came")));
}

void CallReactor::GiveWay() {
  Fail(model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                    "messages of the same caller come slowly, and others wait; this one gave way: send it again"));
}

void CallReactor::DropMessage() {
  message_.reset();
  parse_room_ = ParseRoom::Lease();
}

void CallReactor::Send(grpc::ByteBuffer part, std::function<void()> sent) {
  sent_ = std::move(sent);
  bytes_ = std::move(part);
  StartWrite(&bytes_);
}

void CallReactor::OnWriteDone(bool) {
  if (const std::function<void()> sent = std::exchange(sent_, nullptr)) sent();
}

void CallReactor::Answer(grpc::ByteBuffer answer) {
  DropMessage();
  bytes_ = std::move(answer);
  StartWriteAndFinish(&bytes_, grpc::WriteOptions(), grpc::Status::OK);
}

void CallReactor::Fail(const absl::Status& status) {
  DropMessage();
  Finish(ToGrpc(status));
}

}  // namespace ballast::services
