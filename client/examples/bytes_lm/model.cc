#include "ballast/client/examples/bytes_lm/model.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ballast/client/examples/bytes_lm/counter_random.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {

absl::Status CheckShape(const ModelShape& shape) {
  // Far above useful sizes for a byte model; keeps every element count below 2^31, as BLAS requires.
  constexpr int kSizeMax = 8192;
  const std::pair<const char*, int> sizes[] = {{"layers", shape.layers},
                                               {"width", shape.width},
                                               {"heads", shape.heads},
                                               {"context", shape.context},
                                               {"batch", shape.sequences}};
  for (const auto& [name, size] : sizes) {
    if (size < 1 || size > kSizeMax) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                          absl::StrCat(name, " must be from 1 to ", kSizeMax, ", got ", size));
    }
  }
  if (shape.width % shape.heads != 0 || shape.head_width() % 2 != 0) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("width must be a multiple of 2 x heads (rotary positions turn pairs), got width ",
                                     shape.width, " and ", shape.heads, " heads"));
  }
  if (int64_t{shape.tokens()} * shape.hidden() * 2 > INT32_MAX || int64_t{shape.tokens()} * kByteValues > INT32_MAX) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("a micro-batch of ", shape.tokens(), " tokens is too large for width ",
                                     shape.width, "; lower batch or context, and raise micro-batches"));
  }
  return absl::OkStatus();
}

uint64_t ModelTensor::elements() const {
  uint64_t product = 1;
  for (const uint64_t size : shape) product *= size;
  return product;
}

std::vector<ModelTensor> TensorsOf(const ModelShape& shape) {
  const uint64_t width = shape.width;
  const uint64_t hidden = shape.hidden();
  std::vector<ModelTensor> tensors = {
      {"embedding", "embedding", {kByteValues, width}, kMatrixGroup, TensorRole::kEmbedding},
      {"final_norm", "embedding", {width}, kGainGroup, TensorRole::kFinalNorm},
  };
  for (int i = 0; i < shape.layers; ++i) {
    const std::string unit = absl::StrCat("layer.", i);
    tensors.push_back({unit + ".attention.qkv", unit, {3 * width, width}, kMatrixGroup, TensorRole::kQkv});
    tensors.push_back({unit + ".attention.out", unit, {width, width}, kMatrixGroup, TensorRole::kAttentionOut});
    tensors.push_back({unit + ".mlp.gate_up", unit, {2 * hidden, width}, kMatrixGroup, TensorRole::kGateUp});
    tensors.push_back({unit + ".mlp.down", unit, {width, hidden}, kMatrixGroup, TensorRole::kDown});
    tensors.push_back({unit + ".attention.norm", unit, {width}, kGainGroup, TensorRole::kAttentionNorm});
    tensors.push_back({unit + ".mlp.norm", unit, {width}, kGainGroup, TensorRole::kMlpNorm});
  }
  return tensors;
}

void FillInitialValues(const ModelShape& shape, const ModelTensor& tensor, uint64_t seed, uint64_t first,
                       absl::Span<float> values) {
  if (tensor.group == kGainGroup) {
    std::fill(values.begin(), values.end(), 1.0f);
    return;
  }
  const bool into_residual = tensor.role == TensorRole::kAttentionOut || tensor.role == TensorRole::kDown;
  const double deviation = 0.02 / (into_residual ? std::sqrt(2.0 * shape.layers) : 1.0);
  // The sum of four uniform 16-bit numbers has variance (2^32 - 1) / 3 and comes close enough to a normal.
  constexpr double kSumMean = 2 * 65535.0;
  const double scale = deviation / std::sqrt(4294967295.0 / 3);
  const uint64_t key = MixKey(MixBits(seed), tensor.name);
  for (uint64_t i = 0; i < values.size(); ++i) {
    const uint64_t bits = MixKey(key, first + i);
    const uint64_t sum = (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
    values[i] = static_cast<float>((static_cast<double>(sum) - kSumMean) * scale);
  }
}

}  // namespace ballast::client
