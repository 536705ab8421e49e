#include "ballast/storage/store/read_pins.h"

#include <algorithm>

namespace ballast::storage {

uint64_t ReadPins::BeginRun() {
  absl::MutexLock lock(&mutex_);
  return ++runs_;
}

void ReadPins::Pin(int64_t pin, uint64_t chunks) {
  absl::MutexLock lock(&mutex_);
  pins_.emplace(pin, Point{runs_, chunks});
}

std::optional<std::vector<uint64_t>> ReadPins::Unpin(int64_t pin) {
  absl::MutexLock lock(&mutex_);
  if (pins_.erase(pin) == 0) return std::nullopt;
  std::vector<uint64_t> stay;
  for (const auto& [other, point] : pins_) stay.push_back(point.runs);
  return stay;
}

bool ReadPins::empty() const {
  absl::ReaderMutexLock lock(&mutex_);
  return pins_.empty();
}

std::vector<int64_t> ReadPins::Of(uint64_t chunk, uint64_t updated_in) const {
  std::vector<int64_t> pins;
  absl::ReaderMutexLock lock(&mutex_);
  for (const auto& [pin, point] : pins_) {
    if (chunk < point.chunks && point.runs >= updated_in) pins.push_back(pin);
  }
  std::sort(pins.begin(), pins.end());
  return pins;
}

std::optional<uint64_t> ReadPins::RunsBefore(int64_t pin, uint64_t chunk) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto found = pins_.find(pin);
  if (found == pins_.end() || chunk >= found->second.chunks) return std::nullopt;
  return found->second.runs;
}

}  // namespace ballast::storage
