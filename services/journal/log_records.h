// The records of a job's gradient log: their types on the disk, how they are encoded, and how large they may become.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {

// Numbers on disk: never reused for a different record.
enum class RecordType : uint32_t { kPromise = 1, kOpen = 2, kSlice = 3, kPrepared = 4, kDecision = 5, kSnapshot = 6 };

storage::LogRecord EncodeRecord(const StepRecord& record);
// DATA_LOSS (CHECKSUM) if this version knows no such record.
absl::StatusOr<StepRecord> DecodeRecord(const storage::ReadRecord& record);

// How far a log's records go: the last decided step (-1: none), and whether the step behind is prepared.
struct LoggedSteps {
  int64_t committed = -1;
  bool prepared = false;

  void Add(const StepRecord& record);
  bool any() const { return committed >= 0 || prepared; }
};

// Writes the last transaction that changed each chunk, in registration order (-1: none), into `snapshot`, whose
// `committed` must be set.
void EncodeChanged(absl::Span<const int64_t> changed, v1::LogSnapshot* snapshot);
// For a server with `chunks` chunks. DATA_LOSS (DIVERGED) if the snapshot has a different number of chunks, or a change
// outside -1 to its `committed`.
absl::StatusOr<std::vector<int64_t>> DecodeChanged(const v1::LogSnapshot& snapshot, uint64_t chunks);

// Bound of a decision with all ranks' blobs.
inline constexpr uint64_t kDecisionBytesMax = uint64_t{128} << 10;
// Bound of a snapshot of the job that `plan` opens, on a server with these chunks (ids).
uint64_t SnapshotBytesMax(const model::EpochPlan& plan, absl::Span<const uint64_t> chunks);
// Bound of the chunk's norms in a prepared record.
uint64_t NormBytesMax(const model::Chunk& chunk);

}  // namespace ballast::services
