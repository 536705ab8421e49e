// Messages that the server is reading. gRPC tells the size only once a message is there, so the number of reads at a
// time bounds the memory.
#pragma once

#include <cstddef>
#include <list>
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
  // Reads the message, after which somebody calls Reads::End. No lock held.
  virtual void Start() = 0;
  // The message did not come in time; End returns false from now on. No lock held.
  virtual void BeLate() = 0;

 private:
  friend class Reads;
  enum class State { kNew, kWaiting, kReading, kOver };
  State state_ = State::kNew;
  bool in_turn_ = false;
  std::string who_;
  absl::Time since_;
  std::list<Read*>::iterator place_;  // in its list, while it waits or reads
};

// Threads: any.
class Reads {
 public:
  // One caller's, pushes aside: 32 MiB with the largest message.
  static constexpr int kInTurnMax = 2;
  static constexpr size_t kWaitingMax = 16384;  // waiting calls of one caller
  static constexpr absl::Duration kPatience = absl::Seconds(10);

  // Starts the read at once, or in its turn among those of `who`. False if too many wait already.
  bool Ask(const std::string& who, bool in_turn, Read* read);
  // True: the read waited for its turn, and never starts.
  bool Leave(Read* read);
  // The message has come, or never will. True: the call goes on; false: it was late, and its end was told to BeLate.
  bool End(Read* read);
  // Ends the reads that have been under way for longer than kPatience.
  void EndLate(absl::Time now);

 private:
  struct Caller {
    int reading = 0;
    std::list<Read*> waiting;
  };
  // The next of the same caller, to be started after the lock; null: none.
  Read* Remove(Read* read) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Begin(Read* read) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  absl::flat_hash_map<std::string, Caller> callers_ ABSL_GUARDED_BY(mu_);  // those with reads in turn
  std::list<Read*> reading_ ABSL_GUARDED_BY(mu_);                          // oldest first
};

}  // namespace ballast::services
