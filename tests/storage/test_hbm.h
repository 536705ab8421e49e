// The HBM of a test binary. Its target links one of two sources: gpu_hbm.cc, a GPU's, or host_hbm.cc, which the host
// plays.
#pragma once

#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

// Ends the process as skipped (77) where there is no GPU and the binary is for one.
HbmOpener TestHbm();

}  // namespace ballast::storage
