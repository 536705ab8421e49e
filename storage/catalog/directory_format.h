// The format of a data directory. A program reads the format before any other file, and writes its own format before it
// writes anything else. Otherwise an older program could treat space as free that a later program uses.
//
// The file `ballast-format` has two numbers. `version` is the format of the newest program that has used the directory.
// `least_reader` is the oldest format whose programs may use the directory. A directory without the file is of format
// 1, which is older than the file.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ballast::storage {

inline constexpr char kFormatFile[] = "ballast-format";

struct DirectoryFormat {
  uint32_t version = 1;
  uint32_t least_reader = 1;
};

// This program's format. `version` rises with each new key of the catalog, kind of file or record, and field of a
// record. If an older program would do harm, `least_reader` rises to the same number. A new key, and a new field of
// what the catalog or a log keeps, always need that: an older program frees what it does not know, or calls it damaged.
// tests/tools/directory_format.py fails if one of these changed and the number did not.
//
// 2: tables of members, chunks that are being copied, epochs of pins, the number and the mark of the directory.
inline constexpr DirectoryFormat kDirectoryFormat{.version = 2, .least_reader = 2};

// Writes nothing. FAILED_PRECONDITION (LATER_VERSION) if this program must not use the directory; DATA_LOSS (IO) if the
// file is damaged; INTERNAL (IO) if it cannot be read.
absl::Status CheckDirectoryFormat(const std::string& directory);
// Checks, then writes this program's format, unless a later program's is there. Durable on OK. REQUIRES: the caller
// holds the directory's lock.
absl::Status SettleDirectoryFormat(const std::string& directory);

}  // namespace ballast::storage
