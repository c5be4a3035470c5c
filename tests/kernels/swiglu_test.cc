#include "kernels/activation/activation.h"
#include "kernels/gemm/linear.h"
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

Doubles Reference(int64_t t, int64_t f, const Doubles& packed) {
  Doubles y(t * f);
  for (int64_t row = 0; row < t; ++row) {
    for (int64_t i = 0; i < f; ++i) {
      const double gate = packed[row * 2 * f + i], up = packed[row * 2 * f + f + i];
      y[row * f + i] = gate / (1 + std::exp(-gate)) * up;
    }
  }
  return y;
}

TEST(Swiglu, ForwardAndBackward_MatchFloat64) {
  for (const auto& shape : {std::pair(1, 1), std::pair(7, 5), std::pair(3, 1500)}) {
    const int t = shape.first, f = shape.second;
    Host host;
    Floats packed = Random(t * 2 * f, 1, 2), y(t * f), dy = Random(t * f, 2), d_packed(t * 2 * f);
    SwigluForward(*host.stream, View(packed, {t, 2 * f}), View(y, {t, f}));
    Doubles wide = testing::Wide(packed);
    ExpectClose(y, Reference(t, f, wide), 1e-6, "y");
    SwigluBackward(*host.stream, View(packed, {t, 2 * f}), View(dy, {t, f}),
                   View(d_packed, {t, 2 * f}));
    if (f < 100) {
      const auto loss = [&] { return testing::DotOf(Reference(t, f, wide), dy); };
      ExpectClose(d_packed, testing::NumericGradient(wide, loss), 1e-5, "d_packed");
    }
    Floats in_place = packed, again = dy;
    SwigluBackward(*host.stream, View(in_place, {t, 2 * f}), View(again, {t, f}),
                   View(in_place, {t, 2 * f}), View(again, {t, f}));
    EXPECT_EQ(in_place, d_packed);
    EXPECT_EQ(again, y);
  }
}

TEST(Swiglu, LargeInputs_StayFinite) {
  Host host;
  Floats packed = {200, -200, 3, 4}, y(2), dy = {1, 1}, d_packed(4);
  SwigluForward(*host.stream, View(packed, {1, 4}), View(y, {1, 2}));
  EXPECT_EQ(y[0], 600);
  EXPECT_EQ(y[1], 0);
  SwigluBackward(*host.stream, View(packed, {1, 4}), View(dy, {1, 2}), View(d_packed, {1, 4}));
  EXPECT_EQ(d_packed, (Floats{3, 0, 200, 0}));
}

// GEMMs with SwiGLU fused give what the GEMM and the op give one after the other.
TEST(Swiglu, FusedIntoAGemm_ForwardAndBackward_HaveTheBitsOfTwoOps) {
  const Host host;
  const int64_t t = 37, k = 29, f = 43;
  Floats x = Random(t * k, 1), w = Random(2 * f * k, 2), bias = Random(2 * f, 3);
  Floats packed(t * 2 * f), y(t * f), fused_packed(t * 2 * f), fused_y(t * f);
  LinearForward(*host.stream, {.x = View(x, {t, k}),
                               .w = View(w, {2 * f, k}),
                               .bias = View(bias, {2 * f}),
                               .y = View(packed, {t, 2 * f})});
  SwigluForward(*host.stream, View(packed, {t, 2 * f}), View(y, {t, f}));
  LinearForward(*host.stream, {.x = View(x, {t, k}),
                               .w = View(w, {2 * f, k}),
                               .bias = View(bias, {2 * f}),
                               .y = View(fused_y, {t, f}),
                               .epilogue = Epilogue::kSwiglu,
                               .pre = View(fused_packed, {t, 2 * f})});
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_EQ(fused_packed, packed);
  EXPECT_EQ(fused_y, y);

  Floats dy = Random(t * k, 4), down = Random(k * f, 5);
  Floats dx(t * f), d_packed(t * 2 * f), again(t * f);
  LinearBackward(*host.stream,
                 {.dy = View(dy, {t, k}), .w = View(down, {k, f}), .dx = View(dx, {t, f})});
  SwigluBackward(*host.stream, View(packed, {t, 2 * f}), View(dx, {t, f}),
                 View(d_packed, {t, 2 * f}), View(again, {t, f}));
  // In place, with x in the scratch tensor.
  Floats scratch(t * f);
  LinearBackward(*host.stream, {.dy = View(dy, {t, k}),
                                .x = View(scratch, {t, f}),
                                .w = View(down, {k, f}),
                                .dx = View(scratch, {t, f}),
                                .recompute_x = true,
                                .packed = View(fused_packed, {t, 2 * f}),
                                .d_packed = View(fused_packed, {t, 2 * f})});
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_EQ(fused_packed, d_packed);
  EXPECT_EQ(scratch, again);
  EXPECT_EQ(scratch, y);
}

}  // namespace
}  // namespace muster::kernels
