// Arithmetic of the example model, templated so that a test can check float code in double.
//
// Deterministic: sums run over eight lanes in a fixed order (so the compiler can vectorise them although it must not
// reorder sums). A BLAS computes products on one thread, with beta = 0; their shapes do not depend on the number of
// ranks or threads.
#pragma once

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace ballast::client {

// A matrix as the BLAS sees it. `rows` and `cols` count after the transposition.
template <typename T>
struct MatrixView {
  const T* data = nullptr;
  int rows = 0;
  int cols = 0;
  int stride = 0;  // elements between stored rows
  bool transposed = false;

  MatrixView Transposed() const { return {data, cols, rows, stride, !transposed}; }
};

template <typename T>
MatrixView<T> Dense(const T* data, int rows, int cols) {
  return {data, rows, cols, cols, false};
}

inline void CallGemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha, const float* a, int lda,
                     const float* b, int ldb, float* c, int ldc) {
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, 0, c, ldc);
}
inline void CallGemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, double alpha, const double* a,
                     int lda, const double* b, int ldb, double* c, int ldc) {
  cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, 0, c, ldc);
}

// c = alpha x a x b, rows of c `stride` apart. c is written, never read.
template <typename T>
void Multiply(T alpha, MatrixView<T> a, MatrixView<T> b, T* c, int stride) {
  CallGemm(a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans, a.rows, b.cols, a.cols,
           alpha, a.data, a.stride, b.data, b.stride, c, stride);
}

inline constexpr int kLanes = 8;

template <typename T>
T AddLanes(const T (&lane)[kLanes]) {
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

template <typename T>
T Dot(const T* a, const T* b, int n) {
  T lane[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) lane[i % kLanes] += a[i] * b[i];
  return AddLanes(lane);
}

template <typename T>
T Sum(const T* a, int n) {
  T lane[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += a[i + j];
  }
  for (; i < n; ++i) lane[i % kLanes] += a[i];
  return AddLanes(lane);
}

// REQUIRES: n > 0.
template <typename T>
T Largest(const T* a, int n) {
  T lane[kLanes];
  std::fill(lane, lane + kLanes, a[0]);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] = a[i + j] > lane[j] ? a[i + j] : lane[j];
  }
  for (; i < n; ++i) lane[0] = a[i] > lane[0] ? a[i] : lane[0];
  return *std::max_element(lane, lane + kLanes);
}

// e^x within 2 ulp for |x| < 87, saturating beyond. Branch-free, so that loops of calls become vectors. Source: Cephes
// expf (Moshier 1989).
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  // 1.5 x 2^23: adding it leaves the nearest integer in the low bits.
  constexpr float kRound = 12582912.0f;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r * r + r) + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) << 23;  // n in the exponent's place
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + exponent);
}
inline double Exp(double x) { return std::exp(x); }

inline constexpr double kNormEpsilon = 1e-5;

// For each row: y = x / rms(x) * gain. inverse[i] = 1 / rms of row i, which the backward pass needs.
template <typename T>
void RmsNorm(const T* x, const T* gain, int rows, int width, T* y, T* inverse) {
  for (int i = 0; i < rows; ++i, x += width, y += width) {
    const T r = T(1) / std::sqrt(Dot(x, x, width) / static_cast<T>(width) + static_cast<T>(kNormEpsilon));
    inverse[i] = r;
    for (int j = 0; j < width; ++j) y[j] = x[j] * r * gain[j];
  }
}

// dx = residual + the gradient with respect to x; `residual` may be dx itself. Overwrites dgain. scratch[width].
template <typename T>
void RmsNormBackward(const T* x, const T* gain, const T* inverse, const T* dy, const T* residual, int rows, int width,
                     T* dx, T* dgain, T* scratch) {
  std::fill(dgain, dgain + width, T(0));
  for (int i = 0; i < rows; ++i, x += width, dy += width, dx += width, residual += width) {
    const T r = inverse[i];
    for (int j = 0; j < width; ++j) {
      scratch[j] = dy[j] * gain[j];
      dgain[j] += dy[j] * (x[j] * r);
    }
    const T back = Dot(scratch, x, width) * (r * r * r) / static_cast<T>(width);
    for (int j = 0; j < width; ++j) dx[j] = residual[j] + (scratch[j] * r - x[j] * back);
  }
}

}  // namespace ballast::client
