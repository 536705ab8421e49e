// Which instruction sets the kernels are compiled for. Include before any Highway header.
//
// Only sets with a fused multiply-add qualify, since SSE's would be a multiply and an add, which round twice; without
// one the scalar code runs. Sets whose vector length is unknown at compile time are left out: the norm's lanes need it.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// Also where the build's own flags promise more: the scalar path stays there to be compared with.
#define HWY_COMPILE_ALL_ATTAINABLE
