// New master values on their way to the servers: values given to Write, and initial values.
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
#include "ballast/client/transfers/seat.h"
#include "ballast/client/transport/tally.h"

namespace ballast::client {

class Values {
 public:
  // Fills `to` with the values of `tensor` from element `first`.
  using Source = std::function<void(uint32_t tensor, uint64_t first, absl::Span<float> to)>;

  // Borrows `seat`.
  explicit Values(const Seat* seat) : seat_(seat), buffers_(std::make_shared<Buffers>()) {}

  // Keeps this rank's part of a tensor. `values`: of `runs`. REQUIRES: the runs cover the part.
  void Write(uint32_t tensor, absl::Span<const float> values, absl::Span<const model::BoxRun> runs);
  bool empty() const { return written_.empty(); }
  // Bitmap of written tensors.
  std::string presence() const;
  // Forgets written values of the tensors of `presence`; lent values keep their memory until EndLoan.
  void Forget(const std::string& presence);
  // The values given to Write.
  Source written() const;

  // From now until EndLoan all values of the next transaction are lent: this object pushes nothing, and nobody may call
  // Write. Returns the written values by tensor, whole. REQUIRES: one rank.
  std::map<uint32_t, const float*> Lend();
  void EndLoan();
  bool lent() const { return lent_; }

  // Pushes this rank's slices that touch a tensor of `presence`, with values from `source`; waits for the pushes. Does
  // nothing if values are lent.
  absl::Status Push(const std::string& presence, const Source& source);
  // Pushes a single slice again, unless values are lent; does not wait.
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
  std::map<uint32_t, std::vector<float>> forgotten_;  // kept until the loan's end: a server may still read them
  bool lent_ = false;                                 // values are lent, the written ones too: push nothing
};

}  // namespace ballast::client
