// What every processor must compute on self_test.cc's inputs. Written by self_test_test --print; a change here is a
// change of the state's bits: jobs of an earlier release would not continue as they were.
#pragma once

#include <cstdint>

namespace ballast::kernels {

struct ReleaseDigest {
  const char* function;
  uint32_t crc32c;
};

inline constexpr ReleaseDigest kReleaseDigests[] = {
    {"adamw/f32", 0x85516780},
    {"adamw/bf16", 0xa92cb5cb},
    {"adamw/i8", 0x0820f8cc},
    {"adamw/f8", 0x922866a2},
    {"adamw_amsgrad/f32", 0xe3ee1639},
    {"adamw_amsgrad/bf16", 0xf9e9c440},
    {"adamw_amsgrad/i8", 0x66ca164c},
    {"adamw_amsgrad/f8", 0xc7acc201},
    {"adam/f32", 0xa3e3828e},
    {"adam/bf16", 0xb49f3ded},
    {"adam/i8", 0xc9dd4f00},
    {"adam/f8", 0x9f877cfb},
    {"adam_amsgrad/f32", 0x0cbdf6c7},
    {"adam_amsgrad/bf16", 0x52e965f5},
    {"adam_amsgrad/i8", 0x12e24a8d},
    {"adam_amsgrad/f8", 0xd7bc67a2},
    {"sgd/f32", 0x05a2bce0},
    {"sgd/bf16", 0x05a2bce0},
    {"sgd/i8", 0x05a2bce0},
    {"sgd/f8", 0x05a2bce0},
    {"sgd_momentum/f32", 0xb65ca66f},
    {"sgd_momentum/bf16", 0xa224fdf5},
    {"sgd_momentum/i8", 0xe32d1cc8},
    {"sgd_momentum/f8", 0x49c1b9d7},
    {"sgd_nesterov/f32", 0x9f03d3ad},
    {"sgd_nesterov/bf16", 0x595dab40},
    {"sgd_nesterov/i8", 0x46e9daef},
    {"sgd_nesterov/f8", 0x038fd584},
    {"adagrad/f32", 0xcd7cc67b},
    {"adagrad/bf16", 0x620e4dda},
    {"adagrad/i8", 0xd7592241},
    {"adagrad/f8", 0x49e70137},
    {"lion/f32", 0xf283cce4},
    {"lion/bf16", 0xa709168e},
    {"lion/i8", 0x0dbf33b0},
    {"lion/f8", 0x22c6333e},
    {"adamw/f32 f32 to f32", 0xb941b6d6},
    {"adamw/f32 f32 to bf16", 0x03c84221},
    {"adamw/f32 f32 to f16", 0x640ae8ca},
    {"adamw/f32 bf16 to f32", 0x5b524250},
    {"adamw/f32 bf16 to bf16", 0x85516780},
    {"adamw/f32 bf16 to f16", 0x5996732c},
    {"adamw/f32 f16 to f32", 0x74610282},
    {"adamw/f32 f16 to bf16", 0x3487d8b7},
    {"adamw/f32 f16 to f16", 0xf4ee3ad4},
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
    {"norm/f32", 0xdaa78227},
    {"norm/bf16", 0x4f1da231},
    {"norm/f16", 0x9d1a529a},
    {"quantize/int8", 0x371ce9aa},
    {"dequantize/int8", 0x70a5205e},
    {"quantize/int4", 0xc8e9788b},
    {"dequantize/int4", 0x02ed8972},
};

}  // namespace ballast::kernels
