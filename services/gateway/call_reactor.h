// One call: a message comes, and an answer goes. Generated methods would read and parse a message before anybody looks
// who sends it; here the message stays with the network until the caller was let in.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/services/gateway/parse_room.h"
#include "ballast/services/gateway/reads.h"
#include "ballast/services/gateway/trimmer.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/executor.h"
#include "ballast/services/threads/reply.h"

namespace ballast::services {

// A little before the client's own deadline: otherwise the client's gRPC ends the call first, and the client never
// hears what the server was waiting for.
absl::Time DeadlineOf(const grpc::CallbackServerContext& context);

// Ends exactly once, by Finish or Answer; lives until gRPC is done with the call.
class CallReactor final : public grpc::ServerGenericBidiReactor, private Read {
 public:
  CallReactor(Reads* reads, Trimmer* trimmer) : reads_(reads), trimmer_(trimmer) {}

  // Reads the message, in turn among those of `who`, from `connection`; run(message) goes on with the
  // call.
  void ReadMessage(const std::string& who, const std::string& connection, bool push,
                   std::function<void(grpc::ByteBuffer*)> run);

  // Goes on with run(message) on a thread of `executor`; for ReadMessage's run alone, as its last.
  void GoOn(Executor* executor, const grpc::ByteBuffer& message, std::function<void(grpc::ByteBuffer*)> run);

  const std::shared_ptr<Caller>& caller() const { return caller_; }
  // Room for an answer stays until the call's end, the parsed message and its room until the answer: a client may take
  // an answer at any time.
  void Hold(AnswerRoom::Lease room) { answer_room_ = std::move(room); }
  void Keep(std::shared_ptr<const google::protobuf::Message> message, ParseRoom::Lease room) {
    message_ = std::move(message);
    parse_room_ = std::move(room);
  }
  // Sends a part of the answer. Then, or once it cannot be sent, runs `sent`; nothing else is sent before that.
  void Send(grpc::ByteBuffer part, std::function<void()> sent);
  void Answer(grpc::ByteBuffer answer);
  // Sends `status`, which is no success.
  void Fail(const absl::Status& status);

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { Release(); }
  void Release() {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  void Start() override { StartRead(&bytes_); }
  void BeLate() override;
  void GiveWay() override;
  void BeCrowdedOut() override;
  void DropMessage();
  // The message's bytes are gone.
  void EndRead(size_t bytes);

  Reads* const reads_;
  Trimmer* const trimmer_;
  const std::shared_ptr<Caller> caller_ = std::make_shared<Caller>();
  std::function<void(grpc::ByteBuffer*)> run_;
  std::function<void()> sent_;
  std::atomic<int> holders_{1};  // gRPC, a thread that goes on with the message, and the trimmer
  bool elsewhere_ = false;
  grpc::ByteBuffer bytes_;  // the message, then the answer
  AnswerRoom::Lease answer_room_;
  ParseRoom::Lease parse_room_;  // before the message: given back when that is gone
  std::shared_ptr<const google::protobuf::Message> message_;
};

}  // namespace ballast::services
