// The form of all errors: an absl::Status with a stable reason, what was expected, what came, and the fix.
//
// The reason travels as a payload of the status, and over gRPC as google.rpc.ErrorInfo (see services/gateway and the
// client's gRPC transport).
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast::model {

// Reasons, stable across releases: programs may compare them. The comment gives the usual code. The code says whether
// to try again; the reason says what happened.
inline constexpr char kStaleEpoch[] = "STALE_EPOCH";  // FAILED_PRECONDITION: a newer group fenced
inline constexpr char kNotOpen[] = "NOT_OPEN";        // FAILED_PRECONDITION: promised, not yet opened: send Open again
inline constexpr char kBehind[] = "BEHIND";           // FAILED_PRECONDITION: the server misses a commit: resend Commit
inline constexpr char kOldStep[] = "OLD_STEP";        // FAILED_PRECONDITION: the step is decided already
inline constexpr char kPlanMismatch[] = "PLAN_MISMATCH";      // FAILED_PRECONDITION: ranks sealed different plans
inline constexpr char kStaleAttempt[] = "STALE_ATTEMPT";      // ABORTED
inline constexpr char kAlreadySealed[] = "ALREADY_SEALED";    // FAILED_PRECONDITION
inline constexpr char kDigestConflict[] = "DIGEST_CONFLICT";  // ALREADY_EXISTS: same slice, different bytes
inline constexpr char kUnknownJob[] = "UNKNOWN_JOB";          // NOT_FOUND
inline constexpr char kUnknownUnit[] = "UNKNOWN_UNIT";        // NOT_FOUND
inline constexpr char kUnknownTensor[] = "UNKNOWN_TENSOR";    // NOT_FOUND
inline constexpr char kJobExists[] = "JOB_EXISTS";            // ALREADY_EXISTS: see resume
inline constexpr char kJobMissing[] = "JOB_MISSING";          // NOT_FOUND: resume=must and no such job
inline constexpr char kBadRange[] = "BAD_RANGE";              // INVALID_ARGUMENT
inline constexpr char kOverlap[] = "OVERLAPPING_RANGES";      // INVALID_ARGUMENT
inline constexpr char kBadLength[] = "BAD_LENGTH";            // INVALID_ARGUMENT
inline constexpr char kBadDtype[] = "BAD_DTYPE";              // INVALID_ARGUMENT
inline constexpr char kBadSpec[] = "BAD_SPEC";                // INVALID_ARGUMENT
inline constexpr char kTensorsDiffer[] = "TENSORS_DIFFER";    // INVALID_ARGUMENT: has details, see below
inline constexpr char kBadRequest[] = "BAD_REQUEST";          // INVALID_ARGUMENT
// FAILED_PRECONDITION from a trainer, INVALID_ARGUMENT from a server, UNAVAILABLE for a call of a group at work:
// trainers and servers run different versions
inline constexpr char kVersionsDiffer[] = "VERSIONS_DIFFER";
// FAILED_PRECONDITION: a later version has written what this one would have to use; nothing was changed
inline constexpr char kLaterVersion[] = "LATER_VERSION";
inline constexpr char kBadConfig[] = "BAD_CONFIG";  // INVALID_ARGUMENT
// FAILED_PRECONDITION at a start, UNAVAILABLE later: another server answers than was meant, perhaps under the same id
inline constexpr char kOtherServer[] = "OTHER_SERVER";
inline constexpr char kKeyLost[] = "KEY_LOST";  // FAILED_PRECONDITION: etcd lost a job's table, or has an older one
inline constexpr char kIncomplete[] = "INCOMPLETE";     // FAILED_PRECONDITION: norm asked before all slices came
inline constexpr char kVersionGone[] = "VERSION_GONE";  // FAILED_PRECONDITION: the chunk is past the version
inline constexpr char kNotFilled[] = "NOT_FILLED";      // FAILED_PRECONDITION: ask another server that holds the chunk
inline constexpr char kChecksum[] = "CHECKSUM";         // DATA_LOSS in a tier; UNAVAILABLE on the wire
inline constexpr char kStateLost[] = "STATE_LOST";      // DATA_LOSS, FAILED_PRECONDITION, ABORTED: says how to go on
inline constexpr char kDiverged[] = "DIVERGED";         // DATA_LOSS: servers disagree about a decided step
inline constexpr char kBudget[] = "BUDGET";             // RESOURCE_EXHAUSTED: says how many bytes are short, and where
inline constexpr char kLimit[] = "LIMIT";               // RESOURCE_EXHAUSTED: names the system's limit
inline constexpr char kDiskFull[] = "DISK_FULL";        // RESOURCE_EXHAUSTED: within the budget, but the disk is full
inline constexpr char kBusy[] = "BUSY";                 // UNAVAILABLE: send the same request again
inline constexpr char kServerDown[] = "SERVER_DOWN";    // UNAVAILABLE
inline constexpr char kMemoryGone[] = "MEMORY_GONE";    // UNAVAILABLE: the server has lost memory shared with a client
inline constexpr char kRankMissing[] = "RANK_MISSING";  // DEADLINE_EXCEEDED: names the rank
inline constexpr char kRankTaken[] = "RANK_TAKEN";      // ALREADY_EXISTS
inline constexpr char kIo[] = "IO";                     // INTERNAL or DATA_LOSS
inline constexpr char kWrongBits[] = "WRONG_BITS";      // INTERNAL: a processor failed the self-test of the kernels
inline constexpr char kNoIdentity[] = "NO_IDENTITY";  // UNAUTHENTICATED: no certificate or token that the server knows
inline constexpr char kTls[] = "TLS";  // FAILED_PRECONDITION: certificates of client and server do not let them meet
inline constexpr char kNoRight[] = "NO_RIGHT";  // PERMISSION_DENIED: the server's rights file does not grant it
inline constexpr char kQuota[] = "QUOTA";       // RESOURCE_EXHAUSTED: says what the identity asked, holds and may
inline constexpr char kUnsupported[] = "UNSUPPORTED";  // UNIMPLEMENTED

// How an operator drops a job. For messages of servers, which cannot tell whether they are in a trainer's process.
inline constexpr char kHowToRestoreKey[] =
    "If every server of the job runs, `ballastctl members --restore --job NAME` writes the key again";
inline constexpr char kHowToDrop[] = "`ballastctl drop`, or in Python `ballast.drop(name)` of a trainer's own server";

// Builds a status with `reason` attached. `message` says what was expected, what came, and the fix.
absl::Status Error(absl::StatusCode code, absl::string_view reason, absl::string_view message);

// Returns the reason attached to `status`, or "".
std::string ReasonOf(const absl::Status& status);

// Fields of an error for programs, which must not read messages: ErrorInfo's metadata.
using Details = std::map<std::string, std::string>;
// Details of TENSORS_DIFFER: names that the job has and the session lacks (kMissing), and the reverse (kUnknown).
// Names are separated by NUL.
inline constexpr char kMissing[] = "missing";
inline constexpr char kUnknown[] = "unknown";
// Details of STALE_EPOCH: the promised epoch as "counter.nonce", and its group (OpenRequest.group) in hexadecimal
// digits, empty if the server does not know it.
inline constexpr char kPromised[] = "promised";
inline constexpr char kGroup[] = "group";
// Detail of NOT_FILLED, and of a job that ends for it: the chunk whose state the server has lost.
inline constexpr char kLostChunk[] = "lost_chunk";
// Detail of all that a server says of a job which has stopped there: its disk failed or is full, or state is damaged.
inline constexpr char kStopped[] = "stopped";
void SetDetail(const std::string& key, absl::string_view value, absl::Status* status);
Details DetailsOf(const absl::Status& status);
// Whether the server that says so is of no use to the job, though it lives: the job has stopped there, or it has
// nothing of the job.
bool IsWithoutJob(const absl::Status& status);

// `status` with `context` and ": " put before its message; reason, details and code stay.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

}  // namespace ballast::model

#define BALLAST_CONCAT_INNER(a, b) a##b
#define BALLAST_CONCAT(a, b) BALLAST_CONCAT_INNER(a, b)

#define BALLAST_RETURN_IF_ERROR(expr)                                                      \
  do {                                                                                     \
    if (absl::Status ballast_status = (expr); !ballast_status.ok()) return ballast_status; \
  } while (false)

#define BALLAST_ASSIGN_OR_RETURN(lhs, expr)                                                               \
  auto BALLAST_CONCAT(ballast_or_, __LINE__) = (expr);                                                    \
  if (!BALLAST_CONCAT(ballast_or_, __LINE__).ok()) return BALLAST_CONCAT(ballast_or_, __LINE__).status(); \
  lhs = std::move(*BALLAST_CONCAT(ballast_or_, __LINE__))
