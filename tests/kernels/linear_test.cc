#include <tuple>

#include "kernels/activation/activation.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"
#include "tests/support/status_matchers.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

struct Shape {
  int64_t t, k, n;
};

// x W^T + bias in float64.
Doubles Reference(const Shape& s, const Doubles& x, const Doubles& w, const Doubles& bias) {
  Doubles y(s.t * s.n);
  for (int64_t t = 0; t < s.t; ++t) {
    for (int64_t n = 0; n < s.n; ++n) {
      double sum = bias.empty() ? 0 : bias[n];
      for (int64_t k = 0; k < s.k; ++k) sum += x[t * s.k + k] * w[n * s.k + k];
      y[t * s.n + n] = sum;
    }
  }
  return y;
}

Doubles Gelu(Doubles x) {
  for (double& value : x) value = testing::GeluReference(value);
  return x;
}

class LinearShapes : public ::testing::TestWithParam<std::tuple<int, int, int>> {
 protected:
  Shape shape_{std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())};
};
// Odd sizes, single rows and columns, several tiles with remainders in both directions.
INSTANTIATE_TEST_SUITE_P(Sizes, LinearShapes,
                         ::testing::Values(std::tuple(1, 1, 1), std::tuple(3, 5, 7),
                                           std::tuple(1, 33, 257), std::tuple(130, 17, 1),
                                           std::tuple(64, 64, 64), std::tuple(257, 48, 389),
                                           std::tuple(600, 31, 200), std::tuple(19, 300, 1700)));

TEST_P(LinearShapes, Forward_WithAndWithoutBiasAndGelu_MatchesFloat64) {
  const Shape s = shape_;
  Host host;
  Floats x = Random(s.t * s.k, 1), w = Random(s.n * s.k, 2), bias = Random(s.n, 3);
  Floats y(s.t * s.n), pre(s.t * s.n);
  const Doubles plain = Reference(s, testing::Wide(x), testing::Wide(w), {});
  const Doubles biased = Reference(s, testing::Wide(x), testing::Wide(w), testing::Wide(bias));
  const Tensor xv = View(x, {s.t, s.k}), wv = View(w, {s.n, s.k}), yv = View(y, {s.t, s.n});

  LinearForward(*host.stream, {.x = xv, .w = wv, .y = yv});
  ExpectClose(y, plain, 1e-5, "y");
  LinearForward(*host.stream, {.x = xv, .w = wv, .bias = View(bias, {s.n}), .y = yv});
  ExpectClose(y, biased, 1e-5, "y with bias");
  LinearForward(*host.stream, {.x = xv,
                               .w = wv,
                               .bias = View(bias, {s.n}),
                               .y = yv,
                               .epilogue = Epilogue::kGelu,
                               .pre = View(pre, {s.t, s.n})});
  ExpectClose(pre, biased, 1e-5, "pre");
  ExpectClose(y, Gelu(biased), 1e-5, "gelu");
  LinearForward(
      *host.stream,
      {.x = xv, .w = wv, .y = yv, .epilogue = Epilogue::kGelu, .pre = View(pre, {s.t, s.n})});
  ExpectClose(y, Gelu(plain), 1e-5, "gelu without bias");
}

TEST_P(LinearShapes, Backward_AddsWeightAndBiasGradients_MatchesFloat64) {
  const Shape s = shape_;
  Host host;
  Floats x = Random(s.t * s.k, 1), w = Random(s.n * s.k, 2), dy = Random(s.t * s.n, 3);
  Floats dw = Random(s.n * s.k, 4), dbias = Random(s.n, 5), dx(s.t * s.k, 1e30f);
  Doubles dw_expected = testing::Wide(dw), dbias_expected = testing::Wide(dbias),
          dx_expected(dx.size());
  for (int64_t t = 0; t < s.t; ++t) {
    for (int64_t n = 0; n < s.n; ++n) {
      const double d = dy[t * s.n + n];
      dbias_expected[n] += d;
      for (int64_t k = 0; k < s.k; ++k) {
        dw_expected[n * s.k + k] += d * x[t * s.k + k];
        dx_expected[t * s.k + k] += d * w[n * s.k + k];
      }
    }
  }
  LinearBackward(*host.stream, {.dy = View(dy, {s.t, s.n}),
                                .x = View(x, {s.t, s.k}),
                                .w = View(w, {s.n, s.k}),
                                .dx = View(dx, {s.t, s.k}),
                                .dw = View(dw, {s.n, s.k}),
                                .dbias = View(dbias, {s.n})});
  ExpectClose(dx, dx_expected, 1e-5, "dx");
  ExpectClose(dw, dw_expected, 1e-5, "dw");
  ExpectClose(dbias, dbias_expected, 1e-5, "dbias");
}

TEST(Linear, Backward_AgainstFiniteDifferencesThroughGelu_Agrees) {
  const Shape s = {5, 6, 7};
  Host host;
  // y = gelu(pre) W^T + bias, where pre is the pre-activation of the layer in front.
  Floats pre = Random(s.t * s.k, 1), w = Random(s.n * s.k, 2), bias = Random(s.n, 3),
         dy = Random(s.t * s.n, 4);
  Doubles pre64 = testing::Wide(pre), w64 = testing::Wide(w), bias64 = testing::Wide(bias);
  auto loss = [&] { return testing::DotOf(Reference(s, Gelu(pre64), w64, bias64), dy); };
  Floats x(pre.size()), dx(pre.size()), dw(w.size()), dbias(bias.size());
  GeluForward(*host.stream, View(pre, {s.t, s.k}), View(x, {s.t, s.k}));
  LinearBackward(*host.stream, {.dy = View(dy, {s.t, s.n}),
                                .x = View(x, {s.t, s.k}),
                                .w = View(w, {s.n, s.k}),
                                .dx = View(dx, {s.t, s.k}),
                                .pre = View(pre, {s.t, s.k}),
                                .dw = View(dw, {s.n, s.k}),
                                .dbias = View(dbias, {s.n})});
  ExpectClose(dx, testing::NumericGradient(pre64, loss), 1e-5, "dpre");
  ExpectClose(dw, testing::NumericGradient(w64, loss), 1e-5, "dw");
  ExpectClose(dbias, testing::NumericGradient(bias64, loss), 1e-5, "dbias");
}

// The same through squared ReLU, with the activation recomputed.
TEST(Linear, ForwardAndBackward_ThroughSquaredRelu_MatchFloat64) {
  const Shape s = {5, 6, 7};
  Host host;
  const auto relu2 = [](Doubles x) {
    for (double& value : x) value = value > 0 ? value * value : 0;
    return x;
  };
  Floats pre = Random(s.t * s.k, 1), w = Random(s.n * s.k, 2), bias = Random(s.n, 3),
         dy = Random(s.t * s.n, 4);
  Doubles pre64 = testing::Wide(pre), w64 = testing::Wide(w), bias64 = testing::Wide(bias);
  auto loss = [&] { return testing::DotOf(Reference(s, relu2(pre64), w64, bias64), dy); };
  Floats x(pre.size(), NAN), dx(pre.size()), dw(w.size()), dbias(bias.size());
  LinearBackward(*host.stream, {.dy = View(dy, {s.t, s.n}),
                                .x = View(x, {s.t, s.k}),
                                .w = View(w, {s.n, s.k}),
                                .dx = View(dx, {s.t, s.k}),
                                .pre = View(pre, {s.t, s.k}),
                                .activation = Epilogue::kRelu2,
                                .dw = View(dw, {s.n, s.k}),
                                .dbias = View(dbias, {s.n}),
                                .recompute_x = true});
  ExpectClose(x, relu2(pre64), 1e-6, "x");
  ExpectClose(dx, testing::NumericGradient(pre64, loss), 1e-5, "dpre");
  ExpectClose(dw, testing::NumericGradient(w64, loss), 1e-5, "dw");
  ExpectClose(dbias, testing::NumericGradient(bias64, loss), 1e-5, "dbias");
  Floats y(s.t * s.n), kept(s.t * s.n);
  LinearForward(*host.stream, {.x = View(x, {s.t, s.k}),
                               .w = View(w, {s.n, s.k}),
                               .bias = View(bias, {s.n}),
                               .y = View(y, {s.t, s.n}),
                               .epilogue = Epilogue::kRelu2,
                               .pre = View(kept, {s.t, s.n})});
  const Doubles expected = Reference(s, relu2(pre64), w64, bias64);
  ExpectClose(kept, expected, 1e-5, "pre");
  ExpectClose(y, relu2(expected), 1e-5, "y");
}

TEST(Linear, Backward_RecomputedInputAndBiasInFront_AreTheSameAsOnTheirOwn) {
  const Shape s = {9, 700, 7};
  Host host;
  Floats pre = Random(s.t * s.k, 1), w = Random(s.n * s.k, 2), dy = Random(s.t * s.n, 4);
  Floats x(pre.size()), recomputed(pre.size(), NAN), dx(pre.size()), dx2(pre.size());
  Floats dw(w.size()), dw2(w.size(), NAN), dbias(s.n), dbias2(s.n, NAN), front2(s.k, NAN);
  GeluForward(*host.stream, View(pre, {s.t, s.k}), View(x, {s.t, s.k}));
  LinearBackwardArgs args = {.dy = View(dy, {s.t, s.n}),
                             .x = View(x, {s.t, s.k}),
                             .w = View(w, {s.n, s.k}),
                             .dx = View(dx, {s.t, s.k}),
                             .pre = View(pre, {s.t, s.k}),
                             .dw = View(dw, {s.n, s.k}),
                             .dbias = View(dbias, {s.n})};
  LinearBackward(*host.stream, args);
  args.x = View(recomputed, {s.t, s.k});
  args.dx = View(dx2, {s.t, s.k});
  args.dw = View(dw2, {s.n, s.k});
  args.dbias = View(dbias2, {s.n});
  args.pre_dbias = View(front2, {s.k});
  args.recompute_x = true;
  args.accumulate = false;  // what was NaN is overwritten
  LinearBackward(*host.stream, args);
  EXPECT_EQ(recomputed, x);
  EXPECT_EQ(dx2, dx);
  EXPECT_EQ(dw2, dw);
  EXPECT_EQ(dbias2, dbias);
  Doubles front(s.k);
  for (int64_t i = 0; i < s.t * s.k; ++i) front[i % s.k] += dx[i];
  ExpectClose(front2, front, 1e-5, "pre_dbias");
}

TEST(Linear, Backward_FirstLayerWithoutBias_LeavesThemOut) {
  const Shape s = {4, 3, 2};
  Host host;
  Floats x = Random(12, 1), w = Random(6, 2), dy = Random(8, 3), dw(6), again(6), dx(12);
  LinearBackwardArgs args = {.dy = View(dy, {s.t, s.n}),
                             .x = View(x, {s.t, s.k}),
                             .w = View(w, {s.n, s.k}),
                             .dw = View(dw, {s.n, s.k})};
  LinearBackward(*host.stream, args);
  args.dx = View(dx, {s.t, s.k});
  args.dw = View(again, {s.n, s.k});
  LinearBackward(*host.stream, args);
  EXPECT_EQ(dw, again);
}

TEST(Linear, Backward_InTwoCalls_GivesTheBitsOfOne) {
  const Shape s = {9, 700, 7};
  Host host;
  Floats x = Random(s.t * s.k, 1), w = Random(s.n * s.k, 2), dy = Random(s.t * s.n, 3),
         pre = Random(s.t * s.k, 4), dw(w.size(), 1), dbias(s.n, 1), dx(x.size());
  LinearBackwardArgs whole = {.dy = View(dy, {s.t, s.n}),
                              .x = View(x, {s.t, s.k}),
                              .w = View(w, {s.n, s.k}),
                              .dx = View(dx, {s.t, s.k}),
                              .pre = View(pre, {s.t, s.k}),
                              .dw = View(dw, {s.n, s.k}),
                              .dbias = View(dbias, {s.n})};
  LinearBackward(*host.stream, whole);
  Floats dx2(x.size()), dw2(w.size(), 1), dbias2(s.n, 1);
  LinearBackwardArgs input = {
      .dy = whole.dy, .w = whole.w, .dx = View(dx2, {s.t, s.k}), .pre = whole.pre};
  LinearBackward(*host.stream, input);
  EXPECT_EQ(dx2, dx);
  LinearBackwardArgs weights = {.dy = whole.dy,
                                .x = whole.x,
                                .w = whole.w,
                                .dw = View(dw2, {s.n, s.k}),
                                .dbias = View(dbias2, {s.n})};
  LinearBackward(*host.stream, weights);
  EXPECT_EQ(dw2, dw);
  EXPECT_EQ(dbias2, dbias);
}

TEST(Linear, Forward_AddingAResidual_HasTheBitsOfTwoOps) {
  const Host host;
  constexpr int64_t kTokens = 37, kInputs = 29, kOutputs = 43;
  Floats x = Random(kTokens * kInputs, 1), w = Random(kOutputs * kInputs, 2);
  Floats bias = Random(kOutputs, 3), residual = Random(kTokens * kOutputs, 4);
  Floats apart(kTokens * kOutputs), fused(kTokens * kOutputs);
  LinearForwardArgs args = {.x = View(x, {kTokens, kInputs}),
                            .w = View(w, {kOutputs, kInputs}),
                            .bias = View(bias, {kOutputs}),
                            .y = View(apart, {kTokens, kOutputs})};
  LinearForward(*host.stream, args);
  Add(*host.stream, View(residual, {kTokens, kOutputs}), args.y, args.y);
  args.y = View(fused, {kTokens, kOutputs});
  args.residual = View(residual, {kTokens, kOutputs});
  LinearForward(*host.stream, args);
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_EQ(fused, apart);
}

TEST(Linear, Backward_AddingToTheInputsGradient_AddsWhatItWouldWrite) {
  const int64_t t = 19, n = 37, k = 150;
  Host host;
  Floats dy = Random(t * n, 1), w = Random(n * k, 2), written(t * k), added = Random(t * k, 3);
  const Floats before = added;
  LinearBackward(*host.stream,
                 {.dy = View(dy, {t, n}), .w = View(w, {n, k}), .dx = View(written, {t, k})});
  LinearBackward(*host.stream, {.dy = View(dy, {t, n}),
                                .w = View(w, {n, k}),
                                .dx = View(added, {t, k}),
                                .accumulate_dx = true});
  for (int64_t i = 0; i < t * k; ++i) EXPECT_NEAR(added[i], before[i] + written[i], 1e-4) << i;
}

TEST(Linear, NoTokens_ChangesNothing) {
  Host host;
  Floats w = Random(6, 1), dw = Random(6, 2), dbias = Random(2, 3);
  const Floats dw_before = dw, dbias_before = dbias;
  float nowhere[2] = {};
  const Tensor none_in(&nowhere[0], DType::kF32, {0, 3}), none_dx(&nowhere[1], DType::kF32, {0, 3}),
      none_out(&nowhere[0], DType::kF32, {0, 2});
  LinearForward(*host.stream, {.x = none_in, .w = View(w, {2, 3}), .y = none_out});
  LinearBackward(*host.stream, {.dy = none_out,
                                .x = none_in,
                                .w = View(w, {2, 3}),
                                .dx = none_dx,
                                .dw = View(dw, {2, 3}),
                                .dbias = View(dbias, {2})});
  EXPECT_EQ(dw, dw_before);
  EXPECT_EQ(dbias, dbias_before);
}

TEST(Gelu, Backward_InPlace_MatchesFiniteDifferences) {
  Host host;
  Floats x = Random(1001, 1, 3), dy = Random(1001, 2);
  Doubles x64 = testing::Wide(x);
  Doubles expected(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    expected[i] = dy[i] *
                  (testing::GeluReference(x64[i] + 1e-5) - testing::GeluReference(x64[i] - 1e-5)) /
                  2e-5;
  }
  GeluBackward(*host.stream, View(x, {1001}), View(dy, {1001}), View(dy, {1001}));
  ExpectClose(dy, expected, 1e-5, "dx");
}

TEST(LinearDeathTest, WrongShape_NamesTheTensorAndBothShapes) {
  Host host;
  Floats x(6), w(8), y(4);
  EXPECT_DEATH(LinearForward(*host.stream,
                             {.x = View(x, {2, 3}), .w = View(w, {2, 4}), .y = View(y, {2, 2})}),
               "w is F32\\[2, 4\\], expected F32\\[2, 3\\]");
}

}  // namespace
}  // namespace muster::kernels
