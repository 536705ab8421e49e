// The HBM of a test binary. Its target links either gpu_hbm.cc, for a GPU's HBM, or host_hbm.cc, for HBM played by the
// host.
#pragma once

#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

// In a binary for a GPU on a machine without one, ends the process as skipped (exit code 77).
HbmOpener TestHbm();

}  // namespace ballast::storage
