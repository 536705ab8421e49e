// A chunk of a job on this server, and a slice that was pushed to such a chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/intake.h"
#include "ballast/services/job_state/leases.h"
#include "ballast/services/job_state/reserved_room.h"
#include "ballast/services/job_state/slice_memory.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/storage/log/block_parity.h"
#include "ballast/storage/placement/tier_kind.h"
#include "ballast/storage/store/extent_label.h"

namespace ballast::services {

// Threads: under the job's lock.
class HeldChunk {
 public:
  HeldChunk(std::shared_ptr<SliceMemory> memory, uint64_t store_index, uint64_t id, uint64_t elements,
            storage::StateForm form, const kernels::OptimizerSpec& optimizer, bool logged)
      : store_index(store_index),
        id(id),
        elements(elements),
        form(form),
        logged(logged),
        intake(std::move(memory), elements, optimizer.gradient, logged,
               !storage::IsFrozen(form) ? kernels::Dtype::kF32 : optimizer.working) {}

  bool is_frozen() const { return storage::IsFrozen(form); }

  const uint64_t store_index;
  const uint64_t id;  // index in the layout of the Open that took the chunk
  const uint64_t elements;
  const storage::StateForm form;
  const bool logged;  // updates read its slices back from the log wherever Intake::Logs

  // An epoch begins that keeps no slices of the chunk: where it lies in its layout.
  void Open(const model::Chunk& layout, const model::EpochPlan& plan) {
    layout_ = layout;
    intake.Reset(layout_, plan);
  }
  const model::Chunk& layout() const { return layout_; }

  // None before the chunk is registered or comes back.
  const std::optional<int64_t>& version() const { return version_; }
  // That of its registration: the chunk has no earlier version.
  int64_t first_version() const { return first_version_; }
  // The tensors of a new chunk were registered at `version`. Nothing changes for a chunk that has a version.
  void Register(int64_t version) {
    if (!version_.has_value()) version_ = first_version_ = version;
  }
  // The disk has its state at `version`.
  void ComeBack(int64_t version) { version_ = came_back_ = version; }
  // The version that an earlier run of the server left; none for a chunk of this run.
  const std::optional<int64_t>& came_back() const { return came_back_; }
  // Does this server have the chunk's state? A chunk that it still has to copy from another server takes part in steps:
  // its version goes on, and nobody may read it.
  bool filled() const { return filled_; }
  // What the server has of the chunk up to `version` counts no more.
  void Void(int64_t version) {
    filled_ = false;
    digested_.reset();
    version_ = std::max(version_.value_or(version), version);
  }
  // What the server has of the chunk is damaged, as `why` tells: it counts no more.
  void Damage(const absl::Status& why) {
    Void(*version_);
    damage_ = why;
  }
  // Why the server lacks a chunk that it once had; OK if that is not because of damage.
  const absl::Status& damage() const { return damage_; }
  // The chunk's state as of `version` is there, and no earlier version. `changed`: as below, of that state.
  void Fill(int64_t version, int64_t changed) {
    filled_ = true;
    damage_ = absl::OkStatus();
    version_ = first_version_ = version;
    changed_ = std::max(changed_, changed);
  }
  // Its state up to `version` is lost: nobody may read that version or an earlier one.
  void Lose(int64_t version) {
    version_ = version;
    first_version_ = version + 1;
  }
  // Its state at `version` is that which it has: no transaction up to there changes it. REQUIRES: version().
  void Reach(int64_t version) { version_ = std::max(*version_, version); }

  // The last transaction that changes it, or after a restart perhaps a later one, never an earlier one; -1: none.
  int64_t changed() const { return changed_; }
  void SetChanged(int64_t step) { changed_ = step; }

  // Bytes of NVMe that kept versions take here for the chunk, each state once.
  uint64_t kept_bytes() const { return kept_bytes_; }
  void SetKeptBytes(uint64_t bytes) { kept_bytes_ = bytes; }

  // From a step's decision to EndUpdate the intake's gradient is the update's.
  void AwaitUpdate() { ++updates_pending_; }
  bool awaits_update() const { return updates_pending_ > 0; }
  // From here on reads of version() may see the update's writes.
  void BeginUpdate() { update_runs_ = true; }
  bool update_runs() const { return update_runs_; }
  void EndUpdate(int64_t step) {
    version_ = step;
    update_runs_ = false;
    --updates_pending_;
  }

  // The update does not run.
  void PassOverUpdate(int64_t step) {
    Reach(step);
    update_runs_ = false;
    --updates_pending_;
  }

  // The newest digests that were taken of its state, right after the update to `version`.
  struct Digested {
    int64_t version = -1;
    storage::ArrayDigests arrays = {};
  };
  const std::optional<Digested>& digested() const { return digested_; }
  void SetDigested(const Digested& digested) { digested_ = digested; }

  Intake intake;
  ChunkLeases leases;  // none is taken while an update runs
  Waiting::Queue pulls;
  std::map<uint64_t, Waiting::Queue> pushes;  // by first element of the slice: a place has a single writer at a time

 private:
  model::Chunk layout_;
  std::optional<int64_t> version_;
  std::optional<int64_t> came_back_;
  bool filled_ = true;
  absl::Status damage_;
  int64_t first_version_ = 0;
  int64_t changed_ = -1;
  uint64_t kept_bytes_ = 0;
  bool update_runs_ = false;
  int updates_pending_ = 0;
  std::optional<Digested> digested_;
};

// The chunks of a job, in registration order.
using HeldChunks = std::vector<std::shared_ptr<HeldChunk>>;

// A slice whose bytes have come. The step machine hands it through to the journal with the slice's record.
struct PushedSlice {
  std::shared_ptr<HeldChunk> chunk;
  Intake::Receipt receipt;
  uint64_t bytes = 0;
  ReservedRoom::Lease room;     // in the journal
  bool wants_parity = false;    // the job has a log
  storage::BlockParity parity;  // of the bytes, if it is wanted
  uint32_t crc32c = 0;          // of the bytes, if their header has one, or the record keeps them
  bool appended = false;        // set by the journal: the log has the record, and owns the buffer until it is written
};

}  // namespace ballast::services
