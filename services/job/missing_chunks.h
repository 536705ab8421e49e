// The chunks that this server lacks, in the order in which they are copied: kLacking before kMoving, and by index.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/import_pace.h"

namespace ballast::services {

// Threads: under the job's lock.
class MissingChunks {
 public:
  // What Update goes by. `changes`: StepMachine::unfilled_changes.
  struct Sight {
    std::shared_ptr<const model::EpochPlan> plan;
    uint64_t changes = 0;
    const std::map<uint64_t, int64_t>* unfilled = nullptr;
  };
  // Takes the chunks anew where the plan or the changes are others than the last time. `need`: depends on the plan and
  // the chunk alone.
  void Update(const Sight& sight, const std::function<CopyNeed(uint64_t chunk)>& need);
  // By MarkFilled, which is no change.
  void Filled(uint64_t chunk);

  // Each need has a place in its chunks, where the next round begins. The first chunk from there on; nullptr: none.
  const uint64_t* First(CopyNeed need) const { return From(need, of(need).place); }
  // The one behind `chunk`, which may be missing no more.
  const uint64_t* Next(CopyNeed need, uint64_t chunk) const { return From(need, chunk + 1); }
  // Moves the place. Returns where it was.
  uint64_t Stay(CopyNeed need, uint64_t chunk) { return std::exchange(of(need).place, chunk); }
  // Both places go to the front.
  void Return() { lacking_.place = moving_.place = 0; }

 private:
  struct Row {
    std::set<uint64_t> chunks;
    uint64_t place = 0;
  };
  const Row& of(CopyNeed need) const { return need == CopyNeed::kLacking ? lacking_ : moving_; }
  Row& of(CopyNeed need) { return need == CopyNeed::kLacking ? lacking_ : moving_; }
  const uint64_t* From(CopyNeed need, uint64_t chunk) const {
    const auto found = of(need).chunks.lower_bound(chunk);
    return found == of(need).chunks.end() ? nullptr : &*found;
  }

  std::shared_ptr<const model::EpochPlan> plan_;
  uint64_t changes_ = 0;
  Row lacking_, moving_;
};

}  // namespace ballast::services
