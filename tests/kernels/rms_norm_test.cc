#include "kernels/memory/memory.h"
#include "kernels/norm/norm.h"
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

Doubles Reference(int64_t t, int64_t c, const Doubles& x, const Doubles& gamma) {
  Doubles y(t * c);
  for (int64_t row = 0; row < t; ++row) {
    double mean = 0;
    for (int64_t i = 0; i < c; ++i) mean += x[row * c + i] * x[row * c + i] / c;
    for (int64_t i = 0; i < c; ++i) {
      y[row * c + i] = x[row * c + i] / std::sqrt(mean + kEpsilon) * gamma[i];
    }
  }
  return y;
}

TEST(RmsNorm, Forward_ResidualPlusBranch_MatchesFloat64) {
  for (auto [t, c] : {std::pair(1, 1), std::pair(3, 7), std::pair(50, 64), std::pair(33, 771)}) {
    Host host;
    Floats residual = Random(t * c, 1), branch = Random(t * c, 2), gamma = Random(c, 3);
    Floats sum(t * c), y(t * c), rstd(t);
    RmsNormForward(*host.stream, {.residual = View(residual, {t, c}),
                                  .branch = View(branch, {t, c}),
                                  .sum = View(sum, {t, c}),
                                  .gamma = View(gamma, {c}),
                                  .y = View(y, {t, c}),
                                  .rstd = View(rstd, {t}),
                                  .epsilon = kEpsilon});
    Floats expected_sum(residual.size());
    for (size_t i = 0; i < sum.size(); ++i) expected_sum[i] = residual[i] + branch[i];
    EXPECT_EQ(sum, expected_sum);
    ExpectClose(y, Reference(t, c, testing::Wide(sum), testing::Wide(gamma)), 1e-5, "y");

    // Without a branch, with the sum as the input: the same bits.
    Floats again(t * c), rstd_again(t);
    RmsNormForward(*host.stream, {.residual = View(sum, {t, c}),
                                  .gamma = View(gamma, {c}),
                                  .y = View(again, {t, c}),
                                  .rstd = View(rstd_again, {t}),
                                  .epsilon = kEpsilon});
    EXPECT_EQ(again, y);
    EXPECT_EQ(rstd_again, rstd);
  }
}

TEST(RmsNorm, Backward_AddsTheGradients) {
  for (const auto& shape : {std::pair(2, 3), std::pair(17, 65), std::pair(3, 130)}) {
    const int t = shape.first, c = shape.second;
    Host host;
    Floats x = Random(t * c, 1), gamma = Random(c, 2), dy = Random(t * c, 3);
    Floats y(t * c), rstd(t);
    RmsNormForward(*host.stream, {.residual = View(x, {t, c}),
                                  .gamma = View(gamma, {c}),
                                  .y = View(y, {t, c}),
                                  .rstd = View(rstd, {t}),
                                  .epsilon = kEpsilon});
    const Floats dx_before = Random(t * c, 4), dgamma_before = Random(c, 5);
    Floats dx = dx_before, dgamma = dgamma_before;
    RmsNormBackward(*host.stream, {.dy = View(dy, {t, c}),
                                   .x = View(x, {t, c}),
                                   .gamma = View(gamma, {c}),
                                   .rstd = View(rstd, {t}),
                                   .dx = View(dx, {t, c}),
                                   .dgamma = View(dgamma, {c})});
    Doubles wide_x = testing::Wide(x), wide_gamma = testing::Wide(gamma);
    const auto loss = [&] { return testing::DotOf(Reference(t, c, wide_x, wide_gamma), dy); };
    ExpectClose(dx, testing::Plus(dx_before, testing::NumericGradient(wide_x, loss)), 1e-5, "dx");
    ExpectClose(dgamma, testing::Plus(dgamma_before, testing::NumericGradient(wide_gamma, loss)),
                1e-5, "dgamma");
  }
}

TEST(Add, SumsInPlaceToo) {
  Host host;
  Floats a = Random(1003, 1), b = Random(1003, 2), out(1003);
  Add(*host.stream, View(a, {17, 59}), View(b, {17, 59}), View(out, {17, 59}));
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(out[i], a[i] + b[i]);
  Add(*host.stream, View(a, {17, 59}), View(b, {17, 59}), View(a, {17, 59}));
  EXPECT_EQ(a, out);
}

}  // namespace
}  // namespace muster::kernels
