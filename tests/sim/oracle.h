// Sees everything and checks the promises of the step transaction. The first broken promise ends the schedule.
//
//  - all ranks and servers know the same decision of a step, and its verdict and blobs follow from the pushes and seals
//  of a single group;
//  - a server applies, for every range, exactly the bits pushed by this group in the sealed attempt, and only once;
//  - an acknowledged step is never undone: every later group starts from this step or a newer step;
//  - committed steps of any two servers differ by at most 1;
//  - step counts advance with updates only;
//  - a restore brings back state, step counts and blobs of the named version on every server, and a server's chunks
//  follow from the steps applied since, over restarts, flushes and cuts;
//  - every-K: a group goes back at most to the newest version that all servers must have pinned, and no number names
//  two decisions;
//  - a norm is computed from the slices of the requested attempt; only faults cause errors.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ballast/tests/sim/intent.h"

namespace ballast::sim {

// A slice as consumed by a server's update. No digest: the slice's place held no complete slice.
struct Consumed {
  v1::SliceKind kind;
  model::Slice slice;
  std::optional<uint32_t> digest;
};

// Stands for the bits of a server's chunks: the next `state` after a step that changes any of these chunks.
uint64_t Evolve(uint64_t state, int64_t step);
// True if the transaction, unless skipped, changes any of the server's chunks. Does not consider restores.
bool Changes(const model::EpochPlan& plan, int server, const v1::StepHeader& header);

class Oracle {
 public:
  // `lives`: how many lives a rank may have within an epoch; 1 but for a seeded bug.
  explicit Oracle(uint32_t lives) : lives_(lives) {}

  // Borrows `group`, which must outlive the oracle.
  void AddGroup(const GroupIntent* group) { groups_.push_back(group); }

  // Some client or server (`who`) holds this decision to be final.
  void Decided(const v1::Decision& decision, const std::string& who);
  // A client reported the decision to its user.
  void Acknowledged(const v1::Decision& decision, const std::string& who);
  // The group of `epoch` starts from step `base`.
  void StartedFrom(int64_t base, const v1::Epoch& epoch, const std::string& who);
  // Called in addition if the group found state lost and will restore version `restored`.
  void StartsAnew(int64_t restored, const v1::Epoch& epoch, const std::string& who);
  // Every-K: a server gave up its own pin of this version, because the version could not be read.
  void GivenUp(int64_t version);
  // True if every server must have pinned some version.
  bool has_floor() const { return floor_ >= 0; }
  void Applied(int server, const v1::Decision& decision, absl::Span<const Consumed> consumed);
  void CheckTensorSteps(int server, int64_t committed, absl::Span<const uint64_t> tensor_steps);
  // Checks the server's state after `step`, computed with Evolve from the steps applied by the server.
  void CheckState(int server, int64_t step, uint64_t state);
  const v1::Decision& decision(int64_t step) const { return steps_.at(step).decision; }
  void CheckApart(absl::Span<const int64_t> committed);
  void Broken(const std::string& what);

  const std::string& violation() const { return violation_; }
  int64_t last_decided() const { return steps_.empty() ? -1 : steps_.rbegin()->first; }
  uint64_t decided() const { return steps_.size(); }
  uint64_t skipped() const { return skipped_; }

 private:
  // A possible author of a decided step: a group, and the life of each of its ranks.
  struct Author {
    const GroupIntent* group;
    uint32_t life[kWorldSizeMax];
  };
  struct Step {
    v1::Decision decision;
    std::vector<Author> authors;
    std::vector<uint64_t> tensor_steps;
    uint64_t states[kServers] = {};
  };

  void Settle(const v1::Decision& decision, const std::string& who);
  bool Explains(const Author& author, const v1::Decision& decision) const;

  const uint32_t lives_;
  std::vector<const GroupIntent*> groups_;
  std::map<int64_t, Step> steps_;  // by N; a group that found state lost may begin beyond numbers never decided
  // Every-K: all servers have pinned version floor_, and pin version due_ next. -1: none.
  int64_t floor_ = -1;
  int64_t due_ = -1;
  int64_t acknowledged_ = -1;
  uint64_t skipped_ = 0;
  std::string violation_;
};

}  // namespace ballast::sim
