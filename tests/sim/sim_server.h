// A state server of a schedule: a real step machine, a log of which a crash keeps a durable prefix, and places that
// hold digests where a real server holds bytes.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/services/step/step_machine.h"
#include "ballast/tests/sim/message.h"
#include "ballast/tests/sim/oracle.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim/sim_group.h"

namespace ballast::sim {

class SimServer : private services::StepHost {
 public:
  // Borrows all. `bug`: of the log or the disk, if it is one of theirs.
  SimServer(int index, ClientBug bug, Random* random, Oracle* oracle);

  bool up() const { return machine_ != nullptr; }
  int64_t committed() const { return machine_->committed(); }
  v1::Epoch promised() const { return machine_->Describe().promised(); }
  bool state_lost() const { return machine_->state_lost(); }
  uint64_t decisions_lost() const { return decisions_lost_; }
  uint64_t states_lost() const { return states_lost_; }

  // REQUIRES: up. Answers, now or out of a later call, are added to `answers`; none to what a crash forgets.
  void Handle(const Request& request, std::vector<Response>* answers);
  // Some push's bytes have all come.
  void FinishPush(std::vector<Response>* answers);
  // Some more of the log is durable.
  void FinishSync(std::vector<Response>* answers);
  // A version that was to be pinned is on the disk, or one that nobody wants is off it.
  void FinishPin(std::vector<Response>* answers);
  bool pinning() const { return !pinning_.empty(); }
  bool syncing() const { return sync_wanted_ > synced_; }
  bool receiving() const { return !receiving_.empty(); }

  // Loses all that is not durable; the disk may have got further than it said.
  void Crash();
  void Restart();

 private:
  struct Place {
    v1::SliceKind kind;
    uint32_t unit;
    model::Range range;
    uint32_t digest;
  };

  uint64_t Append(const services::StepRecord& record) override;
  void Sync(uint64_t lsn) override { sync_wanted_ = std::max(sync_wanted_, lsn); }
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) override;
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override;
  void Opened(const model::EpochPlan& plan) override;
  void PinDue(int64_t version) override;
  void PinChanged(const v1::PinnedVersion& pin) override { pinning_.push_back({.version = pin, .changes = true}); }

  // A version on the disk, and what the chunks are in it.
  struct DurablePin {
    v1::PinnedVersion version;
    uint64_t state = 0;
    bool changes = false;  // only who wants it
  };
  void PutPin(const DurablePin& pin);
  services::Outcome<v1::PinResponse> Pin(const v1::PinRequest& request);
  absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest& request);
  void Retry(std::vector<Response>* answers);
  void ApplyRestore(const v1::PreparedRecord& prepared);
  void Flush(int64_t step);
  // Every-K: what a crash leaves of the first `kept` records.
  void KeepInCatalog(size_t kept);

  // False: it has to wait.
  bool Evaluate(const Request& request, std::vector<Response>* answers);
  void Push(const Request& request, std::vector<Response>* answers);
  void EndPush(const Request& request, std::vector<Response>* answers);
  void Clear(const v1::PushRequest& header);
  void Fill(const v1::PushRequest& header);
  std::optional<uint32_t> Find(v1::SliceKind kind, const model::Slice& slice) const;
  bool CutBeforeDurable(const services::StepRecord& record, size_t kept) const;
  // Sometimes: the log goes on in a segment of its own, which begins with a snapshot.
  void MaybeSnapshot();
  int64_t NeededFor(const services::StepRecord& record) const;
  // Drops what lies before a snapshot if the chunks that were flushed make up for it.
  void CutAtSnapshot();
  void CheckStepCounts();

  const int index_;
  const ClientBug bug_;
  Random* const random_;
  Oracle* const oracle_;
  std::unique_ptr<services::StepMachine> machine_;
  std::vector<services::StepRecord> log_;
  int64_t flushed_ = -1;  // all chunks hold this step durably
  uint64_t flushed_state_ = 0;
  int64_t restore_ = -1;                // the newest that was applied without a flush
  std::map<int64_t, DurablePin> pins_;  // durable
  std::deque<DurablePin> pinning_;      // in the order in which they become durable
  // Every-K: durable.
  v1::Epoch promised_;
  std::optional<v1::OpenRequest> open_;
  bool had_state_ = false;
  uint64_t states_lost_ = 0;
  std::map<int64_t, uint64_t> states_;  // of the chunks, by step, in this life of the process
  uint64_t state_ = 0;                  // after applied_
  uint64_t synced_ = 0;
  uint64_t sync_wanted_ = 0;
  int64_t applied_ = -1;  // in this life of the process
  const model::EpochPlan* plan_ = nullptr;
  std::vector<Place> places_;
  std::vector<Request> receiving_;
  std::vector<Request> waiting_;
  uint64_t decisions_lost_ = 0;
};

}  // namespace ballast::sim
