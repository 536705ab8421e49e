// Which servers get which chunks: a job's first table, and each that follows. Pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "ballast/proto/model/layout.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// Elements of each of `shards` shards.
std::vector<uint64_t> ShardElements(const Layout& layout, int shards);

// What a job wants of its servers.
struct Wanted {
  // Servers, with their weights, in the order of the table to be.
  absl::Span<const v1::Member> servers;
  uint32_t replicas = 1;
  // Of each shard, as ShardElements says.
  absl::Span<const uint64_t> shard_elements;
  // Also move copies until no server has more than its share by more than a shard. Otherwise only copies that are
  // missing get a place.
  bool level = false;
};

// Chooses the servers of each shard, as ascending indices into wanted.servers: min(replicas, servers) of them, no
// server twice. Keeps the holders that `now` (empty: none) has among these servers, recognised by id and disk; the most
// loaded of them give up what is too much. If holders are missing, keeps fillers, and then gives the least loaded
// server by weight what is missing. A pure function; ties go to the first.
std::vector<std::vector<uint32_t>> PlanWanted(const v1::Table& now, const Wanted& wanted);

// The first table of a job: all are members since `since`, and each server planned for a shard holds it. The founders
// of a job are members since epoch 0: what they have, or have not yet, is all that there is.
v1::Table FirstTable(const Wanted& wanted, const v1::Epoch& since);

// Rule 23: the table after `now`. `filled`: of each shard the members of `now`, as ascending indices, that have it
// filled at the base. wanted.servers: those that shall have chunks and can: they answered, and have room. Servers that
// are not members yet are since `epoch`. If all who are wanted for a shard have it, they hold it; else those who have
// it hold it and the others fill it. If nobody is wanted, those who have it stay. REQUIRES: each shard is filled
// somewhere.
v1::Table NextTable(const v1::Table& now, absl::Span<const std::vector<uint32_t>> filled, const Wanted& wanted,
                    const v1::Epoch& epoch);

}  // namespace ballast::model
