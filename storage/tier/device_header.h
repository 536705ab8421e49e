// The first blocks of a file of the NVMe tier outside the data directory. They say which file this is, whichever path
// leads to it. So a server notices swapped disks and a disk of another server. The data directory's own file has no
// header, because the catalog identifies the directory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Two copies of the block, so that the server still recognises the file if one is damaged.
inline constexpr uint64_t kDeviceHeaderBytes = 2 * kIoAlignment;

struct DeviceHeader {
  NvmeFileId id = 0;
  std::string owner;  // id of the server that made the file; at most 64 bytes
};

// Durable on OK. Errors: BlockFile's.
absl::Status WriteDeviceHeader(const DeviceHeader& header, const BlockFile& file);
// None if the file has nothing but zeros there: its creation did not end. DATA_LOSS (IO) if neither copy is a header;
// FAILED_PRECONDITION (LATER_VERSION) if a later version wrote the header;
// INTERNAL (IO) if that cannot be told.
absl::StatusOr<std::optional<DeviceHeader>> ReadDeviceHeader(const BlockFile& file);

}  // namespace ballast::storage
