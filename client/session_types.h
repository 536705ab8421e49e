// The types that Session's calls take and return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/base/access.h"
#include "ballast/proto/model/placement.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

using bf16 = uint16_t;  // bits of a bfloat16
// Blocks. Any thread may call it, also during other calls of the session. It may outlive the session, whose end ends
// the wait.
using Waiter = std::function<void()>;

// A tensor of the model. Tensors of one unit are gathered together (usually a layer).
struct TensorSpec {
  std::string name;
  std::string unit;
  std::vector<uint64_t> shape;
  uint32_t group = 0;                // parameter group: which hyper-parameters apply
  std::vector<std::string> aliases;  // further names of the same tensor (tied weights)
  // Dtype of the working parameters. Leave UNSPECIFIED to use the job's; any other dtype is refused (BAD_DTYPE).
  v1::Dtype dtype = v1::DTYPE_UNSPECIFIED;
  // Whether servers keep the tensor's state, or only values that no gradient changes. Used for a new job only, which
  // keeps it.
  v1::Frozen frozen = v1::FROZEN_UNSPECIFIED;
  // Who computes the tensor's updates (types.proto). Used for a new job only, too.
  v1::Assist assist = v1::ASSIST_UNSPECIFIED;
  // The order of the elements on the servers: equal blocks along one dimension, so that a cut of that dimension is few
  // ranges. Used for a new job only, which keeps it.
  model::Parts parts;
  // Split::kPlaced: the mesh of ranks that share the tensor with this rank, and how they cut it. Default: only this
  // rank has the tensor, whole. Ranks of other meshes may have the same tensor, too.
  std::optional<v1::MeshCuts> placement;
};

// How Open treats a job that exists, or one that does not.
enum class Resume {
  kNever,  // an existing job is an error
  kAuto,   // continue it if it exists, else create it
  kMust,   // a missing job is an error
};

// How units are divided among ranks. Belongs to the session, not to the job: the split may differ on resume.
enum class Split {
  kEven,  // each unit in world_size runs of about equal size, across tensors (FSDP1's flat parameter)
  // Each tensor as TensorSpec::placement says. Each rank names the tensors that it has a part of, so ranks may name
  // different ones: the job has all of them. Ranks with equal parts of a tensor are replicas and share the pushing;
  // their gradients must be equal.
  kPlaced,
};

struct SessionOptions {
  std::string job;
  Resume resume = Resume::kNever;
  uint32_t group_count = 1;
  uint64_t chunk_elements = uint64_t{1} << 20;  // only for a new job
  // Optimizer, dtypes of gradients and working parameters, formats of moments and masters. They belong to the job: a
  // resume with different ones is refused (BAD_SPEC). The default: AdamW, bf16, bf16, fp32. Masters as remainder need
  // bf16 working parameters, durability `none` and servers that keep working copies.
  kernels::OptimizerSpec optimizer;
  uint64_t seed = 0;  // for stochastic rounding of bf16 moments; used for a new job only, which keeps the seed
  // Which failures a decided step survives. Used for a new job only, which keeps the setting.
  // `step`: servers write every gradient to a log on their disks before they prepare a step, so that servers and
  // trainers may be killed at any moment. Needs an NVMe budget for the log and for the state.
  // `every-K`: servers pin every `pin_interval`-th version on their disks instead. When a server ends without being
  // asked to, the next group that opens the job gets the newest version that all servers have (restored_version). Needs
  // an NVMe budget for twice the version, besides the state, and all tensors named when the job is created.
  // `none`: the job's state is lost with a server that ends.
  v1::Durability durability = v1::DURABILITY_STEP;
  uint64_t pin_interval = 0;  // K of every-K, at least 1; 0 with another durability
  // How many servers have each chunk, with all its state: 1 to 4. More than one needs servers that etcd names, and
  // durability `step` or `none`. 0: as the job has it, and 1 for a new job. A job keeps its number unless an operator
  // changes it (`ballastctl replicas`). A step still needs all servers; if one stays silent, the job goes on without it
  // (failover_after).
  uint32_t replicas = 0;
  // For a job with copies: how long a server may be silent if others have all its chunks. After that, training goes on
  // without it: rank 0 changes the job's servers, and others copy what it had. The group waits for a server that is
  // registered and recovers. The same on all ranks.
  absl::Duration failover_after = absl::Seconds(5);
  Split split = Split::kEven;  // the same on all ranks
  // How long servers may take for a call, or for a step once all ranks have come, updates included. PinDurably and
  // Restore write (Restore also reads) all state within this time. How long ranks wait for each other is the
  // collective's timeout.
  absl::Duration step_timeout = absl::Seconds(120);
  // How long Open waits for servers that are down. It waits without limit for a server that is at work on a large job's
  // Open. The collective's timeout must be longer, because the ranks other than 0 wait meanwhile.
  absl::Duration open_timeout = absl::Seconds(30);
  // Files with this rank's identity and the expected identity of the servers. For Connect only, since Open takes
  // transports.
  model::Access access;
  // Bound on bytes of pushes in flight, and on bytes of pulls.
  uint64_t inflight_bytes_max = uint64_t{64} << 20;
  // Called with a line that says what the session waits for, when a wait exceeds two seconds. On rank 0 it also gets
  // lines about changes of the job's servers and, if says_whether_new, a line that says whether the job is new or
  // continues. Called on any thread. May be empty.
  std::function<void(const std::string&)> progress;
  bool says_whether_new = true;
  // Called twice a second, on another thread, while the session waits for servers. Returning true ends the session: the
  // waiting call, or Open, returns CANCELLED, and the requested change may or may not have happened. May be empty.
  std::function<bool()> interrupted;
};

// Hyper-parameters of a parameter group for one step, with torch.optim's meaning and AdamW's defaults.
struct GroupHyper {
  double learning_rate = 1e-3;
  double beta1 = 0.9;  // SGD: the momentum, if the optimizer has its buffer
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  // Options of single optimizers: refused where the optimizer lacks them.
  double dampening = 0;            // SGD with momentum
  double learning_rate_decay = 0;  // Adagrad
  double initial_accumulator = 0;  // Adagrad: the sum's value before a tensor's first update
  bool maximize = false;
  double beta3 = 0;    // AdEMAMix: of the slow mean in this step
  double alpha = 0;    // AdEMAMix: the slow mean's weight in this step
  double average = 0;  // schedule-free AdamW: this step's weight in the average, such as 1 / t
};

// torch.optim's defaults of each optimizer; for others the defaults of their papers.
GroupHyper DefaultHyper(kernels::OptimizerKind kind);

struct StepOptions {
  std::vector<GroupHyper> groups;  // group_count entries; the same on all ranks
  double gradient_scale = 1;       // pushed gradients are multiplied by this; the same on all ranks
  double max_norm = 0;             // clip the scaled global norm to this; 0 = no clipping
  // This rank's own bytes, such as its data cursor, which come back on resume. At most 64 KiB for all ranks together: 8
  // KiB a rank at 8 ranks, 128 bytes a rank at 512. Above that, all ranks get INVALID_ARGUMENT (BAD_REQUEST) before
  // anything is pushed.
  std::string blob;
};

struct StepReport {
  int64_t version = 0;
  bool skipped = false;  // some gradient was Inf or NaN: nothing was updated, on any server
  double norm = 0;       // global norm of scaled gradients, before clipping
};

// A version that the servers keep. The number alone does not identify its state: a job that is dropped and made again
// counts from 0, and a job that goes on from an older copy of its servers' directories uses numbers again.
struct KeptVersion {
  int64_t version = 0;
  // The job's life; a job that is dropped and made again has another. Each server gives the job a life, and this is the
  // XOR of all. 0: not known.
  uint64_t life = 0;
  // The epoch in which the version was decided. No two groups share an epoch. Counter 0: not known.
  v1::Epoch decided_by = {};
};

// Seconds and bytes since Open.
struct SessionStats {
  double pull_seconds = 0;    // blocked on pulls
  double gather_seconds = 0;  // in all-gathers
  double push_seconds = 0;    // blocked on pushes
  double seal_seconds = 0;    // in Step: exchange, seal, decide
  uint64_t pulled_bytes = 0;  // copied, also for leases
  uint64_t leased_bytes = 0;  // read where a server has them
  uint64_t pushed_bytes = 0;
  uint64_t gathered_bytes = 0;
};

// The arrays of a tensor that Read can read. AdamW and Adam have the moments m, v and with amsgrad the largest v; SGD
// with momentum has its buffer; Adagrad has v; Lion has m; AdEMAMix has m, v and the slow mean;
// schedule-free AdamW has z - y and v.
enum class Content { kWorking, kMaster, kMoment1, kMoment2, kMoment3 };

// State of one tensor, as CommitState writes it.
struct TensorState {
  std::string tensor;
  // At least this rank's part of the tensor. Borrowed until return.
  absl::Span<const float> values;
  // Where `values` lie in the tensor, in ascending order. Empty: `values` are the whole tensor, row-major.
  std::vector<model::BoxRun> runs;
  uint64_t steps = 0;  // number of updates that the tensor counts as having had
};

// How long pushed memory that has an owner stays with it.
enum class Keep {
  // Until the servers have copied it. This takes the least memory of the trainer.
  kUntilCopied,
  // Until the step that takes it was applied or skipped, or until Drop. A server in this process then does not copy a
  // chunk's gradient that lies in one run and is all this rank's, if the server has no GPU and no log or spill takes
  // the job's gradients. It copies other slices.
  kUntilApplied,
};

// Elements [begin, end) of a unit's flat space.
struct UnitRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Runs of a tensor with at most this many elements between them are read together, because separate calls would cost
// more.
inline constexpr uint64_t kGapElementsMax = 8192;

// Elements of a unit, and the place for them: as many elements of the job's working dtype. With kE4m3Blocks the range
// begins at a multiple of kernels::kE4m3Block, and the pull brings whole blocks.
struct PullRun {
  UnitRange range;
  absl::Span<std::byte> to;
};

// Elements of a unit and where to read them, in the job's working dtype.
struct LeasedPart {
  UnitRange range;
  absl::Span<const std::byte> bytes;
};

// Some elements of this rank's part of a unit's gradient.
struct GradientRun {
  uint64_t begin = 0;  // in its owned ranges, laid end to end
  absl::Span<const std::byte> elements;
};

}  // namespace ballast::client
