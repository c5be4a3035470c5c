// Compiled once per instruction set, without contraction; see optimizer_loops.h, and loops.cc for
// what must not be used here.
#include "kernels/simd/optimizer_loops.h"

#include "kernels/simd/vector.h"

namespace muster::kernels {
namespace {

// fp32 read and written as its bits.
typedef uint32_t FloatBits __attribute__((may_alias));

// A NaN that rounding cannot turn into something else.
MUSTER_INLINE uint32_t Quieted(uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0x80000000u) | 0x7fc00000u : bits;
}

}  // namespace

void MUSTER_SIMD_SYMBOL(AdamW)(int64_t n, const AdamWStep& step, const float* gradient,
                               float* parameter, float* m, float* v) {
  const AdamWStep s = step;
  auto update = [=](auto load, auto store, int64_t i) MUSTER_LAMBDA {
    const Vec g = load(gradient + i) * s.gradient_scale;
    const Vec first = s.beta1 * load(m + i) + (1.0f - s.beta1) * g;
    const Vec second = s.beta2 * load(v + i) + (1.0f - s.beta2) * (g * g);
    const Vec denominator = Sqrt(second) * s.v_scale + s.epsilon;
    store(m + i, first);
    store(v + i, second);
    store(parameter + i, s.decay_scale * load(parameter + i) - s.step_size * first / denominator);
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    update(
        WholeLoad{}, [](float* p, Vec x) MUSTER_LAMBDA { Store(p, x); }, i);
  }
  if (i < n) {
    const int64_t rest = n - i;
    update(
        TailLoad{rest}, [=](float* p, Vec x) MUSTER_LAMBDA { StoreTail(p, x, rest); }, i);
  }
}

void MUSTER_SIMD_SYMBOL(SplitMaster)(int64_t n, const float* master, uint16_t* upper,
                                     uint16_t* lower) {
  const auto* from = reinterpret_cast<const FloatBits*>(master);
  if (lower == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      upper[i] = static_cast<uint16_t>((Quieted(from[i]) + 0x8000u) >> 16);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = Quieted(from[i]);
    upper[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lower[i] = static_cast<uint16_t>(bits);
  }
}

void MUSTER_SIMD_SYMBOL(JoinMaster)(int64_t n, const uint16_t* upper, const uint16_t* lower,
                                    float* master) {
  auto* to = reinterpret_cast<FloatBits*>(master);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t low = lower[i];
    to[i] = (static_cast<uint32_t>(upper[i]) - (low >> 15)) << 16 | low;
  }
}

}  // namespace muster::kernels
