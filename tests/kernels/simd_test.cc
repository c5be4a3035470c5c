// Every instruction set that this CPU runs, against float64, with all lengths of tails.
#include <cmath>
#include <limits>

#include "kernels/simd/loops.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Random;

class Simd : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    loops_ = LoopsNamed(GetParam());
    if (loops_ == nullptr) GTEST_SKIP() << "this CPU has no " << GetParam();
  }
  const Loops* loops_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Sets, Simd, ::testing::Values("generic", "avx2", "avx512"),
                         [](const auto& info) { return std::string(info.param); });

TEST(SimdChoice, ChooseLoops_PicksASetThatRuns) {
  ASSERT_NE(LoopsNamed(ChooseLoops().name), nullptr);
  EXPECT_EQ(LoopsNamed("mmx"), nullptr);
}

TEST_P(Simd, Exp_WholeRange_IsWithinTwoUlp) {
  constexpr int kCount = 200001;
  Floats x(kCount), y(kCount);
  for (int i = 0; i < kCount; ++i) {
    x[i] = static_cast<float>(-86.59 + (86.59 + 88.72) * i / (kCount - 1));
  }
  loops_->exp(kCount, x.data(), y.data());
  for (int i = 0; i < kCount; ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const float rounded = static_cast<float>(exact);
    const double ulp = std::nextafter(rounded, std::numeric_limits<float>::infinity()) - rounded;
    ASSERT_LE(std::abs(y[i] - exact), 2 * ulp) << "exp(" << x[i] << ")";
  }
}

TEST_P(Simd, Exp_OutsideTheRange_IsZeroInfiniteOrNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  Floats x = {-infinity, -1e30f, -87.0f, 0.0f, -0.0f, 89.0f, 1e30f, infinity, std::nanf("")};
  x.insert(x.end(), x.begin(), x.end());  // in whole vectors and in a tail
  Floats y(x.size());
  loops_->exp(x.size(), x.data(), y.data());
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(y[i]));
    } else {
      EXPECT_EQ(y[i], x[i] < -86.6f ? 0.0f : x[i] > 88.73f ? infinity : 1.0f) << x[i];
    }
  }
}

TEST_P(Simd, SumsAndMaxima_AllTails_MatchFloat64) {
  for (int64_t n = 1; n < 150; ++n) {
    const Floats x = Random(n, n), y = Random(n, 1000 + n);
    double sum = 0, squares = 0, dot = 0, exps = 0, absolute = 0;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; ++i) {
      sum += x[i];
      absolute += std::abs(x[i]);
      squares += static_cast<double>(x[i]) * x[i];
      dot += static_cast<double>(x[i]) * y[i];
      exps += std::exp(static_cast<double>(x[i]) - 1);
      most = std::max(most, x[i]);
    }
    EXPECT_NEAR(loops_->sum(n, x.data()), sum, 1e-6 * absolute);
    EXPECT_NEAR(loops_->sum_squares(n, x.data()), squares, 1e-12 * squares);
    EXPECT_NEAR(loops_->dot(n, x.data(), y.data()), dot, 2e-6 * n);
    EXPECT_EQ(loops_->max(n, x.data()), most);
    Floats terms = x;
    EXPECT_NEAR(loops_->sum_exp(n, 1, true, terms.data()), exps, 1e-6 * exps);
    for (int64_t i = 0; i < n; ++i) ASSERT_NEAR(terms[i], std::exp(x[i] - 1), 1e-5);
    terms = x;
    loops_->sum_exp(n, 1, false, terms.data());
    EXPECT_EQ(terms, x);
  }
}

TEST_P(Simd, Max_AllNegative_IgnoresThePadding) {
  for (int64_t n = 1; n < 70; ++n) {
    const Floats x(n, -5.0f);
    EXPECT_EQ(loops_->max(n, x.data()), -5.0f);
  }
}

TEST_P(Simd, ElementLoops_AllTails_TouchTheirRangeOnly) {
  for (int64_t n = 0; n < 70; ++n) {
    const Floats x = Random(n, n), y = Random(n, 99 + n);
    Floats out(n + 1, 42.0f), scaled = x, summed = y;
    loops_->add(n, x.data(), y.data(), out.data());
    loops_->scale(n, 0.5f, scaled.data());
    loops_->axpy(n, 0.25f, x.data(), summed.data());
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(out[i], x[i] + y[i]);
      ASSERT_EQ(scaled[i], 0.5f * x[i]);
      ASSERT_NEAR(summed[i], y[i] + 0.25f * x[i], 1e-6);
    }
    EXPECT_EQ(out[n], 42.0f);
  }
}

TEST_P(Simd, Gelu_WideRange_MatchesFloat64WithoutCancellation) {
  constexpr int kCount = 4001;
  Floats x(kCount), y(kCount), one(kCount, 1.0f), dx(kCount);
  for (int i = 0; i < kCount; ++i) x[i] = -20.0f + 0.01f * i;
  loops_->gelu_forward(kCount, x.data(), y.data());
  loops_->gelu_backward(kCount, x.data(), one.data(), dx.data());
  for (int i = 0; i < kCount; ++i) {
    const double at = x[i];
    // 0.5 (1 + tanh u) as 1 / (1 + exp(-2u)): float64's tanh form cancels as well below -5.
    const double u = std::sqrt(2 / M_PI) * (at + 0.044715 * at * at * at);
    const double exact = at / (1 + std::exp(-2 * u));
    // The rounding of 2u, up to 86, is what exp amplifies; beyond, the result is 0.
    ASSERT_NEAR(y[i], exact, 2e-5 * std::abs(exact) + 20 * 3e-38) << at;
    const double slope =
        (testing::GeluReference(at + 1e-5) - testing::GeluReference(at - 1e-5)) / 2e-5;
    ASSERT_NEAR(dx[i], slope, 2e-6) << at;
  }
}

TEST_P(Simd, SoftmaxBlock_TwoBlocks_MatchesOneSoftmax) {
  constexpr int64_t kFirst = 37, kSecond = 21;
  const Floats s = Random(kFirst + kSecond, 5, 4);
  Floats p = s;
  float m = -std::numeric_limits<float>::infinity(), l = 0;
  EXPECT_EQ(loops_->softmax_block(kFirst, kFirst, 0.5f, p.data(), &m, &l), 0.0f);
  const float factor = loops_->softmax_block(kSecond, kSecond - 3, 0.5f, p.data() + kFirst, &m, &l);
  double most = -1e300, sum = 0;
  for (int64_t i = 0; i < kFirst + kSecond - 3; ++i) most = std::max(most, 0.5 * s[i]);
  for (int64_t i = 0; i < kFirst + kSecond - 3; ++i) sum += std::exp(0.5 * s[i] - most);
  EXPECT_NEAR(m, most, 1e-6);
  EXPECT_NEAR(l, sum, 1e-5 * sum);
  for (int64_t i = 0; i < kFirst; ++i) {
    EXPECT_NEAR(p[i] * factor, std::exp(0.5 * s[i] - most), 1e-6);
  }
  for (int64_t i = kFirst + kSecond - 3; i < kFirst + kSecond; ++i) EXPECT_EQ(p[i], 0.0f);
}

}  // namespace
}  // namespace muster::kernels
