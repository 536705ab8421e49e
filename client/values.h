// New master values on their way to the servers: what Write was given, and initial values.
//
// Memory: this rank's part of every written tensor until the transaction is decided, and at most kBuffers slices on
// their way. Threads: one (buffers come back from the router's callbacks).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/client/seat.h"

namespace ballast::client {

class Values {
 public:
  // Fills `to` with the values of `tensor` from element `first`.
  using Source = std::function<void(uint32_t tensor, uint64_t first, absl::Span<float> to)>;

  // Borrows `seat`.
  explicit Values(const Seat* seat) : seat_(seat), buffers_(std::make_shared<Buffers>()) {}

  // Keeps this rank's part of `values`, the whole tensor's.
  void Write(uint32_t tensor, absl::Span<const float> values);
  bool empty() const { return written_.empty(); }
  // Bitmap of written tensors.
  std::string presence() const;
  // Forgets what was written for the tensors of `presence`; what of it is lent stays where it is until EndLoan.
  void Forget(const std::string& presence);
  // What Write was given.
  Source written() const;

  // All values of the next transaction are lent: until EndLoan nothing is pushed, and nothing may be written. What was
  // written, by tensor, whole. REQUIRES: one rank.
  std::map<uint32_t, const float*> Lend();
  void EndLoan();
  bool lent() const { return lent_; }

  // Pushes this rank's slices that touch a tensor of `presence`, with values drawn from `source`; waits for them.
  // Nothing to do if they are lent.
  absl::Status Push(const std::string& presence, const Source& source);
  // One of them, again, unless they are lent; does not wait.
  void Resend(const OwnedSlice& owned, const std::string& presence, const Source& source);
  bool idle() const { return buffers_->tally.idle(); }
  absl::Status Wait() { return buffers_->tally.Wait(); }
  void ReleaseBuffers();

 private:
  static constexpr size_t kBuffers = 4;
  struct Buffers {
    Tally tally;
    absl::Mutex mutex;
    std::vector<std::vector<float>> free ABSL_GUARDED_BY(mutex);
    size_t made ABSL_GUARDED_BY(mutex) = 0;
    std::vector<float> Take();
    void Return(std::vector<float> buffer);
  };

  const Seat* seat_;
  std::shared_ptr<Buffers> buffers_;
  // By tensor: the owned segments' values, in segment order.
  std::map<uint32_t, std::vector<float>> written_;
  std::map<uint32_t, std::vector<float>> forgotten_;  // kept until the loan's end: a server may read them yet
  bool lent_ = false;                                 // there is a loan, with whatever was written: push nothing
};

}  // namespace ballast::client
