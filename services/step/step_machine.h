// One job's step transaction on one server, without I/O. All rules that a crash, a zombie or a lost message could break
// are here, and nothing else.
//
// Each request is evaluated against the present state: the machine refuses, answers, or returns nullopt. nullopt means
// that the request has to wait: the caller evaluates the same request again after Synced() or another call changed the
// state. So a lost answer, a doubled request and a waiting request are the same case.
//
// Threads: none of its own; the caller serialises calls (one lock per job). Never blocks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ballast/proto/base/shared_message.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/v1/log.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// The records of a log, kept in the order of Append (rule 2).
struct PromiseRecord {
  v1::Epoch epoch;
};
struct OpenRecord {
  std::shared_ptr<const v1::OpenRequest> open;  // whole
};
struct PushedSlice;  // the bytes of a slice, which are the journal's
struct SliceRecord {
  v1::PushRequest header;        // payload empty
  PushedSlice* bytes = nullptr;  // borrowed, as EndPush had it; null in a replay
};
struct PreparedStepRecord {
  v1::PreparedRecord prepared;
};
struct DecisionRecord {
  v1::Decision decision;
};
// Sums up all records before it, slices excepted: a log may begin with a snapshot.
struct SnapshotRecord {
  v1::LogSnapshot snapshot;
};
using StepRecord =
    std::variant<PromiseRecord, OpenRecord, SliceRecord, PreparedStepRecord, DecisionRecord, SnapshotRecord>;

// The machine's journal and its host. The machine calls their methods from inside its own methods, so they must not
// call the machine.

// Where the machine's records go.
class StepJournal {
 public:
  virtual ~StepJournal() = default;
  // Adds to the end of the log, volatile until synced. Returns its sequence number (increasing, from 1).
  virtual uint64_t Append(const StepRecord& record) = 0;
  // Starts to make all records up to `lsn` durable. Does not report completion itself: the caller calls
  // StepMachine::Synced later.
  virtual void Sync(uint64_t lsn) = 0;
};

// What an Open changes besides the plan.
struct OpenChange {
  // Slices and attempts of step base + 1 stay (rule 26). Otherwise all provisional slices are void.
  bool keeps_slices = false;
  // The server begins at the Open's base (rule 25): nothing that it had of the job counts any more.
  bool forgets = false;
};

// What the machine's decisions do to a job.
class StepHost {
 public:
  virtual ~StepHost() = default;
  // Norm of a chunk of this server, without segments of absent tensors. All required gradient slices of the chunk have
  // been received.
  virtual v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) = 0;
  // Step `prepared.step` is decided: apply it to the chunks. Called once per step, in order.
  virtual void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) = 0;
  // A new epoch is open: provisional slices of older epochs are void unless `change` keeps them, chunks of a longer
  // spec or of another table may have to be added. With OpenRequest::restores, the chunks' content is void until the
  // restore is applied. Chunks that the plan does not give to this server any more, and those of an Open that forgets,
  // stay on the disk until TableDurable.
  virtual void Opened(std::shared_ptr<const model::EpochPlan> plan, const OpenChange& change) = 0;
  // Can this host import chunks and give chunks up? If not, the machine refuses an Open that asks for it (UNSUPPORTED).
  virtual bool ChangesChunks() const { return false; }
  // Can this host keep slices over an Open? If not, every Open voids them.
  virtual bool KeepsSlices() const { return false; }
  // The Open of another table is durable. The host may now free what it had of chunks that the plan no longer gives to
  // this server, or of all chunks if the Open forgets. From here on unfilled chunks may be imported. Only for hosts
  // that change chunks. Not called in a replay: after the last record the host frees what the plan does not give to
  // this server, and states of unfilled chunks that MarkFilled refuses.
  virtual void TableDurable() {}
  // Adds what the host tells rank 0 along with the prepared record of `step`, the step in flight. No rule depends on
  // it.
  virtual void AddDigests(int64_t step, v1::SealResponse* answer) {}
  // Pin `version`, the last version that Apply was called for (DURABILITY_EVERY_K). Comes after PinChanged for the pins
  // that are not needed any more.
  virtual void PinDue(int64_t version) = 0;
  // The flags `automatic` and `requested` of a durable pin have changed: record them. If both are false the pin goes,
  // and the machine will not name it again.
  virtual void PinChanged(const v1::PinnedVersion& pin) = 0;
};

// nullopt: not yet; evaluate the same request again after the state changed.
template <typename T>
using Outcome = absl::StatusOr<std::optional<T>>;

class StepMachine {
 public:
  // Borrows `journal` and `host`. `disk`: Member.disk of this server; a table that means another one is refused.
  StepMachine(std::string server_id, uint64_t disk, StepJournal* journal, StepHost* host);
  ~StepMachine();

  // Recovery: replays a durable record. Call with all records in order, before any other call. Replayed decisions call
  // host->Apply again. DATA_LOSS (DIVERGED) if records are missing.
  absl::Status Replay(const StepRecord& record);
  // After the last record: forgets a slice of the undecided step because its bytes are lost. The rank that pushed the
  // slice is asked for it again. Not for slices of a prepared step.
  void Lose(const v1::PushRequest& header);
  // Whether this slice counts as received, in its attempt, for the step in flight. An Open voids slices, or keeps them.
  bool Holds(const v1::PushRequest& header) const;
  // A snapshot for the log to begin with from here on. Not from within methods of StepJournal and StepHost.
  v1::LogSnapshot Snapshot() const;

  v1::GetJobResponse Describe() const;
  // As Describe, without `open`, which may have 4 MiB: plan() has it, and the caller copies it outside the lock.
  v1::GetJobResponse DescribeProgress() const;
  // The answer's job is without `open`.
  Outcome<v1::FenceResponse> Fence(const v1::FenceRequest& request);
  // `plan`: of this request, if the caller has made it, which for a large job takes long; null lets the machine do so.
  Outcome<v1::OpenResponse> Open(const v1::OpenRequest& request,
                                 std::shared_ptr<const model::EpochPlan> plan = nullptr);

  // Whether this Open has the server begin at its base, and forget what it has of the job (rule 25).
  bool Forgets(const v1::OpenRequest& request) const;

  // Rule 3 in two halves, so that the payload is copied outside the lock. Admit checks everything but the bytes:
  //   kHeld: this very slice is there already, or is not needed, answer OK;  kReceive: copy the bytes, then call
  //   EndPush; kWaits: the slice may come, but `has_room(its index in the plan)` says that there is no room for it now.
  //   Nothing has changed.
  // A push that is refused, or held already, never waits for room. From kReceive to EndPush the slice's place belongs
  // to this push: a second push of the slice is UNAVAILABLE (BUSY).
  enum class Admission { kHeld, kReceive, kWaits };
  absl::StatusOr<Admission> Admit(const v1::PushRequest& header, absl::FunctionRef<bool(uint32_t slice)> has_room);
  // `received`: OK if all bytes came and match their digest. In this case the push is checked again, and refused if a
  // fence, a newer attempt or the prepared record overtook it. `bytes` go to the journal with the slice's record.
  absl::Status EndPush(const v1::PushRequest& header, const absl::Status& received, PushedSlice* bytes = nullptr);

  absl::StatusOr<v1::NormResponse> Norm(const v1::NormRequest& request);
  // Null if the step is not prepared, or not durably. A waiting seal that is Filed() may drop header and blobs, and be
  // evaluated again without them. A step has few answer messages, which its ranks share.
  absl::StatusOr<model::SealAnswer> Seal(const v1::SealRequest& request);
  bool Filed(const v1::SealRequest& request) const;
  // Seal's answer for a caller that waits no longer: kPending with the missing slices and unsealed ranks, of which it
  // names a bounded number.
  v1::SealResponse Pending(uint32_t asker) const;
  // False once different plans have ended the epoch: the machine then refuses every seal of it.
  bool seals_agree() const;
  // Ranks that have not sealed the step in flight: how many, and at most `max` of them, ascending. None before the
  // first Open.
  uint32_t unsealed_count() const;
  std::vector<uint32_t> UnsealedRanks(size_t max) const;
  // Whether the step in flight is prepared here, durably or not yet; whether durably.
  bool prepared() const;
  bool prepared_durably() const;
  absl::StatusOr<v1::CommitResponse> Commit(const v1::CommitRequest& request);

  // The log is durable up to `lsn`.
  void Synced(uint64_t lsn);

  // For requests outside of a step. FAILED_PRECONDITION: STALE_EPOCH, or NOT_OPEN if the epoch was not promised here
  // (CheckPromised) or is not open (CheckEpoch); STATE_LOST if the epoch is from before the loss.
  absl::Status CheckPromised(const v1::Epoch& epoch) const;
  absl::Status CheckEpoch(const v1::Epoch& epoch) const;

  // Rule 28. The chunks that this server's table gives it and that it lacks, each with the least version that its
  // import may have. Slices, coverage and norms pass over them. A step that is prepared without all slices of such a
  // chunk raises its least version.
  const std::map<uint64_t, int64_t>& unfilled() const;
  // Changes whenever the set of unfilled chunks changes, except by MarkFilled alone.
  uint64_t unfilled_changes() const;
  // Whether another server holds the chunk, by the table of the open epoch; whether this server does.
  bool HasOtherHolder(uint64_t chunk) const;
  bool IsHolder(uint64_t chunk) const;
  // Rule 33: this server's state of the chunk is damaged and no longer counts, for good. From here on the chunk is
  // unfilled. `version`: the last step that it had, or that was passed over. A restarted server calls this, after the
  // last Replay, for each chunk that the log calls filled and of which its disk has no state that counts.
  // REQUIRES: HasOtherHolder.
  void MarkUnfilled(uint64_t chunk, int64_t version);
  // Whether imports may begin: the Open that named these chunks is durable.
  bool may_import() const;
  // May the chunk's state, imported from a holder as of `version`, become durable here? OK also if the chunk is filled.
  // FAILED_PRECONDITION: (VERSION_GONE) import again, as of the least version or later; (BEHIND) the version is not
  // committed here yet: ask again after its commit. UNAVAILABLE (BUSY): ask again after a sync.
  absl::Status CheckImport(uint64_t chunk, int64_t version);
  // The chunk's state as of `version`, for which CheckImport was OK before it was written, is durable, with the
  // versions that the server keeps. The host has applied no step after `version` without this chunk. From here on the
  // chunk is like any other. A restarted server calls this, after the last Replay, for each unfilled chunk of which its
  // disk has a state. FAILED_PRECONDITION (VERSION_GONE): the state is too old, and void.
  absl::Status MarkFilled(uint64_t chunk, int64_t version);

  // The content of a pin of `committed`, without chunks. REQUIRES: committed >= 0.
  v1::PinnedVersion DescribeVersion() const;
  // `pin`, with its chunks, is durable on this server: from here on it may be restored. In recovery: call before the
  // first Replay.
  void Pinned(v1::PinnedVersion pin);
  // No client asks for this version any more. An automatic pin stays unless it is unreadable. Any other pin goes:
  // FindPin is null then, and the version may be taken off the disk. If the server's last automatic pin goes, a pin of
  // `committed` replaces it. FAILED_PRECONDITION: (BUSY) a prepared restore needs the pin and may be decided, or the
  // pin is automatic, unreadable and of `committed`; (STATE_LOST) the state is lost, and a restore may need this pin.
  absl::Status Unpin(int64_t version, bool unreadable = false);
  // Null if the version is not pinned.
  const v1::PinnedVersion* FindPin(int64_t version) const;

  // Durability every-K (rule 14): the server was restarted and lost its state; `open` is its last durable Open. Call
  // after Pinned and the replay of the promise, instead of replaying any other record.
  absl::Status LoseState(const v1::OpenRequest& open);
  bool state_lost() const;
  const v1::Epoch& promised() const;
  // The versions that are durable here.
  const std::map<int64_t, v1::PinnedVersion>& pins() const;
  // OK, or the reason why nothing may be read or pinned.
  absl::Status StateStatus() const;
  int64_t committed() const;
  uint64_t skipped_steps() const;
  // Optimizer step count t per tensor, registration order.
  absl::Span<const uint64_t> tensor_steps() const;
  // The open epoch's plan; null before the first Open.
  const model::EpochPlan* plan() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::services
