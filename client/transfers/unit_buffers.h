// Buffers for working parameters, which are used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::client {

// 64-byte aligned.
struct UnitBuffer {
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data;
  uint64_t capacity = 0;  // bytes
};

// Threads: any.
class BufferPool {
 public:
  std::unique_ptr<UnitBuffer> Take(uint64_t bytes);
  void Return(std::unique_ptr<UnitBuffer> buffer);

 private:
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<UnitBuffer>> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client
