// Digests that every processor must compute on self_test.cc's inputs. Written by self_test_test --print. A change here
// changes the state's bits: jobs of an earlier release would not continue exactly.
#pragma once

#include <cstdint>

namespace ballast::kernels {

struct ReleaseDigest {
  const char* function;
  uint32_t crc32c;
};

inline constexpr ReleaseDigest kReleaseDigests[] = {
    {"adamw/f32", 0x8332f948},
    {"adamw/bf16", 0x8ad69886},
    {"adamw/i8", 0xf9aa4da5},
    {"adamw/f8", 0x1888a2c2},
    {"adamw_amsgrad/f32", 0xd3aa00a2},
    {"adamw_amsgrad/bf16", 0x497cff93},
    {"adamw_amsgrad/i8", 0x7462a3bc},
    {"adamw_amsgrad/f8", 0xe1942000},
    {"adam/f32", 0xd73dd9f0},
    {"adam/bf16", 0x28f9fa3a},
    {"adam/i8", 0x1b0151e1},
    {"adam/f8", 0xfbf24623},
    {"adam_amsgrad/f32", 0xe298ea66},
    {"adam_amsgrad/bf16", 0x60e055e9},
    {"adam_amsgrad/i8", 0x3296b829},
    {"adam_amsgrad/f8", 0x8cb57cf2},
    {"sgd/f32", 0x4936955b},
    {"sgd/bf16", 0x4936955b},
    {"sgd/i8", 0x4936955b},
    {"sgd/f8", 0x4936955b},
    {"sgd_momentum/f32", 0xdea7c9c1},
    {"sgd_momentum/bf16", 0x97e97c10},
    {"sgd_momentum/i8", 0x90fe1c06},
    {"sgd_momentum/f8", 0x7d49ec50},
    {"sgd_nesterov/f32", 0xbc2000fa},
    {"sgd_nesterov/bf16", 0xedb8b795},
    {"sgd_nesterov/i8", 0x223873ca},
    {"sgd_nesterov/f8", 0x2bb74a89},
    {"adagrad/f32", 0xb803564e},
    {"adagrad/bf16", 0x93ea9bbe},
    {"adagrad/i8", 0x4bc5c7a8},
    {"adagrad/f8", 0xdc34ec6b},
    {"lion/f32", 0x7f431bee},
    {"lion/bf16", 0xfaa5a2d0},
    {"lion/i8", 0x6353e5b0},
    {"lion/f8", 0x04250935},
    {"ademamix/f32", 0x215de384},
    {"ademamix/bf16", 0xc2fb5fdb},
    {"adamw_schedule_free/f32", 0xde30ab1a},
    {"adamw/f32 f32 to f32", 0x21c67441},
    {"adamw/f32 f32 to bf16", 0x1d55ff9c},
    {"adamw/f32 f32 to f16", 0x5f626427},
    {"adamw/f32 bf16 to f32", 0x5bb624b4},
    {"adamw/f32 bf16 to bf16", 0x8332f948},
    {"adamw/f32 bf16 to f16", 0xad9a2500},
    {"adamw/f32 f16 to f32", 0x4649a1cb},
    {"adamw/f32 f16 to bf16", 0x9f47947a},
    {"adamw/f32 f16 to f16", 0x1fae5a1d},
    {"adamw/f32 bf16 to f8", 0x7e159649},
    {"to_f32/bf16", 0x4a2ef9f9},
    {"add_into/bf16", 0x8c28602b},
    {"from_f32/bf16", 0x85667d99},
    {"to_f32/f16", 0x3d3eb376},
    {"add_into/f16", 0x62506dd4},
    {"from_f32/f16", 0x3f072996},
    {"to_f32/e4m3", 0x2c46d60e},
    {"add_into/e4m3", 0x91a28ffb},
    {"from_f32/e4m3", 0xbb575d32},
    {"to_f32/e5m2", 0x5b799a84},
    {"add_into/e5m2", 0x63f30d31},
    {"from_f32/e5m2", 0xccaf6b22},
    {"to_f32/e4m3_blocks", 0xc8f9b841},
    {"from_f32/e4m3_blocks", 0xcb3555ea},
    {"norm/f32", 0xdaa78227},
    {"norm/bf16", 0x4f1da231},
    {"norm/f16", 0x9d1a529a},
    {"quantize/int8", 0x371ce9aa},
    {"dequantize/int8", 0x70a5205e},
    {"quantize/int4", 0xc8e9788b},
    {"dequantize/int4", 0x02ed8972},
    {"split_f32", 0x23130ff0},
    {"join_f32", 0x4abf1f9f},
};

}  // namespace ballast::kernels
