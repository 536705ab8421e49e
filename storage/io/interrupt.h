// How a caller ends work that may take minutes.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace ballast::storage {

// The work calls it between its pieces, on its own thread. If it returns an error, the work ends, returns the error,
// and leaves nothing half done. It does not interrupt a single operation of the disk.
using Interrupt = absl::FunctionRef<absl::Status()>;

inline absl::Status Uninterrupted() { return absl::OkStatus(); }

}  // namespace ballast::storage
