#include "ballast/client/transfers/unit_buffers.h"

#include <algorithm>
#include <new>
#include <utility>

namespace ballast::client {

std::unique_ptr<UnitBuffer> BufferPool::Take(uint64_t bytes) {
  {
    absl::MutexLock lock(&mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const bool fits = (*it)->capacity >= bytes;
      if (fits && (best == free_.end() || (*it)->capacity < (*best)->capacity)) best = it;
    }
    if (best != free_.end()) {
      std::unique_ptr<UnitBuffer> buffer = std::move(*best);
      free_.erase(best);
      return buffer;
    }
    // A larger buffer replaces one that was too small, so the number of buffers does not grow.
    if (!free_.empty()) free_.pop_back();
  }
  auto buffer = std::make_unique<UnitBuffer>();
  constexpr uint64_t kAlign = 64;
  buffer->capacity = std::max(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  buffer->data.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, buffer->capacity)));
  if (buffer->data == nullptr) throw std::bad_alloc();
  return buffer;
}

void BufferPool::Return(std::unique_ptr<UnitBuffer> buffer) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(std::move(buffer));
}

}  // namespace ballast::client
