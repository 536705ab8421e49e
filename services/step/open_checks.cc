#include "ballast/services/step/open_checks.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/table.h"

namespace ballast::services {
namespace {

// The same members, and every chunk on the same ones? A server may have moved to another address.
bool SamePlaces(const v1::OpenRequest& a, const v1::OpenRequest& b) {
  const auto& of_a = model::MembersOf(a);
  const auto& of_b = model::MembersOf(b);
  return a.has_table() == b.has_table() &&
         std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                    [](const v1::Member& x, const v1::Member& y) {
                      return x.server_id() == y.server_id() && x.weight() == y.weight() && x.disk() == y.disk();
                    }) &&
         std::equal(
             a.table().shards().begin(), a.table().shards().end(), b.table().shards().begin(), b.table().shards().end(),
             [](const v1::Shard& x, const v1::Shard& y) { return x.SerializeAsString() == y.SerializeAsString(); });
}

// The shards that a server has in a table.
std::vector<int> ShardsOf(const v1::Table& table, absl::string_view id) {
  const auto member = std::find_if(table.members().begin(), table.members().end(),
                                   [id](const v1::Member& one) { return one.server_id() == id; });
  const auto index = static_cast<uint32_t>(member - table.members().begin());
  std::vector<int> shards;
  for (int s = 0; s < table.shards_size(); ++s) {
    const auto& holders = table.shards(s).holders();
    if (std::find(holders.begin(), holders.end(), index) != holders.end()) shards.push_back(s);
  }
  return shards;
}

// Tables by which the server has the same chunks, whatever the others have?
bool SameShards(const v1::OpenRequest& a, const v1::OpenRequest& b, absl::string_view id) {
  return a.has_table() && b.has_table() && a.table().shards_size() == b.table().shards_size() &&
         ShardsOf(a.table(), id) == ShardsOf(b.table(), id);
}

}  // namespace

absl::Status CheckContinues(const v1::OpenRequest& older, const v1::OpenRequest& newer, absl::string_view id) {
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
  if (!same) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadSpec,
                        absl::StrCat("the spec of job '", a.name(),
                                     "' may only grow by further registrations; the one that came differs from what "
                                     "is registered: take it from GetJob and append, or drop the job"));
  }
  if (SamePlaces(older, newer) || SameShards(older, newer, id)) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("job '", a.name(), "' lies on ", model::MembersOf(older).size(),
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

bool SamePlan(const v1::OpenRequest& a, const v1::OpenRequest& b) {
  return a.tiling().SerializeAsString() == b.tiling().SerializeAsString() &&
         a.spec().SerializeAsString() == b.spec().SerializeAsString() && a.spec_digest() == b.spec_digest() &&
         a.protocol_version() == b.protocol_version() && SamePlaces(a, b);
}

}  // namespace ballast::services
