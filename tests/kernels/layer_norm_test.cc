#include "kernels/norm/norm.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

constexpr float kEpsilon = 1e-5f;

Doubles Reference(int64_t t, int64_t c, const Doubles& x, const Doubles& gamma,
                  const Doubles& beta) {
  Doubles y(t * c);
  for (int64_t row = 0; row < t; ++row) {
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < c; ++i) mean += x[row * c + i] / c;
    for (int64_t i = 0; i < c; ++i) {
      variance += (x[row * c + i] - mean) * (x[row * c + i] - mean) / c;
    }
    for (int64_t i = 0; i < c; ++i) {
      y[row * c + i] =
          (x[row * c + i] - mean) / std::sqrt(variance + kEpsilon) * gamma[i] + beta[i];
    }
  }
  return y;
}

struct Case {
  Case(int64_t t, int64_t c)
      : t(t),
        c(c),
        residual(Random(t * c, 1)),
        branch(Random(t * c, 2)),
        gamma(Random(c, 3)),
        beta(Random(c, 4)),
        sum(t * c),
        y(t * c),
        mean(t),
        rstd(t) {}
  LayerNormForwardArgs Args() {
    return {.residual = View(residual, {t, c}),
            .branch = View(branch, {t, c}),
            .sum = View(sum, {t, c}),
            .gamma = View(gamma, {c}),
            .beta = View(beta, {c}),
            .y = View(y, {t, c}),
            .mean = View(mean, {t}),
            .rstd = View(rstd, {t}),
            .epsilon = kEpsilon};
  }
  int64_t t, c;
  Floats residual, branch, gamma, beta, sum, y, mean, rstd;
};

TEST(LayerNorm, Forward_ResidualPlusBranch_MatchesFloat64) {
  for (auto [t, c] : {std::pair(1, 1), std::pair(3, 7), std::pair(50, 64), std::pair(33, 771)}) {
    Host host;
    Case k(t, c);
    LayerNormForward(*host.stream, k.Args());
    Floats sum(k.residual.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = k.residual[i] + k.branch[i];
    EXPECT_EQ(k.sum, sum);
    ExpectClose(k.y,
                Reference(t, c, testing::Wide(sum), testing::Wide(k.gamma), testing::Wide(k.beta)),
                c == 1 ? 1e-4 : 1e-5, "y");
  }
}

TEST(LayerNorm, Forward_WithoutBranchOrSumInPlace_GivesTheSame) {
  Host host;
  Case apart(9, 40), in_place(9, 40);
  LayerNormForward(*host.stream, apart.Args());
  LayerNormForwardArgs args = in_place.Args();
  args.sum = args.residual;
  LayerNormForward(*host.stream, args);
  EXPECT_EQ(in_place.residual, apart.sum);
  EXPECT_EQ(in_place.y, apart.y);

  Case alone(9, 40);
  alone.residual = apart.sum;
  args = alone.Args();
  args.branch = Tensor();
  args.sum = Tensor();
  LayerNormForward(*host.stream, args);
  EXPECT_EQ(alone.y, apart.y);
  EXPECT_EQ(alone.rstd, apart.rstd);
}

TEST(LayerNorm, Forward_LargeOffset_KeepsItsVariance) {
  Host host;
  Case k(2, 300);
  for (float& value : k.residual) value = value * 0.01f + 1000.0f;
  k.branch.assign(k.branch.size(), 0.0f);
  LayerNormForward(*host.stream, k.Args());
  // The inputs are multiples of 2^-14 near 1000: E[x^2] - E[x]^2 in fp32 would lose everything.
  ExpectClose(
      k.y,
      Reference(2, 300, testing::Wide(k.residual), testing::Wide(k.gamma), testing::Wide(k.beta)),
      1e-2, "y");
}

TEST(LayerNorm, Backward_AddsToAllGradients_MatchesFiniteDifferences) {
  for (auto [t, c] : {std::pair(2, 3), std::pair(4, 33), std::pair(19, 70)}) {
    Host host;
    Case k(t, c);
    LayerNormForward(*host.stream, k.Args());
    Floats dy = Random(t * c, 10), dx = Random(t * c, 11), dgamma = Random(c, 12),
           dbeta = Random(c, 13), sums = Random(c, 14);
    const Floats sums_before = sums, dx_before = dx, dgamma_before = dgamma, dbeta_before = dbeta;
    LayerNormBackward(*host.stream, {.dy = View(dy, {t, c}),
                                     .x = View(k.sum, {t, c}),
                                     .gamma = View(k.gamma, {c}),
                                     .mean = View(k.mean, {t}),
                                     .rstd = View(k.rstd, {t}),
                                     .dx = View(dx, {t, c}),
                                     .dgamma = View(dgamma, {c}),
                                     .dbeta = View(dbeta, {c}),
                                     .dx_sums = View(sums, {c}),
                                     .accumulate_dx_sums = t != 4});
    Doubles totals = testing::Wide(sums_before);
    if (t == 4) std::fill(totals.begin(), totals.end(), 0.0);
    for (int64_t i = 0; i < t * c; ++i) totals[i % c] += dx[i];
    ExpectClose(sums, totals, 1e-5, "sums of dx");
    Doubles x = testing::Wide(k.sum), gamma = testing::Wide(k.gamma), beta = testing::Wide(k.beta);
    auto loss = [&, t = t, c = c] { return testing::DotOf(Reference(t, c, x, gamma, beta), dy); };
    ExpectClose(dx, testing::Plus(dx_before, testing::NumericGradient(x, loss)), 2e-5, "dx");
    ExpectClose(dgamma, testing::Plus(dgamma_before, testing::NumericGradient(gamma, loss)), 1e-5,
                "dgamma");
    ExpectClose(dbeta, testing::Plus(dbeta_before, testing::NumericGradient(beta, loss)), 1e-5,
                "dbeta");
  }
}

}  // namespace
}  // namespace muster::kernels
