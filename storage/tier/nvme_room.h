// Promised space on disk: its blocks are reserved now, and it becomes extents later.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "ballast/storage/tier/nvme_file.h"

namespace ballast::storage {

// Promised space in any of the tier's files, with its share of the budgets: an extent made from a room finds its blocks
// on the disk. An extent needs a part in one piece, so a room of N times the largest extent, in N files, holds one.
class NvmeRoom {
 public:
  NvmeRoom() = default;
  NvmeRoom(FileRoom part) { Join(std::move(part)); }  // NOLINT(google-explicit-constructor)
  uint64_t bytes() const;
  void Mark(TierPart part);
  void Charge(const std::shared_ptr<Account>& account);
  // Splits `bytes` off into a room of their own, in one file if a part is so large. REQUIRES: bytes <= bytes().
  NvmeRoom Split(uint64_t bytes);
  // Adds a room. Its bytes now count for this room's part of the tier and its account.
  void Join(NvmeRoom other);
  void Join(FileRoom part);
  // Ends the promise, and leaves the blocks to the next run of the server, which then finds them on a full disk too.
  void Leave();

  // The parts are of different files, and none is empty. NvmeTier takes extents from them.
  absl::Span<FileRoom> parts() { return absl::MakeSpan(parts_); }
  absl::Span<const FileRoom> parts() const { return parts_; }
  // After bytes were taken from parts.
  void DropEmpty();

 private:
  std::vector<FileRoom> parts_;
};

}  // namespace ballast::storage
