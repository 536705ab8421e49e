// The state of a job on this server, apart from the step machine. Each part of the state changes in one way.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/lent_memory.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Threads: under the job's lock.
class JobState {
 public:
  // The open epoch's plan; null before the first Open.
  const std::shared_ptr<const model::EpochPlan>& plan() const { return plan_; }
  const HeldChunks& chunks() const { return *chunks_; }
  // For whoever goes on without the lock: an Open replaces the list, and changes no list.
  const std::shared_ptr<const HeldChunks>& chunk_list() const { return chunks_; }
  // The chunk with this index in the layout, and the chunk of a slice with the slice's index in the plan. Null if this
  // server has no such chunk or slice.
  std::shared_ptr<HeldChunk> Find(uint64_t index) const;
  // As Find, for a chunk that the plan gives to this server. DATA_LOSS (DIVERGED), with the chunk's index, if it is not
  // there: our own bug.
  absl::StatusOr<std::shared_ptr<HeldChunk>> Held(uint64_t index) const;
  std::shared_ptr<HeldChunk> FindSlice(const v1::PushRequest& header, uint32_t* slice) const;
  // A new epoch is open. `indices`: of `chunks` in the layout. Slices of older epochs are void, and nothing is lent.
  // Chunks that the plan does not give to this server any more leave: nobody finds them. `keeps_slices`: chunks that
  // stay keep their slices. REQUIRES then: the same spec and tiling.
  void Open(std::shared_ptr<const model::EpochPlan> plan, HeldChunks chunks, absl::Span<const uint64_t> indices,
            bool keeps_slices = false);

  // Chunks that have left, and whose bytes are still here.
  const HeldChunks& leaving() const { return leaving_; }
  // Their bytes go.
  HeldChunks TakeLeaving() { return std::exchange(leaving_, {}); }

  // Kept versions have come or gone. `bytes`: as the store's KeptBytes.
  void SetKept(absl::Span<const uint64_t> bytes);
  // Bytes of NVMe that kept versions take of each shard of the plan's table. Empty: none, or there is no table.
  std::vector<uint64_t> KeptByShard() const;

  // Null before the worker has made a store. Replace returns the old store.
  const std::shared_ptr<storage::ChunkStore>& store() const { return store_; }
  std::shared_ptr<storage::ChunkStore> Replace(std::shared_ptr<storage::ChunkStore> store) {
    return std::exchange(store_, std::move(store));
  }

  // A trainer's memory for the step in flight; null: nothing.
  const std::shared_ptr<LentMemory>& lent() const { return lent_; }
  void Lend(std::shared_ptr<LentMemory> lent) { lent_ = std::move(lent); }

  // While a log is replayed.
  bool recovering() const { return recovering_; }
  void SetRecovering(bool recovering) { recovering_ = recovering; }

 private:
  std::shared_ptr<const model::EpochPlan> plan_;
  std::shared_ptr<const HeldChunks> chunks_ = std::make_shared<const HeldChunks>();
  absl::flat_hash_map<uint64_t, std::shared_ptr<HeldChunk>> by_index_;
  HeldChunks leaving_;
  std::shared_ptr<storage::ChunkStore> store_;
  std::shared_ptr<LentMemory> lent_;
  bool recovering_ = false;
};

}  // namespace ballast::services
