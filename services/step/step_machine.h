// One job's step transaction on one server, without I/O: every rule that can be broken by a crash, a zombie or a lost
// message lives here, and nothing else does.
//
// Each request is evaluated against the state at that moment: it is refused, answered, or has to wait (nullopt), in
// which case the caller evaluates the same request again after Synced() or any other call changed the state. So a lost
// answer, a doubled request and a waiting one are the same case.
//
// Threads: none of its own; the caller serialises calls (one lock per job). Never blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/v1/log.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// The records a log keeps, in the order they were appended (rule 2).
struct PromiseRecord {
  v1::Epoch epoch;
};
struct OpenRecord {
  v1::OpenRequest open;
};
struct SliceRecord {
  v1::PushRequest header;  // payload empty: the bytes are the host's
};
struct PreparedStepRecord {
  v1::PreparedRecord prepared;
};
struct DecisionRecord {
  v1::Decision decision;
};
// All that the records before it told, slices excepted: a log may begin with it.
struct SnapshotRecord {
  v1::LogSnapshot snapshot;
};
using StepRecord =
    std::variant<PromiseRecord, OpenRecord, SliceRecord, PreparedStepRecord, DecisionRecord, SnapshotRecord>;

// What the machine asks of its surroundings. Calls come from inside the machine's methods and must not call back into
// it, except that Sync may call nothing either: completion is reported later through StepMachine::Synced.
class StepHost {
 public:
  virtual ~StepHost() = default;
  // Adds to the end of the log, volatile until synced. Returns its sequence number (increasing, from 1).
  virtual uint64_t Append(const StepRecord& record) = 0;
  // Asks that all records up to `lsn` become durable.
  virtual void Sync(uint64_t lsn) = 0;
  // Norm of a chunk of this server whose required gradient slices have all been received; segments of absent tensors
  // left out.
  virtual v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) = 0;
  // Step `prepared.step` is decided: apply it to the chunks. Called once per step, in order.
  virtual void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) = 0;
  // A new epoch is open: provisional slices of older ones are void, chunks of a longer spec may have to be added. With
  // OpenRequest::restores, what the chunks hold counts for nothing until that restore is applied.
  virtual void Opened(const model::EpochPlan& plan) = 0;
  // Version `version`, which Apply has just been told of, is to be pinned (DURABILITY_EVERY_K). After PinChanged of
  // those that it makes needless.
  virtual void PinDue(int64_t version) = 0;
  // Who wants a durable pin has changed: it is to be kept so. If nobody does it goes, and will not be asked for again.
  virtual void PinChanged(const v1::PinnedVersion& pin) = 0;
};

// nullopt: not yet; evaluate the same request again after the state changed.
template <typename T>
using Outcome = absl::StatusOr<std::optional<T>>;

class StepMachine {
 public:
  // Borrows `host`.
  StepMachine(std::string server_id, StepHost* host);
  ~StepMachine();

  // Recovery: records that were durable, in order, before any other call. Decisions replayed here call host->Apply
  // again. DATA_LOSS (DIVERGED) if records are missing.
  absl::Status Replay(const StepRecord& record);
  // After the last record, of a slice of the step that is not decided: its bytes are lost, so it is not held, and its
  // rank is asked for it again. Not for slices that the prepared step stands on.
  void Lose(const v1::PushRequest& header);
  // What a log may begin with from here on, for replays to come. Not from within a call of StepHost.
  v1::LogSnapshot Snapshot() const;

  v1::GetJobResponse Describe() const;
  Outcome<v1::FenceResponse> Fence(const v1::FenceRequest& request);
  Outcome<v1::OpenResponse> Open(const v1::OpenRequest& request);

  // Rule 3 in two halves, so that the payload is copied outside the lock. BeginPush checks everything but the bytes:
  //   kHeld: this very slice is there already, answer OK;  kReceive: copy the bytes, then call EndPush.
  // From BeginPush to EndPush the slice's place belongs to that push: another push of it is UNAVAILABLE (BUSY).
  enum class Admission { kHeld, kReceive };
  // BeginPush's answer, without taking the place: who must wait for room asks first whether it would be refused.
  absl::StatusOr<Admission> CheckPush(const v1::PushRequest& header) const;
  absl::StatusOr<Admission> BeginPush(const v1::PushRequest& header);
  // `received`: whether all bytes came and match their digest. On OK, what a fence or a newer attempt overtook is
  // refused here.
  absl::Status EndPush(const v1::PushRequest& header, const absl::Status& received);

  absl::StatusOr<v1::NormResponse> Norm(const v1::NormRequest& request);
  Outcome<v1::SealResponse> Seal(const v1::SealRequest& request);
  // What Seal would answer now if it may not wait: kPending with what is missing.
  v1::SealResponse Pending(uint32_t asker) const;
  absl::StatusOr<v1::CommitResponse> Commit(const v1::CommitRequest& request);

  // The log is durable up to `lsn`.
  void Synced(uint64_t lsn);

  // For what is no part of a step. FAILED_PRECONDITION: STALE_EPOCH, or NOT_OPEN if it was not promised here / is not
  // open.
  absl::Status CheckPromised(const v1::Epoch& epoch) const;
  absl::Status CheckEpoch(const v1::Epoch& epoch) const;

  // What a pin of `committed` keeps, chunks excepted. REQUIRES: committed >= 0.
  v1::PinnedVersion DescribeVersion() const;
  // `pin` is durable on this server, chunks and all: it may be restored from here on. In recovery: before the first
  // Replay.
  void Pinned(v1::PinnedVersion pin);
  // Nobody asks for the version any more. If the server itself does not want it either (FindPin is null then), it may
  // be taken off the disk; an unreadable one nobody wants, and the server's own is replaced by one of `committed`.
  // FAILED_PRECONDITION: (BUSY) a prepared restore needs it, and may be decided, or it is the own one and of
  // `committed`; (STATE_LOST) the state is lost, and this may be what it is restored from.
  absl::Status Unpin(int64_t version, bool unreadable = false);
  // Null if it is not pinned.
  const v1::PinnedVersion* FindPin(int64_t version) const;

  // Durability every-K (rule 14). After Pinned and the replay of a promise, instead of any other record: the server was
  // restarted, and had prepared steps in the epoch of `open`, or in one that followed it.
  absl::Status LoseState(const v1::OpenRequest& open);
  bool state_lost() const;
  // OK, or why nothing may be read or pinned.
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
