// The format of a data directory: a program looks at the format before anything else, and before the first write. An
// older program could take for free what a later program keeps.
//
// The file `ballast-format` has two numbers. `version` is the format of the newest program that has used the directory.
// `least_reader` is the oldest format whose programs may use the directory. A directory without the file is of format
// 1, from before there was the file.
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

// This program's format. `version` rises with each new key of the catalog, kind of file or kind of record;
// `least_reader` becomes that version where an older program would do harm, and every older program does with an
// unknown key.
inline constexpr DirectoryFormat kDirectoryFormat;

// Writes nothing. FAILED_PRECONDITION (LATER_VERSION) if this program must not use the directory; DATA_LOSS (IO) if the
// file is none; INTERNAL (IO) if it cannot be read.
absl::Status CheckDirectoryFormat(const std::string& directory);
// Checks, then writes this program's format, unless a later program's is there. Durable on OK. REQUIRES: the caller
// holds the directory's lock.
absl::Status SettleDirectoryFormat(const std::string& directory);

}  // namespace ballast::storage
