// The fp32 master weights of a run as a file and as a number, to compare two runs.
//
// File: for each tensor in registration order the line "<name> <elements>\n", then the elements, little-endian fp32.
// Digest: CRC32C of the same bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/client/examples/bytes_lm/model.h"
#include "ballast/client/examples/parameter_source.h"

namespace ballast::client {

// Reads the tensors one at a time at source's version(), and writes them to `path` unless `path` is empty. Returns the
// digest.
absl::StatusOr<uint32_t> SaveMasterWeights(const ModelShape& shape, ParameterSource& source, const std::string& path);

}  // namespace ballast::client
