// A vector of MUSTER_SIMD_WIDTH floats and its operations, in the compiler's vector extension (gcc
// and clang). Only the loops include it, once per instruction set. Everything is file-local, so
// that no function compiled for a wide set can be linked into code for another.
#ifndef MUSTER_KERNELS_SIMD_VECTOR_H_
#define MUSTER_KERNELS_SIMD_VECTOR_H_

#include <cstdint>

namespace {

constexpr int64_t kWidth = MUSTER_SIMD_WIDTH;
typedef float Vec __attribute__((vector_size(MUSTER_SIMD_WIDTH * 4)));
typedef int32_t IntVec __attribute__((vector_size(MUSTER_SIMD_WIDTH * 4)));

#define MUSTER_INLINE inline __attribute__((always_inline))
#define MUSTER_LAMBDA __attribute__((always_inline))

MUSTER_INLINE Vec Broadcast(float x) { return Vec{} + x; }
MUSTER_INLINE Vec Load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
MUSTER_INLINE void Store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }
// The first n < kWidth elements; the others are `rest`.
MUSTER_INLINE Vec LoadTail(const float* p, int64_t n, float rest = 0) {
  Vec x = Broadcast(rest);
  for (int64_t i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
MUSTER_INLINE void StoreTail(float* p, Vec x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = x[i];
}
struct WholeLoad {
  MUSTER_INLINE Vec operator()(const float* p) const { return Load(p); }
};
struct TailLoad {
  int64_t n;
  MUSTER_INLINE Vec operator()(const float* p) const { return LoadTail(p, n); }
};
MUSTER_INLINE IntVec Bits(Vec x) { return reinterpret_cast<IntVec>(x); }
MUSTER_INLINE Vec FromBits(IntVec x) { return reinterpret_cast<Vec>(x); }
MUSTER_INLINE Vec Max(Vec a, Vec b) { return a > b ? a : b; }

// Pairwise, in a fixed order.
MUSTER_INLINE float SumOf(Vec x) {
  float lanes[kWidth];
  __builtin_memcpy(lanes, &x, sizeof(x));
  for (int64_t n = kWidth / 2; n > 0; n /= 2) {
    for (int64_t i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  }
  return lanes[0];
}
MUSTER_INLINE double SumOfAsDouble(Vec x) {
  double sum = 0;
  for (int64_t i = 0; i < kWidth; ++i) sum += static_cast<double>(x[i]);
  return sum;
}
MUSTER_INLINE float MaxOf(Vec x) {
  float most = x[0];
  for (int64_t i = 1; i < kWidth; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

MUSTER_INLINE Vec Sqrt(Vec x) {
  Vec root;
  for (int64_t i = 0; i < kWidth; ++i) root[i] = __builtin_sqrtf(x[i]);
  return root;
}

// exp by range reduction to |r| <= ln(2)/2 (Cody and Waite) and a polynomial of degree 6 (the
// Taylor terms with coefficients fitted to the interval, as in the Cephes library).
MUSTER_INLINE Vec Exp(Vec x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer
  const Vec lowest = Broadcast(-86.6f), highest = Broadcast(88.72283f);
  // Comparisons are written so that NaN passes through.
  Vec clamped = x < lowest ? lowest : x;
  clamped = clamped > highest ? highest : clamped;
  const Vec shifted = clamped * 1.44269504088896341f + kMagic;
  const Vec n = shifted - kMagic;
  Vec r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = Broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors, because 2^128 is not a float: 2 x 2^(n-1).
  const IntVec exponent = Bits(shifted) - Bits(Broadcast(kMagic)) + 126;
  const Vec y = (p * 2.0f) * FromBits(exponent << 23);
  const Vec zero = Broadcast(0.0f), infinite = Broadcast(__builtin_inff());
  return x < lowest ? zero : (x > highest ? infinite : y);
}

}  // namespace

#endif  // MUSTER_KERNELS_SIMD_VECTOR_H_
