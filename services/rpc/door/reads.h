// Messages that the server is reading. gRPC tells the size only once a message is there, so the number of reads at a
// time bounds the memory.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
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

 private:
  friend class Reads;
  enum class State { kNew, kWaiting, kReading, kRead, kOver };
  State state_ = State::kNew;
  bool push_ = false;   // in its caller's lane for pushes
  bool aside_ = false;  // in its caller's lane for slow ones
  std::string who_, connection_;
  absl::Time since_;
  std::list<Read*>::iterator place_;       // among all that are read
  std::list<Read*>::iterator lane_place_;  // in its lane, while it waits or is read
};

// A caller's pushes are read so many at a time, each from its first byte to its last. A caller's other messages take
// turns, two at a time. A slow message yields: the read goes on, aside, and so do further messages of the same
// connection, four at a time, until one comes promptly. So half messages of one program do not keep others of the same
// identity, or on the same host, waiting.
//
// Threads: any.
class Reads {
 public:
  // One caller's. A turn lasts until the message's bytes are gone, a push's turn until the message has come: from then
  // on the bound on waiting pushes counts it.
  static constexpr size_t kInTurnMax = 2, kAsideMax = 4, kPushesMax = 16;
  static constexpr size_t kWaitingMax = 16384;  // waiting calls of one caller
  static constexpr absl::Duration kPatience = absl::Seconds(10);
  // The same while others wait for the turn, and while others wait to be read aside.
  static constexpr absl::Duration kInTurnPatience = absl::Milliseconds(100), kAsidePatience = absl::Seconds(1);

  // Starts the read at once, or in its turn among those of `who`. False if too many wait already.
  bool Ask(const std::string& who, const std::string& connection, bool push, Read* read);
  // True: the read waited for its turn, and never starts.
  bool Leave(Read* read);
  // The message has come, or never will. True: the call goes on, and tells by End that the bytes are gone; false: it
  // was late, and its end was told to BeLate or GiveWay.
  bool Come(Read* read);
  void End(Read* read);
  // Puts slow reads aside where others wait, and ends reads that take too long. True: reads were ended, and
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
    Lane& LaneOf(const Read& read) { return read.push_ ? pushes : lane(read.aside_); }
    bool idle() const { return in_turn.reading.empty() && aside.reading.empty() && pushes.reading.empty(); }
  };
  using Few = std::vector<Read*>;  // to be called after the lock
  void Begin(Read* read, Lane* lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Fills the lane's places.
  void BeginNext(Lane* lane, Few* started) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndTurn(Read* read, Few* started) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes out a read whose message has not come.
  void Remove(Read* read, Few* started) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PutAside(Read* read, Few* started, Few* yielding) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Further messages of the connection, and those in line, go to the other lane.
  void Mark(const std::string& connection, Caller* caller, bool slow) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  std::map<std::string, Caller> callers_ ABSL_GUARDED_BY(mu_);              // those with reads
  std::list<Read*> reading_ ABSL_GUARDED_BY(mu_);                           // oldest first
  absl::flat_hash_map<std::string, absl::Time> slow_ ABSL_GUARDED_BY(mu_);  // connections, and since when
};

}  // namespace ballast::services
