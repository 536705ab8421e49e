#include "ballast/storage/log/block_parity.h"

#include <algorithm>
#include <cstring>

#include "ballast/kernels/kernels.h"

namespace ballast::storage {
namespace {

uint64_t WordAt(const std::byte* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

void Xor(absl::Span<const std::byte> from, absl::Span<std::byte> to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] ^= from[i];
}

}  // namespace

void BlockParity::Add(absl::Span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (block_ == nullptr) block_ = std::make_unique<std::array<uint64_t, kWords>>();
  size_t words = bytes.size() / sizeof(uint64_t);
  const std::byte* from = bytes.data();
  while (words > 0) {
    const size_t n = std::min(words, kWords - next_);
    uint64_t* const to = block_->data() + next_;
    uint64_t sum = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t word = WordAt(from + i * sizeof(uint64_t));
      to[i] ^= word;
      sum += word;
    }
    sum_ += sum;
    from += n * sizeof(uint64_t);
    words -= n;
    next_ = (next_ + n) % kWords;
  }
  if (const size_t rest = bytes.size() % sizeof(uint64_t); rest > 0) {
    uint64_t word = 0;
    std::memcpy(&word, from, rest);
    (*block_)[next_] ^= word;
    sum_ += word;
  }
}

absl::Span<const std::byte> BlockParity::block() const {
  return {reinterpret_cast<const std::byte*>(block_->data()), kIoAlignment};
}

uint32_t BlockParity::sum() const { return static_cast<uint32_t>(sum_ ^ (sum_ >> 32)) | uint32_t{1}; }

std::optional<uint64_t> RebuildBlock(absl::Span<const std::byte> block, uint32_t sum, uint32_t crc32c,
                                     absl::Span<std::byte> bytes) {
  // What the damaged block has to be changed by: the XOR of all blocks as they were and as they are.
  BlockParity now;
  now.Add(bytes);
  if (now.empty()) return std::nullopt;
  std::array<std::byte, kIoAlignment> change;
  std::copy(block.begin(), block.end(), change.begin());
  Xor(now.block(), absl::MakeSpan(change));
  const bool any = std::any_of(change.begin(), change.end(), [](std::byte byte) { return byte != std::byte{0}; });
  if (!any) return std::nullopt;
  for (uint64_t at = 0; at < bytes.size(); at += kIoAlignment) {
    const absl::Span<std::byte> candidate = bytes.subspan(at, kIoAlignment);
    Xor(change, candidate);
    if (kernels::Crc32c(bytes) == crc32c) {
      BlockParity rebuilt;
      rebuilt.Add(bytes);
      if (rebuilt.sum() == sum) return at / kIoAlignment;
    }
    Xor(change, candidate);
  }
  return std::nullopt;
}

}  // namespace ballast::storage
