#include "ballast/services/step/open_checks.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/table.h"

namespace ballast::services {
bool SamePlaces(const v1::OpenRequest& a, const v1::OpenRequest& b) {
  if (a.has_table() || b.has_table()) return a.has_table() == b.has_table() && model::SameTable(a.table(), b.table());
  return std::equal(a.members().begin(), a.members().end(), b.members().begin(), b.members().end(),
                    [](const v1::Member& x, const v1::Member& y) {
                      return x.server_id() == y.server_id() && x.weight() == y.weight() && x.disk() == y.disk();
                    });
}

namespace {

// Whether the spec is the same, or has grown.
bool SpecContinues(const v1::OpenRequest& older, const v1::OpenRequest& newer) {
  if (model::SameSpec(older, newer)) return true;
  const v1::JobSpec& a = older.spec();
  const v1::JobSpec& b = newer.spec();
  const auto fixed = [](v1::JobSpec spec) {
    spec.clear_registrations();
    return spec.SerializeAsString();
  };
  bool same = fixed(a) == fixed(b) && a.registrations_size() <= b.registrations_size();
  for (int i = 0; same && i < a.registrations_size(); ++i) {
    same = a.registrations(i).SerializeAsString() == b.registrations(i).SerializeAsString();
  }
  return same;
}

}  // namespace

absl::Status CheckContinues(const v1::OpenRequest& older, const v1::OpenRequest& newer) {
  const std::string& job = older.spec().name();
  if (!SpecContinues(older, newer)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec,
                        absl::StrCat("the spec of job '", job,
                                     "' may only grow by further registrations; the one that came differs from what "
                                     "is registered: take it from GetJob and append, or drop the job"));
  }
  if (newer.has_table() && (!older.has_table() || older.table().shards_size() == newer.table().shards_size())) {
    return absl::OkStatus();
  }
  if (newer.has_table()) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("job '", job, "' has ", older.table().shards_size(),
                                     " shards for good; the Open that came has ", newer.table().shards_size()));
  }
  if (older.has_table()) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("job '", job,
                                     "' has its members in etcd; open it with the address of etcd, not with a list of "
                                     "servers"));
  }
  if (SamePlaces(older, newer)) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("job '", job, "' lies on ", model::MembersOf(older).size(),
                                   " server(s); other members or weights would move its chunks, which is not "
                                   "supported: take the members from GetJob"));
}

absl::Status CheckRegistered(const v1::OpenRequest& open, int known) {
  if (known > 0 && open.base() >= 0 && open.spec().registrations_size() > known &&
      open.spec().durability() == v1::DURABILITY_EVERY_K) {
    return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                        absl::StrCat("job '", open.spec().name(),
                                     "' has durability every-K, and tensors cannot be added to it: its pins would have "
                                     "no state of them to go back to; name all tensors when the job is created"));
  }
  for (int i = known; i < open.spec().registrations_size(); ++i) {
    if (open.spec().registrations(i).version() == open.base()) continue;
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadSpec,
        absl::StrCat("registration ", i, " of job '", open.spec().name(), "' is new and says version ",
                     open.spec().registrations(i).version(), "; expected the epoch's base, ", open.base()));
  }
  return absl::OkStatus();
}

bool Continues(const v1::OpenRequest& older, const v1::OpenRequest& newer) {
  return older.has_table() && newer.has_table() && !newer.group().empty() && older.group() == newer.group() &&
         older.tiling().SerializeAsString() == newer.tiling().SerializeAsString() && model::SameSpec(older, newer);
}

bool SamePlan(const v1::OpenRequest& a, const v1::OpenRequest& b) {
  return a.tiling().SerializeAsString() == b.tiling().SerializeAsString() && model::SameSpec(a, b) &&
         a.protocol_version() == b.protocol_version() && a.group() == b.group() && a.continues() == b.continues() &&
         std::equal(a.tensor_steps().begin(), a.tensor_steps().end(), b.tensor_steps().begin(),
                    b.tensor_steps().end()) &&
         SamePlaces(a, b);
}

}  // namespace ballast::services
