// Sees everything and checks the promises of members and copies. The first broken promise ends the schedule.
//
//  - a step has one decision, with the verdict and the blobs that follow from one group's slices;
//  - a server applies only what is decided, and a chunk's bits are at each version those that the decided steps make;
//  - an acknowledged step is never undone: every later group starts from it or from a newer one;
//  - somebody of the table in the key has each chunk with all decided steps, unless lost disks or damage took the last
//    copy;
//  - a crash takes no copy that counts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ballast/tests/sim_members/world.h"

namespace ballast::sim_members {

class Oracle {
 public:
  // The epoch is one of the group's.
  void AddEpoch(const v1::Epoch& epoch, const Intent* intent) { groups_[Key(epoch)] = intent; }
  // A client holds this decision to be final.
  void Decided(const v1::Decision& decision, const std::string& who);
  void StartedFrom(int64_t base, const v1::Epoch& epoch, const std::string& who);
  // A server takes the decision.
  void Taken(const v1::Decision& decision, const std::string& who);
  void CheckChunk(uint64_t chunk, int64_t version, uint64_t content, const std::string& who);
  bool Right(uint64_t chunk, int64_t version, uint64_t content) const;
  void Broken(const std::string& what);

  const std::string& violation() const { return violation_; }
  int64_t last() const { return static_cast<int64_t>(steps_.size()) - 1; }
  const v1::Decision& decision(int64_t step) const { return steps_.at(static_cast<size_t>(step)).decision; }

 private:
  struct Step {
    v1::Decision decision;
    std::vector<uint64_t> contents;  // by chunk
  };
  static std::pair<uint64_t, uint64_t> Key(const v1::Epoch& epoch) { return {epoch.counter(), epoch.nonce()}; }
  std::map<std::pair<uint64_t, uint64_t>, const Intent*> groups_;
  std::vector<Step> steps_;
  std::string violation_;
};

}  // namespace ballast::sim_members
