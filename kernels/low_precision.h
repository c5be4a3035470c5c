// bf16 and fp16 on the host, by their bits.
#ifndef MUSTER_KERNELS_LOW_PRECISION_H_
#define MUSTER_KERNELS_LOW_PRECISION_H_

#include <cstdint>
#include <cstring>

#include "kernels/tensor.h"

namespace muster::kernels {

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// All conversions round to nearest, ties to even; NaN stays NaN.
inline uint16_t ToBF16(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float FromBF16(uint16_t x) { return FloatOf(static_cast<uint32_t>(x) << 16); }

inline uint16_t ToF16(float x) {
  const uint32_t bits = BitsOf(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65520 or more: infinite
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the unit is 2^-24: adding 0.5 = 2^23 x 2^-24 makes the hardware round to it.
    return sign | static_cast<uint16_t>(BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f));
  }
  // Rebias the exponent by 112 and round off 13 bits.
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return sign | static_cast<uint16_t>((rounded - (112u << 23)) >> 13);
}

inline float FromF16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t exponent = x >> 10 & 0x1fu;
  const uint32_t mantissa = x & 0x3ffu;
  if (exponent == 0x1f) return FloatOf(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return FloatOf(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Element i of a contiguous fp32, bf16 or fp16 tensor.
inline float ReadAsFloat(const Tensor& x, int64_t i) {
  switch (x.dtype()) {
    case DType::kF32:
      return static_cast<const float*>(x.data())[i];
    case DType::kBF16:
      return FromBF16(static_cast<const uint16_t*>(x.data())[i]);
    default:
      return FromF16(static_cast<const uint16_t*>(x.data())[i]);
  }
}

inline void WriteFloat(const Tensor& x, int64_t i, float value) {
  switch (x.dtype()) {
    case DType::kF32:
      static_cast<float*>(x.data())[i] = value;
      return;
    case DType::kBF16:
      static_cast<uint16_t*>(x.data())[i] = ToBF16(value);
      return;
    default:
      static_cast<uint16_t*>(x.data())[i] = ToF16(value);
  }
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_LOW_PRECISION_H_
