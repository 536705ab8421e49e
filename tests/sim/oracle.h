// Sees everything and keeps the promises of the step transaction: the first broken one ends the schedule.
//
//  - a step has one decision, whoever speaks of it, and its verdict and blobs follow from what one group pushed and
//  sealed;
//  - what a server applies is, for every range, exactly the bits that this group pushed in the sealed attempt, once;
//  - an acknowledged step is never undone: every later group starts from it or from a newer one;
//  - committed of two servers is never more than one apart;
//  - step counts advance with updates only;
//  - a restore brings back state, step counts and blobs of the version that it names, wherever it is applied.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ballast/tests/sim/intent.h"

namespace ballast::sim {

// One slice as a server's update consumed it; nothing if its place held no complete slice.
struct Consumed {
  v1::SliceKind kind;
  model::Slice slice;
  std::optional<uint32_t> digest;
};

// Stands for the bits of a server's chunks: `state` after a step that changes some of them.
uint64_t Evolve(uint64_t state, int64_t step);
// Does a transaction that is not skipped change any of the server's chunks, restores aside?
bool Changes(const model::EpochPlan& plan, int server, const v1::StepHeader& header);

class Oracle {
 public:
  // `lives`: how many lives a rank may have within an epoch; 1 but for a seeded bug.
  explicit Oracle(uint32_t lives) : lives_(lives) {}

  // Borrows `group`, which must outlive the oracle.
  void AddGroup(const GroupIntent* group) { groups_.push_back(group); }

  // Somebody takes this for decided.
  void Decided(const v1::Decision& decision, const std::string& who);
  // A client told its user so.
  void Acknowledged(const v1::Decision& decision, const std::string& who);
  // The group of this epoch starts from here.
  void StartedFrom(int64_t base, const v1::Epoch& epoch, const std::string& who);
  // Besides, of one that found state lost: it will restore this version.
  void StartsAnew(int64_t restored, const v1::Epoch& epoch, const std::string& who);
  // Every-K: a server gave up its own pin of this version, since it could not be read.
  void GivenUp(int64_t version);
  // Must all servers have pinned some version?
  bool has_floor() const { return floor_ >= 0; }
  void Applied(int server, const v1::Decision& decision, absl::Span<const Consumed> consumed);
  void CheckTensorSteps(int server, int64_t committed, absl::Span<const uint64_t> tensor_steps);
  // What a server's chunks are after `step`, as Evolve makes it of what it applied.
  void CheckState(int server, int64_t step, uint64_t state);
  const v1::Decision& decision(int64_t step) const { return steps_.at(step).decision; }
  void CheckApart(absl::Span<const int64_t> committed);
  void Broken(const std::string& what);

  const std::string& violation() const { return violation_; }
  int64_t last_decided() const { return steps_.empty() ? -1 : steps_.rbegin()->first; }
  uint64_t decided() const { return steps_.size(); }
  uint64_t skipped() const { return skipped_; }

 private:
  // Who may have pushed what was decided: a group, and the life of each of its ranks.
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
  std::map<int64_t, Step> steps_;  // by N; a group that found state lost may begin behind numbers that stay free
  // Every-K: all servers have pinned this version, and the newest that they pin next.
  int64_t floor_ = -1;
  int64_t due_ = -1;
  int64_t acknowledged_ = -1;
  uint64_t skipped_ = 0;
  std::string violation_;
};

}  // namespace ballast::sim
