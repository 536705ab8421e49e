// A job's table: its members, and which of them has which chunks. Clients and servers go by it alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

inline constexpr int kShardsMax = 1 << 16;
// Of new jobs. Fixed with the job: a table of so many shards takes 4 to 20 KB, and the fullest of 16 servers has at
// most a hundredth more than its share.
inline constexpr int kShards = 1024;
inline constexpr uint32_t kReplicasMax = 4;

// The servers of an Open, whether it has a table or not.
const google::protobuf::RepeatedPtrField<v1::Member>& MembersOf(const v1::OpenRequest& open);

// REQUIRES: the table has shards.
inline const v1::Shard& ShardOf(const v1::Table& table, uint64_t chunk) {
  return table.shards(static_cast<int>(chunk % static_cast<uint64_t>(table.shards_size())));
}

// INVALID_ARGUMENT (BAD_REQUEST) unless the table has 1 to kShardsMax shards and 1 to kReplicasMax replicas, each shard
// has a holder, holders and fillers are ascending indices of members, none twice, and who leaves is a holder. Says
// nothing of the members.
absl::Status CheckTable(const v1::Table& table);

// The shards of which nobody `there` (by index) is a holder, as "12 of 1024 shards"; empty: there is one of each.
// kAny: nor a filler, which may have the shard by now.
enum class Copies { kHeld, kAny };
std::string ShardsWithout(const v1::Table& table, const std::vector<bool>& there, Copies copies = Copies::kHeld);

// Who could give the shards that nobody `there` has.
struct Missing {
  std::vector<uint32_t> members;       // neither there nor lost, hold or copy some of these shards
  std::vector<uint32_t> enough_alone;  // those of them that hold all of these
};
Missing FindMissing(const v1::Table& table, const std::vector<bool>& there, const std::vector<bool>& lost);

// The table without the members that are not `there`. A shard may have no holder then (ShardsWithout).
v1::Table LeaveOut(const v1::Table& table, const std::vector<bool>& there);

// For each member whether the others hold all of its shards.
std::vector<bool> Replaceable(const v1::Table& table);

// Shards with fewer holders than the table wants.
int ShortShards(const v1::Table& table);

// The same members on the same disks, since the same epochs, and every shard on the same ones? Addresses may differ.
bool SameTable(const v1::Table& a, const v1::Table& b);

// Of tables that differ: whether all that `next` changes is that some copies are complete, while others are still made.
bool OnlySettles(const v1::Table& now, const v1::Table& next);

}  // namespace ballast::model
