// The first blocks of a file of the NVMe tier outside the data directory: they say which file this is, whatever the
// path by which it is found, so that disks that were swapped, or a disk of another server, are noticed. The data
// directory's own file has none: the directory itself is known by its catalog.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// Two copies of the block: a file of which one is damaged is still known.
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
