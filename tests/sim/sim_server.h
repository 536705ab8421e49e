// A state server of a schedule: a real step machine, a log whose durable prefix survives a crash, and places holding
// digests where a real server holds bytes.
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

class SimServer : private services::StepJournal, private services::StepHost {
 public:
  // Borrows the pointers. `bug` counts only if it is a bug of the log or the disk.
  SimServer(int index, ClientBug bug, Random* random, Oracle* oracle);

  bool up() const { return machine_ != nullptr; }
  int64_t committed() const { return machine_->committed(); }
  v1::Epoch promised() const { return machine_->Describe().promised(); }
  bool state_lost() const { return machine_->state_lost(); }
  uint64_t decisions_lost() const { return decisions_lost_; }
  uint64_t states_lost() const { return states_lost_; }

  // Adds the answer to `answers`, in this call or a later one. A crash forgets waiting requests. REQUIRES: up.
  void Handle(const Request& request, std::vector<Response>* answers);
  // All bytes of some push have arrived.
  void FinishPush(std::vector<Response>* answers);
  // More of the log has become durable.
  void FinishSync(std::vector<Response>* answers);
  // The oldest entry of pinning_ has become durable: a new pin, or a change of who wants a pin.
  void FinishPin(std::vector<Response>* answers);
  bool pinning() const { return !pinning_.empty(); }
  bool syncing() const { return sync_wanted_ > synced_; }
  bool receiving() const { return !receiving_.empty(); }

  // Loses everything not durable. The disk may have kept more than it had reported.
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
  void Opened(std::shared_ptr<const model::EpochPlan> plan, const services::OpenChange& change) override;
  void PinDue(int64_t version) override;
  void PinChanged(const v1::PinnedVersion& pin) override { pinning_.push_back({.version = pin, .changes = true}); }

  // A version on the disk, with the state of its chunks.
  struct DurablePin {
    v1::PinnedVersion version;
    uint64_t state = 0;
    bool changes = false;  // only changes who wants the pin
  };
  void PutPin(const DurablePin& pin);
  services::Outcome<v1::PinResponse> Pin(const v1::PinRequest& request);
  absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest& request);
  void Retry(std::vector<Response>* answers);
  void ApplyRestore(const v1::PreparedRecord& prepared);
  void Flush(int64_t step);
  // Every-K: reduces the first `kept` records to their catalog entries, the only survivors of a crash.
  void KeepInCatalog(size_t kept);

  // False if the request has to wait.
  bool Evaluate(const Request& request, std::vector<Response>* answers);
  void Push(const Request& request, std::vector<Response>* answers);
  void EndPush(const Request& request, std::vector<Response>* answers);
  void Clear(const v1::PushRequest& header);
  void Fill(const v1::PushRequest& header);
  std::optional<uint32_t> Find(v1::SliceKind kind, const model::Slice& slice) const;
  bool CutBeforeDurable(const services::StepRecord& record, size_t kept) const;
  // Sometimes appends a snapshot, as if the log went on in a new segment; may flush chunks.
  void MaybeSnapshot();
  int64_t NeededFor(const services::StepRecord& record) const;
  // Drops records before a snapshot if the flushed chunks make them needless.
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
  int64_t restore_ = -1;                // newest restore applied without a flush
  std::map<int64_t, DurablePin> pins_;  // durable
  std::deque<DurablePin> pinning_;      // in the order of becoming durable
  // The next three are for every-K, and durable.
  v1::Epoch promised_;
  std::optional<v1::OpenRequest> open_;
  bool had_state_ = false;
  uint64_t states_lost_ = 0;
  std::map<int64_t, uint64_t> states_;  // of the chunks, by step, in this life of the process
  uint64_t state_ = 0;                  // after applied_
  uint64_t synced_ = 0;
  uint64_t sync_wanted_ = 0;
  int64_t applied_ = -1;  // in this life of the process
  std::shared_ptr<const model::EpochPlan> plan_;
  std::vector<Place> places_;
  std::vector<Request> receiving_;
  std::vector<Request> waiting_;
  uint64_t decisions_lost_ = 0;
};

}  // namespace ballast::sim
