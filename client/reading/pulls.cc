#include "ballast/client/reading/pulls.h"

#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/client/transfers/unit_map.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// What the router sends at a time, and as much again.
constexpr uint64_t kUnderWayMax = uint64_t{128} << 20;
constexpr uint32_t kReader = 0;  // as a rank's number, by which holders share the pulls

}  // namespace

absl::Status WholePulls::Start(const model::Tensor& tensor, absl::Span<std::byte> to) {
  const std::vector<model::BoxRun> runs = WholeRuns(tensor);
  if (runs.size() == 1) return StartRange(tensor, to);
  std::vector<std::byte> ordered(to.size());  // as servers have the elements
  const absl::Status started = StartRange(tensor, absl::MakeSpan(ordered));
  const absl::Status pulled = Wait();
  BALLAST_RETURN_IF_ERROR(started);
  BALLAST_RETURN_IF_ERROR(pulled);
  const uint64_t width = to.size() / tensor.range.size();
  for (const model::BoxRun& run : runs) {
    std::memcpy(to.data() + run.in_box * width, ordered.data() + run.in_tensor * width, run.count * width);
  }
  return absl::OkStatus();
}

absl::Status WholePulls::StartRange(const model::Tensor& tensor, absl::Span<std::byte> to) {
  const uint64_t width = to.size() / tensor.range.size();
  BALLAST_ASSIGN_OR_RETURN(const auto pieces, plan_->layout().Cut(tensor.unit, tensor.range));
  for (const model::Layout::Piece& piece : pieces) {
    const uint64_t bytes = piece.range.size() * width;
    if (under_way_ > 0 && under_way_ + bytes > kUnderWayMax) Drain();
    if (tally_->failed()) break;  // Wait tells
    under_way_ += bytes;
    v1::PullRequest request;
    request.set_job(plan_->open().spec().name());
    request.set_version(hold_->version());
    request.set_content(content_);
    request.set_unit(tensor.unit);
    request.set_begin(piece.range.begin);
    request.set_end(piece.range.end);
    const auto part = to.subspan((piece.range.begin - tensor.range.begin) * width, bytes);
    auto done = [tally = tally_](const absl::Status& status) { tally->Finish(status); };
    tally_->Start();
    if (router_->routes() != nullptr) {
      router_->Pull(Router::Source{piece.chunk, kReader}, std::move(request), part, absl::Now() + timeout_,
                    std::move(done));
    } else {
      router_->Pull(plan_->SourceFor(piece.chunk, kReader), std::move(request), part, absl::Now() + timeout_,
                    std::move(done));
    }
  }
  return absl::OkStatus();
}

// A renewal that fails is tried again with the next. If the version goes, its pulls say so.
void WholePulls::Drain() {
  (void)hold_->RenewIfDue();
  while (!tally_->WaitUntil(absl::Now() + hold_->renew_after())) (void)hold_->RenewIfDue();
  under_way_ = 0;
}

absl::Status WholePulls::Wait() {
  Drain();
  return tally_->Wait();
}

}  // namespace ballast::client
