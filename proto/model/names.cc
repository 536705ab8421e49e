#include "ballast/proto/model/names.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/named.h"

namespace ballast::model {
namespace {

constexpr size_t kJobNameBytesMax = 128;

// Both go into file names, metrics and etcd's keys.
bool IsPlain(absl::string_view name, size_t bytes_max) {
  return !name.empty() && name.size() <= bytes_max && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

constexpr Named<v1::Durability, v1::Durability> kDurabilities[] = {
    {v1::DURABILITY_STEP, v1::DURABILITY_STEP, "step"},
    {v1::DURABILITY_EVERY_K, v1::DURABILITY_EVERY_K, "every-K"},
    {v1::DURABILITY_NONE, v1::DURABILITY_NONE, "none"}};

}  // namespace

absl::StatusOr<v1::Durability> DurabilityNamed(const std::string& name) {
  return ByName(kDurabilities, "durability", name);
}

absl::string_view NameOf(v1::Durability durability) { return NameIn(kDurabilities, durability); }

bool IsJobName(absl::string_view name) { return IsPlain(name, kJobNameBytesMax); }

bool IsServerId(absl::string_view id) { return IsPlain(id, kServerIdBytesMax); }

absl::Status CheckJobName(absl::string_view name) {
  if (IsJobName(name)) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, kBadSpec,
               absl::StrCat("a job's name has ", kJobNameRule, ", got ", name.size(), " bytes: '",
                            name.substr(0, kJobNameBytesMax), "'"));
}

}  // namespace ballast::model
