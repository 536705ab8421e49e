// Reads a payload of a gradient log, and rebuilds a block that the disk has lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/log_format.h"

namespace ballast::storage {

// DATA_LOSS (CHECKSUM): `what` of a log was durable and cannot be read.
absl::Status RottenLog(const BlockFile& file, absl::string_view what);

// Reads a payload into `to` (its exact bytes). A single block that is rotten or unreadable is rebuilt from the
// payload's parity: `rebuilt` gets the block's offset in the file; without `rebuilt` a warning names it.
// DATA_LOSS (CHECKSUM), INTERNAL (IO). Blocks; any thread.
absl::Status ReadPayload(const BlockFile& file, const PayloadPlace& place, absl::Span<std::byte> to,
                         std::optional<uint64_t>* rebuilt = nullptr);

}  // namespace ballast::storage
