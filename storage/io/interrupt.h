// How a caller ends work that may take minutes.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace ballast::storage {

// Asked between pieces of the work, on the thread that works. An error ends the work, which returns the error and
// leaves nothing half done. A single operation of the disk is not interrupted.
using Interrupt = absl::FunctionRef<absl::Status()>;

inline absl::Status Uninterrupted() { return absl::OkStatus(); }

}  // namespace ballast::storage
