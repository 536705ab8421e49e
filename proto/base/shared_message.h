// A message that goes to many callers, such as the answer to a step's seals. It is stored once and serialised once.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/base/call_once.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// Immutable. Threads: any.
template <typename Message>
class SharedMessage {
 public:
  explicit SharedMessage(Message message) : message_(std::move(message)) {}
  const Message& operator*() const { return message_; }
  const Message* operator->() const { return &message_; }
  // The message as it goes over the wire; made by the first call.
  const std::string& bytes() const {
    absl::call_once(serialised_, [this] { bytes_ = message_.SerializeAsString(); });
    return bytes_;
  }

 private:
  const Message message_;
  mutable absl::once_flag serialised_;
  mutable std::string bytes_;
};

using SealAnswer = std::shared_ptr<const SharedMessage<v1::SealResponse>>;

}  // namespace ballast::model
