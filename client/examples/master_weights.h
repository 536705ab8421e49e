// The fp32 master weights of a run, in one file and as one number: what two runs are compared by.
//
// File: for each tensor in registration order the line "<name> <elements>\n", then the elements, little-endian fp32.
// Digest: CRC32C of the same bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/client/examples/model.h"
#include "ballast/client/examples/parameter_source.h"

namespace ballast::client {

// Reads every tensor at source's version(), one at a time, and writes them to `path` unless that is empty. Returns the
// digest.
absl::StatusOr<uint32_t> SaveMasterWeights(const ModelShape& shape, ParameterSource& source, const std::string& path);

}  // namespace ballast::client
