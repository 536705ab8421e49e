#include "ballast/storage/store/extent_label.h"

#include <cstddef>
#include <cstring>

#include "ballast/kernels/kernels.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kMagic = 0x4c424c5f'54534c42;
constexpr uint32_t kFormat = 2;

// Little-endian, as it lies on disk.
constexpr size_t kEntryBytes = 6 * 8 + sizeof(ArrayDigests);  // of an entry without a file

struct Label {
  uint64_t magic = kMagic;
  uint32_t digest = 0;  // CRC32C of the block with this as zero
  uint32_t format = kFormat;
  std::array<char, kEntryBytes> chunk = {};
  uint64_t layout_bits = 0;
  char job[128] = {};
  NvmeFileId file = 0;  // what was a zero before there were several
};
static_assert(sizeof(Label) <= StateLayout::kLabelBytes);
static_assert(sizeof(DurableChunk) == kEntryBytes + sizeof(NvmeFileId));  // no padding, whose bits nobody sets
static_assert(offsetof(DurableChunk, file) == kEntryBytes);

uint32_t DigestOf(absl::Span<const std::byte> block) {
  std::array<std::byte, StateLayout::kLabelBytes> copy;
  std::memcpy(copy.data(), block.data(), copy.size());
  std::memset(copy.data() + offsetof(Label, digest), 0, sizeof(Label::digest));
  return kernels::Crc32c(copy);
}

}  // namespace

std::string DurableChunk::Encode() const {
  return {reinterpret_cast<const char*>(this), file == 0 ? kEntryBytes : sizeof(*this)};
}

bool DurableChunk::Decode(absl::string_view bytes) {
  if (bytes.size() != kEntryBytes && bytes.size() != sizeof(*this)) return false;
  file = 0;
  std::memcpy(static_cast<void*>(this), bytes.data(), bytes.size());
  return true;
}

uint64_t LayoutBits(const StateLayout& layout) {
  const kernels::OptimizerSpec& o = layout.optimizer();
  uint64_t bits = 0;
  for (const uint64_t field :
       {static_cast<uint64_t>(o.kind), static_cast<uint64_t>(o.moments), static_cast<uint64_t>(o.gradient),
        static_cast<uint64_t>(o.working), uint64_t{o.amsgrad}, uint64_t{o.momentum}, uint64_t{o.nesterov}}) {
    bits = bits << 8 | field;
  }
  return bits | static_cast<uint64_t>(layout.form()) << 56 | uint64_t{layout.keeps_remainder()} << 63;
}

void EncodeLabel(const DurableChunk& chunk, const StateLayout& layout, absl::string_view job,
                 absl::Span<std::byte> block) {
  Label label;
  DurableChunk labelled = chunk;
  std::memcpy(label.chunk.data(), &labelled, kEntryBytes);
  label.file = chunk.file;
  label.layout_bits = LayoutBits(layout);
  std::memcpy(label.job, job.data(), std::min(job.size(), sizeof(label.job)));
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), &label, sizeof(label));
  const uint32_t digest = DigestOf(block);
  std::memcpy(block.data() + offsetof(Label, digest), &digest, sizeof(digest));
}

bool DecodeLabel(absl::Span<const std::byte> block, DurableChunk* chunk, std::string* job, uint64_t* layout_bits) {
  Label label;
  std::memcpy(static_cast<void*>(&label), block.data(), sizeof(label));
  if (label.magic != kMagic || label.format != kFormat || label.digest != DigestOf(block)) return false;
  std::memcpy(static_cast<void*>(chunk), label.chunk.data(), kEntryBytes);
  chunk->file = label.file;
  job->assign(label.job, strnlen(label.job, sizeof(label.job)));
  *layout_bits = label.layout_bits;
  return true;
}

}  // namespace ballast::storage
