#include "ballast/proto/base/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/strip.h"

namespace ballast::model {
namespace {
constexpr char kPayloadUrl[] = "ballast/reason";
constexpr char kDetailUrl[] = "ballast/detail/";  // and its key
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

void SetDetail(const std::string& key, absl::string_view value, absl::Status* status) {
  status->SetPayload(absl::StrCat(kDetailUrl, key), absl::Cord(value));
}

Details DetailsOf(const absl::Status& status) {
  Details details;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (absl::ConsumePrefix(&url, kDetailUrl)) details[std::string(url)] = std::string(value);
  });
  return details;
}

bool IsWithoutJob(const absl::Status& status) {
  return !status.ok() && (DetailsOf(status).contains(kStopped) || ReasonOf(status) == kUnknownJob);
}

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) { annotated.SetPayload(url, value); });
  return annotated;
}

}  // namespace ballast::model
