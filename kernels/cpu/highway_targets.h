// Chooses the instruction sets for which the kernels are compiled. Include before any Highway header.
//
// Only sets with a fused multiply-add qualify: SSE would multiply and add, and round twice; processors without a fused
// multiply-add run the scalar code. Sets of unknown vector length are left out: the norm's lanes need a fixed length.
// Of SVE, lengths that servers have remain: SVE_256 (Neoverse V1) and SVE2_128 (V2, N2); a processor with another one
// runs NEON.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_RVV)
// Even where the build's flags promise more, keep the scalar path: tests compare with it.
#define HWY_COMPILE_ALL_ATTAINABLE
