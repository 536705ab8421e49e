// A step machine's state, and the checks and transitions shared by its verbs. Private to services/step.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/step/seal_ledger.h"
#include "ballast/services/step/slice_ledger.h"
#include "ballast/services/step/step_machine.h"

namespace ballast::services {

inline std::string Show(const v1::Epoch& epoch) { return absl::StrCat(epoch.counter(), ".", epoch.nonce()); }

// Step, epoch and attempt of a request, record or decision, for messages.
template <typename T>
std::string ShowKey(const T& t) {
  return absl::StrCat("step ", t.step(), " of epoch ", Show(t.epoch()), ", attempt ", t.attempt());
}

// Do two messages have the same key? The plan hash alone would not do: the hash does not cover the epoch.
template <typename A, typename B>
bool SameKey(const A& a, const B& b) {
  return a.step() == b.step() && model::Compare(a.epoch(), b.epoch()) == 0 && a.attempt() == b.attempt() &&
         a.plan_hash() == b.plan_hash();
}

inline absl::Status Precondition(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kFailedPrecondition, reason, message);
}
inline absl::Status BadRequest(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest, message);
}
inline absl::Status Diverged(absl::string_view message) {
  return model::Error(absl::StatusCode::kDataLoss, model::kDiverged, message);
}

struct StepMachine::Impl {
  Impl(std::string server_id, uint64_t own_disk, StepJournal* step_journal, StepHost* step_host)
      : id(std::move(server_id)), disk(own_disk), journal(step_journal), host(step_host) {}

  // Of the group that promised or opened the newest epoch; empty if nobody told.
  const std::string& PromisedGroup() const;
  // STALE_EPOCH, with the promised epoch and its group as details (rule 30).
  absl::Status Stale(absl::string_view message) const;
  absl::Status CheckPromised(const v1::Epoch& epoch) const;
  absl::Status CheckEpoch(const v1::Epoch& epoch) const;
  absl::Status NotOpen(const v1::Epoch& epoch) const;
  // Whether the last decision is the request's step, and older than the open epoch, which continues the step's group.
  bool WasDecidedBefore(const v1::SealRequest& request) const;
  absl::Status CheckStep(int64_t step) const;
  absl::Status CheckAttempt(uint32_t rank, uint64_t attempt) const;
  absl::Status CheckRank(uint32_t rank) const;
  void RaiseAttempt(uint32_t rank, uint64_t attempt);
  bool Durable(uint64_t lsn) const { return lsn <= synced; }
  // Rule 3's conditions on epoch, step, rank and attempt of a push: checked before the bytes come and again after.
  absl::Status CheckPush(const v1::PushRequest& header) const;
  // Rule 6: writes the prepared record once the step is complete.
  void TryPrepare();
  // Rule 8: decides the step of this server's prepared record.
  void Decide(const v1::Decision& decision, bool log);
  // Updates the tensors' step counts for a decided step.
  void CountSteps(const v1::PreparedRecord& record, bool skip);
  absl::Status CheckBase(const v1::OpenRequest& request) const;
  // Rules 13 and 14: may this transaction be sealed and prepared here? Only restores are refused, and while the state
  // is lost every transaction but the epoch's restore.
  absl::Status CheckRestore(const v1::StepHeader& header,
                            const google::protobuf::RepeatedPtrField<std::string>& blobs) const;
  // Rule 14: may the group begin anew from the base of `request`?
  absl::Status CheckStartsAnew(const v1::OpenRequest& request) const;
  absl::Status StateLost() const;
  // After a decision: drops automatic pins that no group will restore, or their mark if a client asked for the pin.
  void ReleasePins(const v1::StepHeader& header);
  // After an automatic pin was given up: pins the current version, whose number bounds the prepared steps after a
  // restart.
  void ReplacePin();
  // `since`: the transaction that made the version the one to go back to.
  void MakeAutomatic(int64_t version, int64_t since);
  // Makes `kept` the only automatic pin.
  void KeepOneAutomatic(int64_t kept, int64_t since);
  uint64_t pin_interval() const { return plan->open().spec().pin_interval(); }
  // What an Open changes of this server's chunks.
  struct Change {
    OpenChange told;
    bool table = false;                    // another table: the Open is synced
    std::map<uint64_t, int64_t> unfilled;  // chunk -> least version of its import
    uint64_t given_up = 0;                 // chunks
  };
  // Is this server at the Open's base, or one step before it and has prepared that one?
  bool Fits(const v1::OpenRequest& request) const;
  // Rules 25 and 26. DATA_LOSS (DIVERGED) if a holder lacks a chunk. `replays`: the log shows that it has its chunks.
  void SetTold(const v1::OpenRequest& open, bool forgets, Change* change) const;
  // The fence had its answer before this holder found the chunk damaged.
  bool MayHaveLost(uint64_t chunk, absl::Span<const uint32_t> holders) const;
  absl::StatusOr<Change> ChangeTo(const model::EpochPlan& next, uint32_t member, bool forgets, bool replays) const;
  bool Begins(const v1::OpenRequest& open) const;
  // The answer to an Open of the epoch that is open.
  Outcome<v1::OpenResponse> OpenAgain(const v1::OpenRequest& request) const;
  absl::Status CheckOwnDisk(const v1::OpenRequest& request) const;
  absl::Status CheckSameLife(const v1::OpenRequest& request) const;
  absl::Status CheckStepCounts(const model::EpochPlan& next, bool forgets) const;
  absl::Status CheckChanges(const Change& change, const std::string& job) const;
  // Begins at the Open's base, and forgets all but the promise.
  void Forget(const v1::OpenRequest& open);
  void Adopt(std::shared_ptr<const model::EpochPlan> next, uint32_t member, Change change);
  void TellDurable();
  // Unfilled chunks that lack a slice of the transaction.
  std::vector<uint64_t> Lacking(const v1::StepHeader& header, uint64_t attempt);
  // A step is prepared without all slices of these chunks: their imports must contain it (rule 28).
  void PassOver(absl::Span<const uint64_t> chunks, int64_t step);
  // As a bitmap. REQUIRES: a table.
  std::string FilledShards() const;
  // Rule 28: VERSION_GONE for an import of the chunk as of an older version than its least.
  absl::Status CheckLeast(uint64_t chunk, int64_t version) const;
  void SetUnfilled(std::map<uint64_t, int64_t> next);
  // Is this server a holder of the chunk by the open epoch's table? Of an unfilled chunk: then it lost its state.
  bool IsHolder(uint64_t chunk) const;
  v1::SealResponse Pending(uint32_t asker);
  // The answers to seals: the same message for as long as the record or the decision is the same.
  model::SealAnswer Prepared(bool with_blobs);
  model::SealAnswer Decided(bool with_blobs);

  absl::Status ReplaySnapshot(const v1::LogSnapshot& snapshot);
  absl::Status ReplayOpen(const v1::OpenRequest& open);
  absl::Status ReplaySlice(const v1::PushRequest& header);
  absl::Status ReplayPrepared(const v1::PreparedRecord& record);
  absl::Status ReplayDecision(const v1::Decision& replayed);

  const std::string id;
  const uint64_t disk;
  StepJournal* const journal;
  StepHost* const host;
  uint64_t synced = 0;

  v1::Epoch promised;
  std::string promised_group;  // volatile
  uint64_t promise_lsn = 0;
  std::shared_ptr<const model::EpochPlan> plan;
  uint32_t member = 0;                   // this server's, in the plan
  std::map<uint64_t, int64_t> unfilled;  // chunk -> least version of its import
  uint64_t unfilled_changes = 0;
  // The Open of another table. Until it is durable: the host is to be told, and these pins go then.
  uint64_t table_lsn = 0;
  bool tells_table = false;
  std::vector<v1::PinnedVersion> pins_to_drop;
  uint64_t decision_lsn = 0;
  int64_t committed = -1;
  std::optional<v1::Decision> decision;        // of `committed`
  std::optional<v1::PreparedRecord> prepared;  // of `committed` + 1
  uint64_t prepared_lsn = 0;
  model::SealAnswer answers[2];  // the last, without and with blobs
  SliceLedger slices;            // of `committed` + 1
  SealLedger seals;              // of `committed` + 1
  std::vector<uint64_t> tensor_steps;
  uint64_t skipped = 0;
  std::map<int64_t, v1::PinnedVersion> pins;  // durable here
  // kLost: since a restart; `committed` is the last step that may have been prepared, and the known epoch is over.
  // kToRestore: an epoch is open, and nothing but its first transaction, the restore, may be prepared.
  enum class State { kKnown, kLost, kToRestore };
  State state = State::kKnown;
  std::optional<int64_t> due_pin;
  int64_t restored_as = -1;  // every-K: step of the last restore decided since this process began
};

}  // namespace ballast::services
