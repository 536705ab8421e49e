#include "ballast/client/examples/bytes_lm/transformer.h"

#include <algorithm>
#include <cmath>

#include "ballast/client/examples/bytes_lm/numerics.h"

namespace ballast::client {
namespace {

template <typename T>
void AddRows(const T* a, const T* b, size_t n, T* sum) {
  for (size_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

}  // namespace

template <typename T>
TransformerLayer<T>::TransformerLayer(const ModelShape& shape) : shape_(shape) {
  const size_t tokens = shape.tokens();
  const size_t width = shape.width;
  const size_t hidden = shape.hidden();
  const size_t scores = size_t(shape.sequences) * shape.heads * shape.context * shape.context;
  for (auto* a : {&normed_, &attended_, &middle_, &mlp_normed_, &projected_, &dmiddle_, &dwidth_})
    a->resize(tokens * width);
  for (auto* a : {&inverse_, &mlp_inverse_}) a->resize(tokens);
  for (auto* a : {&qkv_, &dqkv_}) a->resize(tokens * 3 * width);
  for (auto* a : {&gate_up_, &dgate_up_}) a->resize(tokens * 2 * hidden);
  for (auto* a : {&activated_, &dactivated_}) a->resize(tokens * hidden);
  scores_.resize(scores);
  dscores_.resize(size_t(shape.context) * shape.context);
  row_.resize(width);

  const int half = shape.head_width() / 2;
  for (int position = 0; position < shape.context; ++position) {
    for (int i = 0; i < half; ++i) {
      const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
      cosine_.push_back(static_cast<T>(std::cos(angle)));
      sine_.push_back(static_cast<T>(std::sin(angle)));
    }
  }
}

template <typename T>
void TransformerLayer<T>::Rotate(T* qkv, T direction) const {
  const int half = shape_.head_width() / 2;
  for (int token = 0; token < shape_.tokens(); ++token) {
    const T* cosine = cosine_.data() + (token % shape_.context) * half;
    const T* sine = sine_.data() + (token % shape_.context) * half;
    // The heads of the queries, then those of the keys.
    for (int head = 0; head < 2 * shape_.heads; ++head) {
      T* low = qkv + size_t(token) * 3 * shape_.width + head * shape_.head_width();
      T* high = low + half;
      for (int i = 0; i < half; ++i) {
        const T s = sine[i] * direction;
        const T a = low[i] * cosine[i] - high[i] * s;
        const T b = high[i] * cosine[i] + low[i] * s;
        low[i] = a;
        high[i] = b;
      }
    }
  }
}

template <typename T>
void TransformerLayer<T>::Softmax(T* scores) const {
  for (int i = 0; i < shape_.context; ++i, scores += shape_.context) {
    const T top = Largest(scores, i + 1);
    for (int j = 0; j <= i; ++j) scores[j] = Exp(scores[j] - top);
    const T scale = T(1) / Sum(scores, i + 1);
    for (int j = 0; j <= i; ++j) scores[j] *= scale;
    std::fill(scores + i + 1, scores + shape_.context, T(0));
  }
}

template <typename T>
void TransformerLayer<T>::SoftmaxBackward(const T* scores, T* dscores) const {
  for (int i = 0; i < shape_.context; ++i, scores += shape_.context, dscores += shape_.context) {
    const T mean = Dot(scores, dscores, i + 1);
    for (int j = 0; j <= i; ++j) dscores[j] = scores[j] * (dscores[j] - mean);
    std::fill(dscores + i + 1, dscores + shape_.context, T(0));
  }
}

template <typename T>
void TransformerLayer<T>::ForwardAttention(const T* weights, const LayerPlaces& places, const T* x) {
  const int tokens = shape_.tokens(), width = shape_.width, context = shape_.context, head = shape_.head_width();
  RmsNorm(x, weights + places.attention_norm, tokens, width, normed_.data(), inverse_.data());
  Multiply(T(1), Dense(normed_.data(), tokens, width), Dense(weights + places.qkv, 3 * width, width).Transposed(),
           qkv_.data(), 3 * width);
  Rotate(qkv_.data(), T(1));

  const T scale = T(1) / std::sqrt(static_cast<T>(head));
  T* scores = scores_.data();
  for (int s = 0; s < shape_.sequences; ++s) {
    for (int h = 0; h < shape_.heads; ++h, scores += context * context) {
      const T* query = qkv_.data() + size_t(s) * context * 3 * width + h * head;
      const MatrixView<T> q{query, context, head, 3 * width, false};
      const MatrixView<T> k{query + width, context, head, 3 * width, false};
      const MatrixView<T> v{query + 2 * width, context, head, 3 * width, false};
      Multiply(scale, q, k.Transposed(), scores, context);
      Softmax(scores);
      Multiply(T(1), Dense<T>(scores, context, context), v, attended_.data() + size_t(s) * context * width + h * head,
               width);
    }
  }
  Multiply(T(1), Dense(attended_.data(), tokens, width),
           Dense(weights + places.attention_out, width, width).Transposed(), projected_.data(), width);
  AddRows(x, projected_.data(), middle_.size(), middle_.data());
}

template <typename T>
void TransformerLayer<T>::ForwardMlp(const T* weights, const LayerPlaces& places) {
  const int tokens = shape_.tokens(), width = shape_.width, hidden = shape_.hidden();
  RmsNorm(middle_.data(), weights + places.mlp_norm, tokens, width, mlp_normed_.data(), mlp_inverse_.data());
  Multiply(T(1), Dense(mlp_normed_.data(), tokens, width),
           Dense(weights + places.gate_up, 2 * hidden, width).Transposed(), gate_up_.data(), 2 * hidden);
  for (int i = 0; i < tokens; ++i) {
    const T* gate = gate_up_.data() + size_t(i) * 2 * hidden;
    const T* up = gate + hidden;
    T* activated = activated_.data() + size_t(i) * hidden;
    // Two loops: in one, the compiler also divides by the bounds of Exp, whose denormal quotients are slow.
    for (int j = 0; j < hidden; ++j) activated[j] = Exp(-gate[j]);
    for (int j = 0; j < hidden; ++j) activated[j] = gate[j] / (T(1) + activated[j]) * up[j];
  }
}

template <typename T>
void TransformerLayer<T>::Forward(const T* weights, const LayerPlaces& places, const T* x, T* y) {
  const int tokens = shape_.tokens(), width = shape_.width, hidden = shape_.hidden();
  ForwardAttention(weights, places, x);
  ForwardMlp(weights, places);
  Multiply(T(1), Dense(activated_.data(), tokens, hidden), Dense(weights + places.down, width, hidden).Transposed(),
           projected_.data(), width);
  AddRows(middle_.data(), projected_.data(), middle_.size(), y);
}

template <typename T>
void TransformerLayer<T>::BackwardMlp(const T* weights, const LayerPlaces& places, const T* dy, T* gradient) {
  const int tokens = shape_.tokens(), width = shape_.width, hidden = shape_.hidden();
  Multiply(T(1), Dense(dy, tokens, width).Transposed(), Dense<T>(activated_.data(), tokens, hidden),
           gradient + places.down, hidden);
  Multiply(T(1), Dense(dy, tokens, width), Dense(weights + places.down, width, hidden), dactivated_.data(), hidden);
  for (int i = 0; i < tokens; ++i) {
    const T* gate = gate_up_.data() + size_t(i) * 2 * hidden;
    const T* up = gate + hidden;
    const T* dactivated = dactivated_.data() + size_t(i) * hidden;
    T* dgate = dgate_up_.data() + size_t(i) * 2 * hidden;
    T* dup = dgate + hidden;
    for (int j = 0; j < hidden; ++j) dgate[j] = Exp(-gate[j]);
    for (int j = 0; j < hidden; ++j) {
      const T sigmoid = T(1) / (T(1) + dgate[j]);
      dup[j] = dactivated[j] * (gate[j] * sigmoid);
      dgate[j] = dactivated[j] * up[j] * (sigmoid * (T(1) + gate[j] * (T(1) - sigmoid)));
    }
  }
  const MatrixView<T> dgate_up = Dense<T>(dgate_up_.data(), tokens, 2 * hidden);
  Multiply(T(1), dgate_up.Transposed(), Dense<T>(mlp_normed_.data(), tokens, width), gradient + places.gate_up, width);
  Multiply(T(1), dgate_up, Dense(weights + places.gate_up, 2 * hidden, width), dwidth_.data(), width);
  RmsNormBackward(middle_.data(), weights + places.mlp_norm, mlp_inverse_.data(), dwidth_.data(), dy, tokens, width,
                  dmiddle_.data(), gradient + places.mlp_norm, row_.data());
}

template <typename T>
void TransformerLayer<T>::BackwardAttention(const T* weights, const LayerPlaces& places, const T* x, T* gradient,
                                            T* dx) {
  const int tokens = shape_.tokens(), width = shape_.width, context = shape_.context, head = shape_.head_width();
  const MatrixView<T> dmiddle = Dense<T>(dmiddle_.data(), tokens, width);
  Multiply(T(1), dmiddle.Transposed(), Dense<T>(attended_.data(), tokens, width), gradient + places.attention_out,
           width);
  T* dattended = dwidth_.data();
  Multiply(T(1), dmiddle, Dense(weights + places.attention_out, width, width), dattended, width);

  const T scale = T(1) / std::sqrt(static_cast<T>(head));
  const T* scores = scores_.data();
  for (int s = 0; s < shape_.sequences; ++s) {
    for (int h = 0; h < shape_.heads; ++h, scores += context * context) {
      const size_t start = size_t(s) * context * 3 * width + h * head;
      const MatrixView<T> q{qkv_.data() + start, context, head, 3 * width, false};
      const MatrixView<T> k{qkv_.data() + start + width, context, head, 3 * width, false};
      const MatrixView<T> v{qkv_.data() + start + 2 * width, context, head, 3 * width, false};
      const MatrixView<T> dout{dattended + size_t(s) * context * width + h * head, context, head, width, false};
      T* dquery = dqkv_.data() + start;
      Multiply(T(1), Dense(scores, context, context).Transposed(), dout, dquery + 2 * width, 3 * width);
      Multiply(T(1), dout, v.Transposed(), dscores_.data(), context);
      SoftmaxBackward(scores, dscores_.data());
      const MatrixView<T> dscores = Dense<T>(dscores_.data(), context, context);
      Multiply(scale, dscores, k, dquery, 3 * width);
      Multiply(scale, dscores.Transposed(), q, dquery + width, 3 * width);
    }
  }
  Rotate(dqkv_.data(), T(-1));
  const MatrixView<T> dqkv = Dense<T>(dqkv_.data(), tokens, 3 * width);
  Multiply(T(1), dqkv.Transposed(), Dense<T>(normed_.data(), tokens, width), gradient + places.qkv, width);
  Multiply(T(1), dqkv, Dense(weights + places.qkv, 3 * width, width), dwidth_.data(), width);
  RmsNormBackward(x, weights + places.attention_norm, inverse_.data(), dwidth_.data(), dmiddle_.data(), tokens, width,
                  dx, gradient + places.attention_norm, row_.data());
}

template <typename T>
void TransformerLayer<T>::Backward(const T* weights, const LayerPlaces& places, const T* x, const T* dy, T* gradient,
                                   T* dx) {
  ForwardAttention(weights, places, x);
  ForwardMlp(weights, places);
  BackwardMlp(weights, places, dy, gradient);
  BackwardAttention(weights, places, x, gradient, dx);
}

template <typename T>
EmbeddingEnds<T>::EmbeddingEnds(const ModelShape& shape) : shape_(shape) {
  const size_t tokens = shape.tokens();
  for (auto* a : {&normed_, &dnormed_}) a->resize(tokens * shape.width);
  inverse_.resize(tokens);
  logits_.resize(tokens * kByteValues);
  row_.resize(shape.width);
}

template <typename T>
void EmbeddingEnds<T>::Embed(const T* weights, const EmbeddingPlaces& places, const uint8_t* inputs, T* x) const {
  const T* table = weights + places.embedding;
  for (int i = 0; i < shape_.tokens(); ++i) {
    std::copy_n(table + size_t(inputs[i]) * shape_.width, shape_.width, x + size_t(i) * shape_.width);
  }
}

template <typename T>
double EmbeddingEnds<T>::LossAndBackward(const T* weights, const EmbeddingPlaces& places, const T* x,
                                         const uint8_t* targets, T* gradient, T* dx) {
  const int tokens = shape_.tokens(), width = shape_.width;
  const MatrixView<T> table = Dense(weights + places.embedding, kByteValues, width);
  RmsNorm(x, weights + places.final_norm, tokens, width, normed_.data(), inverse_.data());
  Multiply(T(1), Dense<T>(normed_.data(), tokens, width), table.Transposed(), logits_.data(), kByteValues);

  double loss = 0;
  for (int i = 0; i < tokens; ++i) {
    T* row = logits_.data() + size_t(i) * kByteValues;
    const T top = Largest(row, kByteValues);
    const T target = row[targets[i]];
    for (int j = 0; j < kByteValues; ++j) row[j] = Exp(row[j] - top);
    const T sum = Sum(row, kByteValues);
    loss += std::log(static_cast<double>(sum)) + (static_cast<double>(top) - static_cast<double>(target));
    const T scale = T(1) / (sum * static_cast<T>(tokens));
    for (int j = 0; j < kByteValues; ++j) row[j] *= scale;
    row[targets[i]] -= T(1) / static_cast<T>(tokens);
  }

  const MatrixView<T> dlogits = Dense<T>(logits_.data(), tokens, kByteValues);
  Multiply(T(1), dlogits.Transposed(), Dense<T>(normed_.data(), tokens, width), gradient + places.embedding, width);
  Multiply(T(1), dlogits, table, dnormed_.data(), width);
  // No residual passes the final norm: add zeros.
  std::fill(dx, dx + size_t(tokens) * width, T(0));
  RmsNormBackward(x, weights + places.final_norm, inverse_.data(), dnormed_.data(), dx, tokens, width, dx,
                  gradient + places.final_norm, row_.data());
  return loss / tokens;
}

template <typename T>
void EmbeddingEnds<T>::EmbedBackward(const EmbeddingPlaces& places, const uint8_t* inputs, const T* dx,
                                     T* gradient) const {
  for (int i = 0; i < shape_.tokens(); ++i) {
    T* row = gradient + places.embedding + size_t(inputs[i]) * shape_.width;
    AddRows<T>(row, dx + size_t(i) * shape_.width, shape_.width, row);
  }
}

template class TransformerLayer<float>;
template class TransformerLayer<double>;
template class EmbeddingEnds<float>;
template class EmbeddingEnds<double>;

}  // namespace ballast::client
