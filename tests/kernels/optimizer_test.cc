#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"
#include "tests/support/seed.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

TEST(Sum, AnySize_SetsOrAddsTheFloat64Sum) {
  for (int64_t n : {0, 1, 100, 32768, 32769, 200003}) {
    Host host(2);
    Floats x = Random(n, n), out = {100.0f};
    double sum = 0, squares = 0, absolute = 0;
    for (float value : x) {
      sum += value;
      absolute += std::abs(value);
      squares += static_cast<double>(value) * value;
    }
    Sum(*host.stream, View(x, {n}), View(out, {1}), true);
    EXPECT_NEAR(out[0], 100 + sum, 1e-6 * (100 + absolute));
    Sum(*host.stream, View(x, {n}), View(out, {1}), false);
    EXPECT_NEAR(out[0], sum, 1e-6 * absolute);
    SumSquares(*host.stream, View(x, {n}), View(out, {1}), false);
    EXPECT_NEAR(out[0], squares, 1e-7 * squares);
    SumSquares(*host.stream, View(x, {n}), View(out, {1}), true);
    EXPECT_NEAR(out[0], 2 * squares, 2e-7 * squares);
  }
}

TEST(SumSquares, TinyAndHugeValues_NeitherVanishNorOverflow) {
  Host host(1);
  Floats x(1000, 1e-22f), out(1);
  SumSquares(*host.stream, View(x, {1000}), View(out, {1}), false);
  EXPECT_NEAR(out[0] / 1e-41, 1, 1e-3);
  x.assign(1000, 1e17f);
  SumSquares(*host.stream, View(x, {1000}), View(out, {1}), false);
  EXPECT_NEAR(out[0] / 1e37, 1, 1e-3);
}

StepScalars Clip(float square_sum, float clip_norm, float* norm) {
  Host host(1);
  Floats squares = {square_sum}, out(1);
  StepScalars scalars = {.learning_rate = 1e-3f, .gradient_scale = -1, .skip = -1};
  ClipCoefficient(*host.stream, View(squares, {1}), clip_norm, View(out, {1}), &scalars);
  *norm = out[0];
  return scalars;
}

TEST(ClipCoefficient, NormBelowAboveAndOff_ScalesAsStated) {
  float norm = 0;
  EXPECT_EQ(Clip(0.25f, 1, &norm).gradient_scale, 1.0f);
  EXPECT_EQ(norm, 0.5f);
  EXPECT_NEAR(Clip(16.0f, 1, &norm).gradient_scale, 0.25, 1e-6);
  EXPECT_EQ(Clip(16.0f, 0, &norm).gradient_scale, 1.0f);
  EXPECT_EQ(Clip(16.0f, 1, &norm).skip, 0);
  EXPECT_EQ(Clip(16.0f, 1, &norm).learning_rate, 1e-3f);
  EXPECT_EQ(Clip(0.0f, 1, &norm).gradient_scale, 1.0f);
}

TEST(ClipCoefficient, NormNotFinite_SkipsTheStep) {
  float norm = 0;
  EXPECT_EQ(Clip(std::numeric_limits<float>::infinity(), 1, &norm).skip, 1);
  EXPECT_EQ(Clip(std::nanf(""), 1, &norm).skip, 1);
}

struct AdamState {
  explicit AdamState(int64_t n)
      : parameter(Random(n, 1)), gradient(Random(n, 2)), m(Random(n, 3, 0.1f)), v(Random(n, 4)) {
    for (float& value : v) value = value * value;
  }
  AdamWArgs Args(const StepScalars* scalars) {
    const auto n = static_cast<int64_t>(parameter.size());
    return {.parameter = View(parameter, {n}),
            .gradient = View(gradient, {n}),
            .m = View(m, {n}),
            .v = View(v, {n}),
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .epsilon = 1e-8f,
            .weight_decay = 0.1f,
            .scalars = scalars};
  }
  Floats parameter, gradient, m, v;
};

TEST(AdamW, OneStep_MatchesTheFloat64Formula) {
  for (int64_t n : {1, 15, 16, 33, 70001}) {
    Host host(2);
    AdamState state(n);
    const AdamState before = state;
    const StepScalars scalars = {.learning_rate = 1e-2f,
                                 .beta1_correction = 0.271f,
                                 .beta2_correction = 0.1426f,
                                 .gradient_scale = 0.5f};
    std::vector<uint16_t> copy(n);
    AdamWArgs args = state.Args(&scalars);
    args.copy = Tensor(copy.data(), DType::kBF16, {n});
    AdamW(*host.stream, args);
    Doubles parameter(n), m(n), v(n);
    for (int64_t i = 0; i < n; ++i) {
      const double g = 0.5 * before.gradient[i];
      m[i] = 0.9 * before.m[i] + 0.1 * g;
      v[i] = 0.95 * before.v[i] + 0.05 * g * g;
      parameter[i] =
          before.parameter[i] -
          1e-2 * (m[i] / 0.271 / (std::sqrt(v[i] / 0.1426) + 1e-8) + 0.1 * before.parameter[i]);
    }
    ExpectClose(state.parameter, parameter, 1e-6, "parameter");
    ExpectClose(state.m, m, 1e-6, "m");
    ExpectClose(state.v, v, 1e-6, "v");
    Floats wide(n);
    Cast(*host.stream, args.copy, View(wide, {n}));
    ExpectClose(wide, state.parameter, 0x1p-8, "copy");
  }
}

// Bits of fp32 numbers: ties, carries into the exponent, values that round to infinity, subnormals,
// and a sample of all numbers.
std::vector<uint32_t> BitPatterns() {
  std::vector<uint32_t> patterns;
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (const uint32_t bits :
         {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0x7fffffu, 0x800000u, 0x3f808000u, 0x3f818000u,
          0x3fffffffu, 0x7f7f7fffu, 0x7f7f8000u, 0x7f7fffffu, 0x7f800000u}) {
      patterns.push_back(sign | bits);
    }
  }
  Rng rng(muster::testing::TestSeed());
  for (int i = 0; i < 100000; ++i) patterns.push_back(static_cast<uint32_t>(rng.Next()));
  return patterns;
}

TEST(MasterHalves, AnyNumber_ComesBackWholeAndIsRoundedToNearest) {
  Host host(2);
  const std::vector<uint32_t> patterns = BitPatterns();
  const auto n = static_cast<int64_t>(patterns.size());
  Floats master(n), joined(n);
  for (int64_t i = 0; i < n; ++i) master[i] = FloatOf(patterns[i]);
  std::vector<uint16_t> upper(n), lower(n), alone(n);
  const Tensor high(upper.data(), DType::kBF16, {n}), low(lower.data(), DType::kU16, {n});
  SplitMaster(*host.stream, View(master, {n}), high, low);
  JoinMaster(*host.stream, high, low, View(joined, {n}));
  SplitMaster(*host.stream, View(master, {n}), Tensor(alone.data(), DType::kBF16, {n}), Tensor());
  EXPECT_EQ(alone, upper);
  for (int64_t i = 0; i < n; ++i) {
    SCOPED_TRACE(patterns[i]);
    const float rounded = FromBF16(upper[i]);
    ASSERT_EQ(std::signbit(rounded), std::signbit(master[i]));
    if (std::isnan(master[i])) {
      ASSERT_TRUE(std::isnan(rounded) && std::isnan(joined[i]));
      continue;
    }
    ASSERT_EQ(BitsOf(joined[i]), patterns[i]);
    // To nearest like rounding to even, except that ties go away from zero.
    const bool tie = (patterns[i] & 0xffffu) == 0x8000u;
    const uint16_t even = ToBF16(master[i]);
    ASSERT_EQ(upper[i], tie ? static_cast<uint16_t>((patterns[i] >> 16) + 1) : even);
  }
}

TEST(AdamW, MasterInHalves_HasTheBitsOfAWholeOne) {
  for (const int64_t n : {1, 31, 2049, 70001}) {
    Host host(3);
    AdamState whole(n);
    AdamState halves = whole;
    std::vector<uint16_t> copy(n), upper(n), lower(n);
    const Tensor high(upper.data(), DType::kBF16, {n}), low(lower.data(), DType::kU16, {n});
    SplitMaster(*host.stream, View(halves.parameter, {n}), high, low);
    for (int step = 0; step < 3; ++step) {
      const StepScalars scalars = {.learning_rate = 1e-2f,
                                   .beta1_correction = 0.271f,
                                   .beta2_correction = 0.1426f,
                                   .gradient_scale = 0.5f,
                                   .skip = step == 1 ? 1 : 0};
      AdamWArgs args = whole.Args(&scalars);
      args.copy = Tensor(copy.data(), DType::kBF16, {n});
      AdamW(*host.stream, args);
      args = halves.Args(&scalars);
      args.parameter = Tensor();
      args.copy = high;
      args.lower = low;
      AdamW(*host.stream, args);
    }
    JoinMaster(*host.stream, high, low, View(halves.parameter, {n}));
    EXPECT_EQ(halves.parameter, whole.parameter);
    EXPECT_EQ(halves.m, whole.m);
    EXPECT_EQ(halves.v, whole.v);
    EXPECT_EQ(upper, copy);
  }
}

TEST(AdamW, EveryInstructionSet_GivesTheSameBits) {
  const int64_t n = 1003;
  const AdamWStep step = {.beta1 = 0.9f,
                          .beta2 = 0.95f,
                          .epsilon = 1e-8f,
                          .gradient_scale = 0.7f,
                          .step_size = 0.03f,
                          .v_scale = 2.1f,
                          .decay_scale = 0.999f};
  AdamState expected(n);
  LoopsNamed("generic")->adamw(n, step, expected.gradient.data(), expected.parameter.data(),
                               expected.m.data(), expected.v.data());
  for (const char* name : {"avx2", "avx512"}) {
    const Loops* loops = LoopsNamed(name);
    if (loops == nullptr) continue;  // not on this machine
    AdamState state(n);
    loops->adamw(n, step, state.gradient.data(), state.parameter.data(), state.m.data(),
                 state.v.data());
    EXPECT_EQ(state.parameter, expected.parameter) << name;
    EXPECT_EQ(state.m, expected.m) << name;
    EXPECT_EQ(state.v, expected.v) << name;
  }
}

TEST(AdamW, SkippedStep_ChangesNothing) {
  Host host(1);
  AdamState state(100);
  state.gradient[50] = std::nanf("");
  const AdamState before = state;
  const StepScalars scalars = {.learning_rate = 1,
                               .beta1_correction = 1,
                               .beta2_correction = 1,
                               .gradient_scale = 1,
                               .skip = 1};
  AdamW(*host.stream, state.Args(&scalars));
  EXPECT_EQ(state.parameter, before.parameter);
  EXPECT_EQ(state.m, before.m);
  EXPECT_EQ(state.v, before.v);
}

}  // namespace
}  // namespace muster::kernels
