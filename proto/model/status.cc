#include "ballast/proto/model/status.h"

#include "absl/strings/cord.h"

namespace ballast::model {
namespace {
constexpr char kPayloadUrl[] = "ballast/reason";
}  // namespace

absl::Status Error(absl::StatusCode code, absl::string_view reason, absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kPayloadUrl, absl::Cord(reason));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return Error(status.code(), ReasonOf(status), absl::StrCat(context, ": ", status.message()));
}

}  // namespace ballast::model
