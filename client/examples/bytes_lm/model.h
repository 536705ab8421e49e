// The byte-level language model: its shape, its tensors and their initial values. transformer.h computes it.
//
// GPT-style, as Llama refined it: RMSNorm (Zhang & Sennrich 2019) before each block, rotary positions (Su et al. 2021),
// causal attention, SwiGLU (Shazeer 2020), and one table of 256 byte vectors for both input and output (Press & Wolf
// 2017).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::client {

inline constexpr int kByteValues = 256;

struct ModelShape {
  int layers = 4;
  int width = 256;
  int heads = 4;
  int context = 128;  // bytes per sequence
  int sequences = 4;  // per micro-batch

  int tokens() const { return context * sequences; }  // per micro-batch
  int head_width() const { return width / heads; }
  // 8/3 of the width, so that the three matrices of SwiGLU weigh as much as the usual two; a multiple of 16 for the
  // BLAS.
  int hidden() const { return (width * 8 / 3 + 15) / 16 * 16; }
};

// INVALID_ARGUMENT for sizes that are not positive, too large, or do not divide.
absl::Status CheckShape(const ModelShape& shape);

// Parameter groups: norm gains are not decayed.
inline constexpr uint32_t kMatrixGroup = 0;
inline constexpr uint32_t kGainGroup = 1;
inline constexpr uint32_t kGroupCount = 2;

enum class TensorRole { kEmbedding, kFinalNorm, kAttentionNorm, kQkv, kAttentionOut, kMlpNorm, kGateUp, kDown };

struct ModelTensor {
  std::string name;
  std::string unit;
  std::vector<uint64_t> shape;
  uint32_t group = 0;
  TensorRole role = TensorRole::kEmbedding;
  uint64_t elements() const;
};

// Unit 0 holds the byte table and the final norm, unit 1 + i is layer i. In registration order.
std::vector<ModelTensor> TensorsOf(const ModelShape& shape);

// Values [first, first + values.size()) of a tensor. Gains are 1. Matrices are about normal with deviation 0.02
// (Radford et al. 2019), divided by sqrt(2 x layers) for matrices that write into the residual stream. Exact arithmetic
// on a keyed hash: the same bits on every machine, for any split of the filling.
void FillInitialValues(const ModelShape& shape, const ModelTensor& tensor, uint64_t seed, uint64_t first,
                       absl::Span<float> values);

}  // namespace ballast::client
