#include "ballast/client/group/kept_room.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using Places = google::protobuf::RepeatedField<uint32_t>;

// Of numbers that came from servers.
uint64_t Sum(uint64_t a, uint64_t b) { return a + std::min(b, std::numeric_limits<uint64_t>::max() - a); }
uint64_t Beyond(uint64_t a, uint64_t b) { return a - std::min(a, b); }

bool HasPlace(const Places& places, uint32_t member) {
  return std::find(places.begin(), places.end(), member) != places.end();
}

bool IsOf(const v1::GetJobResponse& answer, const v1::Member& member) {
  return answer.server_id() == member.server_id() && answer.disk() == member.disk();
}

const v1::GetJobResponse* AnswerOf(absl::Span<const v1::GetJobResponse> answers, const v1::Member& member) {
  const auto at = std::find_if(answers.begin(), answers.end(), [&](const auto& one) { return IsOf(one, member); });
  return at == answers.end() ? nullptr : &*at;
}

uint64_t KeptOf(const v1::GetJobResponse* answer, int shard) {
  return answer != nullptr && shard < answer->kept_bytes_size() ? answer->kept_bytes(shard) : 0;
}

// The member's place in a table, if it counts there: who does not count begins anew.
std::optional<uint32_t> CountedAs(const v1::Table& now, const model::Found& found, const v1::Member& member) {
  for (const uint32_t m : found.counted) {
    const v1::Member& one = now.members(static_cast<int>(m));
    if (one.server_id() == member.server_id() && one.disk() == member.disk()) return m;
  }
  return std::nullopt;
}

}  // namespace

KeptNeed KeptToCopy(const v1::Table& now, const model::Found& found, const v1::Table& next,
                    absl::Span<const v1::GetJobResponse> answers) {
  KeptNeed kept;
  std::vector<const v1::GetJobResponse*> told;
  for (const v1::Member& member : next.members()) told.push_back(AnswerOf(answers, member));
  for (uint32_t m = 0; m < told.size(); ++m) {
    const std::optional<uint32_t> before = CountedAs(now, found, next.members(static_cast<int>(m)));
    if (before.has_value() && told[m] != nullptr) {
      kept.versions.insert(told[m]->durable_versions().begin(), told[m]->durable_versions().end());
    }
    uint64_t bytes = 0;
    bool begins = false;
    for (int s = 0; s < next.shards_size(); ++s) {
      const v1::Shard& shard = next.shards(s);
      if (!HasPlace(shard.fillers(), m)) continue;
      const bool fills = before.has_value() && s < now.shards_size() && HasPlace(now.shards(s).fillers(), *before);
      begins = begins || !fills;
      uint64_t of_shard = 0;
      for (const uint32_t holder : shard.holders()) of_shard = std::max(of_shard, KeptOf(told[holder], s));
      bytes = Sum(bytes, Beyond(of_shard, KeptOf(told[m], s)));
    }
    kept.bytes.push_back(begins ? bytes : 0);
  }
  return kept;
}

absl::Status CheckKeptRoom(const std::string& server_id, uint64_t kept_bytes, const std::set<int64_t>& versions,
                           const v1::OpenResponse& dry_run) {
  if (kept_bytes == 0) return absl::OkStatus();
  const auto nvme = std::find_if(dry_run.tiers().begin(), dry_run.tiers().end(),
                                 [](const v1::PlannedTier& tier) { return tier.tier() == "nvme"; });
  if (nvme == dry_run.tiers().end() || !nvme->has_free_bytes()) return absl::OkStatus();
  const uint64_t open_bytes = Sum(Sum(nvme->state_bytes(), nvme->working_bytes()), nvme->other_bytes());
  const uint64_t needed = Sum(open_bytes, kept_bytes);
  if (needed <= nvme->free_bytes()) return absl::OkStatus();
  const uint64_t missing = needed - nvme->free_bytes();
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("server '", server_id, "' has no room for copies of the kept versions (",
                                   absl::StrJoin(versions, ", "), "): nvme is short of ", missing, " bytes, ",
                                   kept_bytes, " are needed for them and ", open_bytes, " for its chunks, ",
                                   nvme->free_bytes(), " are free; raise the nvme budget or quota there by at least ",
                                   missing, " bytes, or give a version up (`ballastctl unpin`)"));
}

}  // namespace ballast::client
