// Forward and backward passes of the example model, one micro-batch at a time.
//
// A layer's backward pass recomputes its forward pass from the saved input, so that between the passes a micro-batch
// keeps only one [tokens, width] array per layer. All arrays are dense, row-major. Weights and gradients are the flat
// space of the unit, tensors at given places.
#pragma once

#include <cstdint>
#include <vector>

#include "ballast/client/examples/bytes_lm/model.h"

namespace ballast::client {

// First elements of a layer's tensors in its unit's flat space. The same for weights and gradients.
struct LayerPlaces {
  uint64_t attention_norm = 0, qkv = 0, attention_out = 0, mlp_norm = 0, gate_up = 0, down = 0;
};

// The passes over a layer, with scratch for one layer at a time. T is float, or double in tests. Threads: one; the
// weights may be shared. Allocates in the constructor only. REQUIRES: CheckShape(shape) is OK.
template <typename T>
class TransformerLayer {
 public:
  explicit TransformerLayer(const ModelShape& shape);

  // y[tokens, width] = layer(x).
  void Forward(const T* weights, const LayerPlaces& places, const T* x, T* y);
  // dx from dy (which may be the same array); writes every element of the tensors in `gradient`.
  void Backward(const T* weights, const LayerPlaces& places, const T* x, const T* dy, T* gradient, T* dx);

 private:
  // Everything up to the sum after attention, in middle_.
  void ForwardAttention(const T* weights, const LayerPlaces& places, const T* x);
  void ForwardMlp(const T* weights, const LayerPlaces& places);
  // From dmiddle_ to dx.
  void BackwardAttention(const T* weights, const LayerPlaces& places, const T* x, T* gradient, T* dx);
  // From dy to dmiddle_.
  void BackwardMlp(const T* weights, const LayerPlaces& places, const T* dy, T* gradient);
  // Turns queries and keys by their positions; direction -1 turns back.
  void Rotate(T* qkv, T direction) const;
  void Softmax(T* scores) const;
  void SoftmaxBackward(const T* scores, T* dscores) const;

  ModelShape shape_;
  std::vector<T> cosine_, sine_;            // [context, head_width / 2]
  std::vector<T> normed_, inverse_;         // input of qkv, 1 / rms
  std::vector<T> qkv_, scores_, attended_;  // scores: [sequences, heads, context, context], after softmax
  std::vector<T> middle_;                   // after attention
  std::vector<T> mlp_normed_, mlp_inverse_;
  std::vector<T> gate_up_, activated_;
  std::vector<T> projected_;  // [tokens, width], before it is added to the residual
  std::vector<T> dqkv_, dscores_, dmiddle_, dgate_up_, dactivated_, dwidth_, row_;
};

struct EmbeddingPlaces {
  uint64_t embedding = 0, final_norm = 0;
};

// The two ends of the model, which share the byte table.
template <typename T>
class EmbeddingEnds {
 public:
  explicit EmbeddingEnds(const ModelShape& shape);

  // x[tokens, width]: the inputs' vectors.
  void Embed(const T* weights, const EmbeddingPlaces& places, const uint8_t* inputs, T* x) const;
  // Mean cross entropy in nats, its derivative by x into dx, and the gradient of both tensors (overwritten).
  double LossAndBackward(const T* weights, const EmbeddingPlaces& places, const T* x, const uint8_t* targets,
                         T* gradient, T* dx);
  // Adds the input side's part to the gradient of the byte table.
  void EmbedBackward(const EmbeddingPlaces& places, const uint8_t* inputs, const T* dx, T* gradient) const;

 private:
  ModelShape shape_;
  std::vector<T> normed_, inverse_, logits_, dnormed_, row_;
};

extern template class TransformerLayer<float>;
extern template class TransformerLayer<double>;
extern template class EmbeddingEnds<float>;
extern template class EmbeddingEnds<double>;

}  // namespace ballast::client
