#include "ballast/tests/sim_disk/sim_content.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ballast::storage {
namespace {

void Apply(const SimWrite& write, SimVersion& version) {
  if (write.hole) {
    version.Free(write.first, write.blocks.size());
  } else {
    for (uint64_t i = 0; i < write.blocks.size(); ++i) version.Put(write.first + i, write.blocks[i]);
  }
  version.Grow(write.end);
}

SimBlock Bytes(const SimBlockPtr& block) { return block == nullptr ? SimBlock{} : *block; }

SimBlockPtr WithZeroTail(const SimBlockPtr& block, uint64_t kept_bytes) {
  if (block == nullptr) return nullptr;
  SimBlock bytes = *block;
  std::fill(bytes.begin() + kept_bytes, bytes.end(), std::byte{0});
  return std::make_shared<const SimBlock>(bytes);
}

}  // namespace

uint64_t SimVersion::AllocatedIn(uint64_t first, uint64_t count) const {
  return std::distance(blocks_.lower_bound(first), blocks_.lower_bound(first + count));
}

SimBlockPtr SimVersion::Get(uint64_t block) const {
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? nullptr : found->second;
}

void SimVersion::Allocate(uint64_t first, uint64_t count) {
  for (uint64_t block = first; block < first + count; ++block) blocks_.try_emplace(block);
}

void SimVersion::Free(uint64_t first, uint64_t count) {
  blocks_.erase(blocks_.lower_bound(first), blocks_.lower_bound(first + count));
}

void SimVersion::Grow(uint64_t bytes) { size_ = std::max(size_, bytes); }

void SimVersion::Truncate(uint64_t bytes) {
  size_ = bytes;
  blocks_.erase(blocks_.lower_bound(AlignUp(bytes) / kIoAlignment), blocks_.end());
  const auto last = blocks_.find(bytes / kIoAlignment);
  if (last != blocks_.end()) last->second = WithZeroTail(last->second, bytes % kIoAlignment);
}

void SimVersion::Read(uint64_t offset, absl::Span<std::byte> buffer) const {
  while (!buffer.empty()) {
    const uint64_t at = offset % kIoAlignment;
    const uint64_t bytes = std::min<uint64_t>(kIoAlignment - at, buffer.size());
    if (const SimBlockPtr block = Get(offset / kIoAlignment); block != nullptr) {
      std::memcpy(buffer.data(), block->data() + at, bytes);
    } else {
      std::memset(buffer.data(), 0, bytes);
    }
    offset += bytes;
    buffer.remove_prefix(bytes);
  }
}

void SimContent::Write(SimWrite write) {
  Apply(write, newest_);
  volatile_.push_back(std::move(write));
}

void SimContent::Sync(uint64_t sequence) {
  auto uncovered = volatile_.begin();
  for (; uncovered != volatile_.end() && uncovered->sequence <= sequence; ++uncovered) Apply(*uncovered, durable_);
  volatile_.erase(volatile_.begin(), uncovered);
}

void SimContent::FailSync(uint64_t sequence, sim::Random& random) {
  auto uncovered = volatile_.begin();
  for (; uncovered != volatile_.end() && uncovered->sequence <= sequence; ++uncovered) {
    if (random.Percent(50)) Apply(*uncovered, durable_);
  }
  volatile_.erase(volatile_.begin(), uncovered);
}

void SimContent::Crash(sim::Random& random) {
  while (!volatile_.empty()) {
    std::swap(volatile_[random.Below(volatile_.size())], volatile_.back());
    const SimWrite write = std::move(volatile_.back());
    volatile_.pop_back();
    switch (random.Below(3)) {
      case 0:
        Apply(write, durable_);
        break;
      case 1:
        Tear(write, random);
        break;
      default:
        break;
    }
  }
  newest_ = durable_;
}

void SimContent::Tear(const SimWrite& write, sim::Random& random) {
  constexpr uint64_t kSectors = kIoAlignment / kSimSectorBytes;
  constexpr uint64_t kAllSectors = (uint64_t{1} << kSectors) - 1;
  for (uint64_t i = 0; i < write.blocks.size(); ++i) {
    const uint64_t sectors = random.Below(kAllSectors + 1);
    if (sectors == 0) continue;
    const uint64_t number = write.first + i;
    const SimBlock written = Bytes(write.blocks[i]);
    SimBlock mixed = Bytes(durable_.Get(number));
    for (uint64_t sector = 0; sector < kSectors; ++sector) {
      if ((sectors >> sector & 1) == 0) continue;
      std::memcpy(&mixed[sector * kSimSectorBytes], &written[sector * kSimSectorBytes], kSimSectorBytes);
    }
    durable_.Put(number, std::make_shared<const SimBlock>(mixed));
    // A file system may have told the new size or not; up to what arrived is between the two.
    durable_.Grow(std::min(write.end, (number + 1) * kIoAlignment));
  }
}

void SimContent::Reserve(uint64_t offset, uint64_t bytes) {
  const uint64_t first = offset / kIoAlignment;
  const uint64_t count = AlignUp(offset + bytes) / kIoAlignment - first;
  for (SimVersion* version : {&durable_, &newest_}) {
    version->Allocate(first, count);
    version->Grow(offset + bytes);
  }
}

void SimContent::Truncate(uint64_t bytes) {
  durable_.Truncate(bytes);
  newest_.Truncate(bytes);
  const uint64_t end_block = AlignUp(bytes) / kIoAlignment;
  for (SimWrite& write : volatile_) {
    write.end = std::min(write.end, bytes);
    if (write.first + write.blocks.size() < end_block) continue;
    write.blocks.resize(write.first < end_block ? end_block - write.first : 0);
    if (bytes % kIoAlignment != 0 && !write.blocks.empty()) {
      write.blocks.back() = WithZeroTail(write.blocks.back(), bytes % kIoAlignment);
    }
  }
}

void SimContent::Set(absl::Span<const std::byte> bytes) {
  std::vector<std::byte> whole_blocks(bytes.begin(), bytes.end());
  whole_blocks.resize(AlignUp(bytes.size()));
  volatile_.clear();
  durable_ = SimVersion();
  Apply({.blocks = SimBlocks(whole_blocks), .end = bytes.size()}, durable_);
  newest_ = durable_;
}

void SimContent::Damage(uint64_t offset, absl::Span<const std::byte> mask) {
  while (!mask.empty()) {
    const uint64_t number = offset / kIoAlignment;
    const uint64_t at = offset % kIoAlignment;
    const uint64_t bytes = std::min<uint64_t>(kIoAlignment - at, mask.size());
    const SimBlockPtr before = durable_.Get(number);
    SimBlock damaged = Bytes(before);
    for (uint64_t i = 0; i < bytes; ++i) damaged[at + i] ^= mask[i];
    const auto after = std::make_shared<const SimBlock>(damaged);
    if (newest_.Get(number) == before) newest_.Put(number, after);
    durable_.Put(number, after);
    offset += bytes;
    mask.remove_prefix(bytes);
  }
}

std::vector<SimBlockPtr> SimBlocks(absl::Span<const std::byte> bytes) {
  static constexpr SimBlock kZeros = {};
  std::vector<SimBlockPtr> blocks(bytes.size() / kIoAlignment);
  for (SimBlockPtr& block : blocks) {
    if (std::memcmp(bytes.data(), kZeros.data(), kIoAlignment) != 0) {
      auto content = std::make_shared<SimBlock>();
      std::memcpy(content->data(), bytes.data(), kIoAlignment);
      block = std::move(content);
    }
    bytes.remove_prefix(kIoAlignment);
  }
  return blocks;
}

}  // namespace ballast::storage
