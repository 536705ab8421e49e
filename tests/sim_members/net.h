// The network of a schedule: calls of servers and of the key. Every message may come later, twice, in any order, or
// never.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "ballast/tests/sim_members/world.h"

namespace ballast::sim_members {

class Net {
 public:
  explicit Net(Random* random) : random_(random) {}
  void Post(std::function<void()> message) {
    if (!healed_) {
      const uint64_t chance = random_->Below(100);
      if (chance < 5) return;
      if (chance < 10) flying_.push_back(message);
      if (lingers_ && random_->Percent(10)) {
        late_.push_back(std::move(message));
        return BoundLate();
      }
    }
    flying_.push_back(std::move(message));
    if (flying_.size() > kInFlightMax) flying_.erase(flying_.begin());
  }
  bool Deliver() {
    std::vector<std::function<void()>>& from = !late_.empty() && random_->Percent(20) ? late_ : flying_;
    if (from.empty()) return false;
    std::swap(from[random_->Below(from.size())], from.back());
    const std::function<void()> message = std::move(from.back());
    from.pop_back();
    message();
    return true;
  }
  // From here on some messages come when much else has happened.
  void Linger() { lingers_ = true; }
  // ... and so do all that are on their way.
  void Delay() {
    std::move(flying_.begin(), flying_.end(), std::back_inserter(late_));
    flying_.clear();
    BoundLate();
  }
  // Whoever would send more waits: the oldest messages are lost when too many fly.
  bool busy() const { return flying_.size() > kBusy; }
  void Heal() { healed_ = true; }
  bool healed() const { return healed_; }

 private:
  static constexpr size_t kInFlightMax = 250, kBusy = 60, kLateMax = 100;
  void BoundLate() {
    if (late_.size() > kLateMax) late_.erase(late_.begin(), late_.end() - kLateMax);
  }

  Random* const random_;
  std::vector<std::function<void()>> flying_, late_;
  bool lingers_ = false;
  bool healed_ = false;
};

// The job's key in etcd.
struct Key {
  uint64_t revision = 0;
  v1::Epoch claimed;
  uint32_t group = 0;
  v1::Table table;
};

// What operators want.
struct Wish {
  std::vector<int> servers;
  uint32_t replicas = 2;
};

}  // namespace ballast::sim_members
