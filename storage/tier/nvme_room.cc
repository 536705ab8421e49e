#include "ballast/storage/tier/nvme_room.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ballast::storage {

uint64_t NvmeRoom::bytes() const {
  return std::accumulate(parts_.begin(), parts_.end(), uint64_t{0},
                         [](uint64_t sum, const FileRoom& part) { return sum + part.bytes(); });
}

void NvmeRoom::Mark(TierPart part) {
  for (FileRoom& room : parts_) room.Mark(part);
}

void NvmeRoom::Charge(const std::shared_ptr<Account>& account) {
  for (FileRoom& room : parts_) room.Charge(account);
}

NvmeRoom NvmeRoom::Split(uint64_t bytes) {
  const auto whole =
      std::find_if(parts_.begin(), parts_.end(), [bytes](const FileRoom& part) { return part.bytes() >= bytes; });
  NvmeRoom split;
  if (whole != parts_.end()) std::rotate(parts_.begin(), whole, whole + 1);
  for (FileRoom& part : parts_) {
    const uint64_t of_part = std::min(bytes, part.bytes());
    if (of_part > 0) split.Join(part.Split(of_part));
    bytes -= of_part;
  }
  DropEmpty();
  return split;
}

void NvmeRoom::Join(FileRoom part) {
  if (part.bytes() == 0) return;
  if (!parts_.empty()) {
    part.Mark(parts_.front().part());
    part.Charge(parts_.front().account());
  }
  const auto same =
      std::find_if(parts_.begin(), parts_.end(), [&](const FileRoom& other) { return other.file() == part.file(); });
  if (same != parts_.end()) return same->Join(std::move(part));
  parts_.push_back(std::move(part));
}

void NvmeRoom::Join(NvmeRoom other) {
  for (FileRoom& part : other.parts_) Join(std::move(part));
}

void NvmeRoom::Leave() {
  for (FileRoom& part : parts_) part.Leave();
  parts_.clear();
}

void NvmeRoom::DropEmpty() {
  std::erase_if(parts_, [](const FileRoom& part) { return part.bytes() == 0; });
}

}  // namespace ballast::storage
