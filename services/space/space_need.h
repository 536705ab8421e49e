// The space that an Open needs on this server: a function of the job's space there, which takes nothing and never
// waits. A dry run is answered from the need (dry_run_answer.h); a real Open takes the need (space.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/journal_size.h"
#include "ballast/services/space/new_chunks.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class EarlierExtents;

// A job's space on this server, as it was under the job's lock. What Opens change of a chunk is not read from the
// chunk: the caller may have let go of the lock.
struct SpaceState {
  absl::string_view job;                         // borrowed
  absl::string_view server_id;                   // borrowed
  bool working_copies = true;                    // of the server
  uint64_t log_steps = 0;                        // as StateServerOptions::log_steps
  bool recovering = false;                       // the log is being read, and keeps its size
  std::shared_ptr<const model::EpochPlan> plan;  // of the open epoch; null before the first Open
  std::shared_ptr<const HeldChunks> chunks = std::make_shared<const HeldChunks>();
  HeldChunks leaving;                          // as JobState
  HeldChunks spares;                           // taken for a refused Open
  std::shared_ptr<storage::ChunkStore> store;  // null before the worker has made a store
  std::shared_ptr<SliceMemory> memory;         // likewise
  uint64_t read_back_bytes = 0;                // of the buffer that updates read slices into
  JournalState journal;
  const EarlierExtents* earlier = nullptr;  // borrowed; null: no earlier run left anything
};

// A plan's needs beside the job's chunks.
struct SpaceNeed {
  NewChunks wanted;
  std::vector<uint64_t> mine;  // the plan's chunks on this server, in the layout
  // Of `mine`, those that the job has, also those that are leaving; null: the next of `taken`.
  HeldChunks held;
  // The chunks that the job lacks: spares, or, where null, the next of `missing`.
  HeldChunks taken;
  std::vector<storage::ChunkToAdd> missing;
  HeldChunks spares;  // that the plan leaves
  // A refused Open left a store that does not fit the plan: the store goes, with its spares and its journal.
  bool replaces_store = false;
  bool makes_store = false;    // there is none, or the store goes
  bool drops_journal = false;  // the plan has no use for the journal
  storage::TierBytes freed;    // by the store and the journal, if they go
  JournalState journal;        // if it stays
  bool has_read_back = false;  // the buffer for reading slices back stays
  storage::StepShape shape;    // without the store's part; for whoever places the missing chunks to fill in
  bool recovering = false;
  bool may_be_copied = false;  // what an earlier run left and is damaged: other servers may have copies
  bool pushed = true;          // slices come as copies, and need memory here
};

// UNIMPLEMENTED (UNSUPPORTED), INVALID_ARGUMENT (BAD_SPEC): no server can hold such a job, or no server that keeps no
// working copies.
absl::Status CheckSupported(const v1::OpenRequest& request, bool working_copies);
// Errors: as CheckSupported; INVALID_ARGUMENT (BAD_SPEC) if the plan does not go on with the job's chunks, all of them
// unless the job has a table;
// RESOURCE_EXHAUSTED (BUDGET) if the log's segments are too small.
absl::StatusOr<SpaceNeed> Need(const SpaceState& state, const model::EpochPlan& plan);
// The chunks under the plan, in its order. REQUIRES: nothing of need.taken is null.
HeldChunks ChunksUnder(const SpaceNeed& need);
// Has the job all that an Open of `plan` needs, and nothing else?
bool HasAll(const SpaceState& state, const model::EpochPlan& plan);

// The layout of a store for `wanted`.
storage::StateLayout LayoutOf(const NewChunks& wanted, bool working_copies);

// The request for a plan of the missing chunks in `store`, with `free` bytes in the tiers.
storage::PlanRequest RequestOf(const SpaceNeed& need, const storage::ChunkStore& store, const storage::TierBytes& free);
// The free part of the budgets, once `returned` has come back.
storage::TierBytes FreeOf(const storage::TierUsage& usage, const storage::TierBytes& returned);

// The spill for slices of `chunks`, as the plan cuts them; none if there are none to spill.
std::optional<JournalSize> SpillOf(const SpaceNeed& need, const model::EpochPlan& plan, const HeldChunks& chunks);
// Memory for the slices of `chunks` in the plan's tiling, and of `spares`, chunks without an Open. 0 if the reservation
// of the chunks suffices whatever the tiling.
uint64_t SliceBytes(const storage::StateLayout& layout, uint64_t read_back_bytes, const model::EpochPlan& plan,
                    const HeldChunks& chunks, const HeldChunks& spares);

}  // namespace ballast::services
