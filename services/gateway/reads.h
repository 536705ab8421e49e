// Messages that the server is reading. gRPC tells the size only once a message is there, so the number of reads at a
// time bounds the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

// The message of one call, owned by the call: whoever takes a read out of Reads ends the call.
class Read {
 public:
  virtual ~Read() = default;
  // Reads the message, after which somebody calls Reads::Come. No lock held.
  virtual void Start() = 0;
  // Come returns false from now on: the message did not come in time, or too many slow ones of the caller came after
  // this one. No lock held.
  virtual void BeLate() = 0;
  virtual void GiveWay() = 0;
  // The read waited, never starts, and its place in line is another's. No lock held.
  virtual void BeCrowdedOut() = 0;

 private:
  friend class Reads;
  enum class State { kNew, kWaiting, kReading, kRead, kOver };
  State state_ = State::kNew;
  bool push_ = false;   // in its caller's lane for pushes
  bool aside_ = false;  // in its caller's lane for slow ones
  std::string who_, connection_;
  // Where hosts take turns: how many of its connection were before it in line, and of its host's connections.
  std::pair<size_t, size_t> rank_;
  absl::Time since_;
  uint64_t number_ = 0;                    // of those that took another's place
  std::list<Read*>::iterator place_;       // among all that are read
  std::list<Read*>::iterator lane_place_;  // in its lane, while it waits or is read
};

struct ReadRules {
  size_t waiting_max = 16384;  // waiting pushes of one caller, and other waiting calls
  // Of messages that take turns, while others wait for the turn, and while others wait to be read aside.
  absl::Duration in_turn_patience = absl::Milliseconds(100), aside_patience = absl::Seconds(1);
  // How long a connection whose messages all wait, or do not come, is known to be slow.
  absl::Duration slow_for = absl::Minutes(10);
  // The callers are of many hosts, and nobody knows which of them are one. In line each host's first call is before any
  // host's second, and each connection's before any connection's second; the newest comes first. In a full line the
  // last loses its place, and a slow connection's before any other.
  bool hosts_take_turns = false;
};

// A caller's pushes are read so many at a time, each from its first byte to its last. A caller's other messages take
// turns, two at a time. A slow message yields: the read goes on, aside, and so do further messages of the same
// connection, two at a time, until one comes promptly. So half messages of one program do not keep others of the same
// identity, or on the same host, waiting.
//
// Threads: any.
class Reads {
 public:
  // One caller's. A turn lasts until the message's bytes are gone, a push's turn until the message has come: from then
  // on the bound on waiting pushes counts it.
  static constexpr size_t kInTurnMax = 2, kAsideMax = 2, kPushesMax = 16;
  static constexpr absl::Duration kPatience = absl::Seconds(10);

  explicit Reads(const ReadRules& rules = {}) : rules_(rules) {}
  size_t waiting_max() const { return rules_.waiting_max; }

  // Starts the read at once, or in its turn among those of `who`. False if too many wait already.
  bool Ask(const std::string& who, const std::string& connection, bool push, Read* read);
  // True: the read waited for its turn, and never starts.
  bool Leave(Read* read);
  // The message has come, or never will. True: the call goes on, and tells by End that the bytes are gone; false: it
  // was late, and its end was told to BeLate or GiveWay.
  bool Come(Read* read);
  void End(Read* read);
  // Puts slow reads aside where others wait, and ends reads that take too long. True: calls were refused or ended, and
  // their memory is worth giving back to the system. To be called several times a second.
  bool Look(absl::Time now);

 private:
  // Reads of a caller that share a number of places.
  struct Lane {
    explicit Lane(size_t places) : places_max(places) {}
    const size_t places_max;
    std::list<Read*> reading, waiting;  // oldest first
  };
  struct Caller {
    Lane in_turn{kInTurnMax}, aside{kAsideMax}, pushes{kPushesMax};
    Lane& lane(bool is_aside) { return is_aside ? aside : in_turn; }
    size_t waiting(bool push) const {
      return push ? pushes.waiting.size() : in_turn.waiting.size() + aside.waiting.size();
    }
    Lane& LaneOf(const Read& read) { return read.push_ ? pushes : lane(read.aside_); }
    bool idle() const { return in_turn.reading.empty() && aside.reading.empty() && pushes.reading.empty(); }
  };
  using Few = std::vector<Read*>;  // to be called after the lock
  // False: too many wait. `crowded_out`: the read that lost its place, or null.
  bool Wait(Read* read, Caller* caller, Read** crowded_out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes out of the line whoever has to yield to `read`. Null: nobody.
  Read* CrowdOut(const Read& read, Caller* caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Its place in the lane's line, by its rank there.
  std::list<Read*>::iterator Rank(Read* read, Lane* lane) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Begin(Read* read, Lane* lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Calls Start of reads that BeginNext has begun. No lock held.
  void StartAll(const Few& started) ABSL_LOCKS_EXCLUDED(mu_);
  // Its message may come from now on, and its call may be ended.
  bool IsBeingRead(const Read& read) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return read.state_ == Read::State::kReading && !starting_.contains(read.number_);
  }
  // Fills the lane's places.
  void BeginNext(Lane* lane, Few* started) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndTurn(Read* read, Few* started) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes out a read whose message has not come.
  void Remove(Read* read, Few* started) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutAside(Read* read, absl::Time now, Few* started, Few* yielding) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Further messages of the connection, and those in line, go to the other lane.
  void Mark(const std::string& connection, Caller* caller, bool slow) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ReadRules rules_;
  absl::Mutex mu_;
  std::map<std::string, Caller> callers_ ABSL_GUARDED_BY(mu_);  // those with reads
  std::list<Read*> reading_ ABSL_GUARDED_BY(mu_);               // oldest first
  uint64_t last_number_ ABSL_GUARDED_BY(mu_) = 0;
  // Numbers of reads whose Start has not returned. Their calls are not ended: another thread is about to use them.
  absl::flat_hash_set<uint64_t> starting_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, absl::Time> slow_ ABSL_GUARDED_BY(mu_);  // connections, and since when
  absl::Time forgot_ ABSL_GUARDED_BY(mu_);                                  // slow ones, for the last time
  bool refused_ ABSL_GUARDED_BY(mu_) = false;                               // calls, since Look
};

}  // namespace ballast::services
