#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

TEST(Memory, ZeroCopyAxpyScale_SizesAcrossChunks_MatchScalars) {
  for (int64_t n : {0, 1, 17, 65536, 65537, 300001}) {
    Host host(3);
    Floats x = Random(n, n), y = Random(n, n + 1), copy(n), zero = x;
    Copy(*host.stream, View(x, {n}), View(copy, {n}));
    EXPECT_EQ(copy, x);
    Zero(*host.stream, View(zero, {n}));
    EXPECT_EQ(zero, Floats(n));
    Floats sum = y;
    Axpy(*host.stream, 2, View(x, {n}), View(sum, {n}));
    Scale(*host.stream, -4, View(copy, {n}));
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(sum[i], y[i] + 2 * x[i]);  // a power of two: exact with and without FMA
      ASSERT_EQ(copy[i], -4 * x[i]);
    }
  }
}

TEST(Memory, ZeroAll_MoreTensorsThanALaunchTakes_ZeroesThemAndNothingElse) {
  Host host;
  Floats all(20 * 9, 1.0f);
  std::vector<Tensor> outs;
  // Every ninth number stays.
  for (int64_t i = 0; i < 20; ++i) outs.push_back(Tensor(all.data() + 9 * i, DType::kF32, {8}));
  ZeroAll(*host.stream, outs);
  ZeroAll(*host.stream, {});
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], i % 9 == 8 ? 1.0f : 0.0f) << i;
}

std::vector<uint16_t> Narrow(const Floats& x, DType dtype) {
  Host host(1);
  Floats from = x;
  std::vector<uint16_t> to(x.size());
  const auto n = static_cast<int64_t>(x.size());
  Cast(*host.stream, View(from, {n}), Tensor(to.data(), dtype, {n}));
  return to;
}

Floats Widen(std::vector<uint16_t> x, DType dtype) {
  Host host(1);
  Floats to(x.size());
  const auto n = static_cast<int64_t>(x.size());
  Cast(*host.stream, Tensor(x.data(), dtype, {n}), View(to, {n}));
  return to;
}

TEST(Cast, EveryBitPattern_WidenedAndNarrowed_ComesBack) {
  std::vector<uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const Floats wide = Widen(all, dtype);
    const std::vector<uint16_t> back = Narrow(wide, dtype);
    for (int i = 0; i < 65536; ++i) {
      if (std::isnan(wide[i])) {
        EXPECT_TRUE(std::isnan(Widen({back[i]}, dtype)[0])) << i;
      } else {
        ASSERT_EQ(back[i], all[i]);
      }
    }
  }
}

TEST(Cast, ValuesBetweenTwoNeighbours_RoundToNearestEven) {
  EXPECT_EQ(
      Narrow({1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 1.0f + 0x1.1p-8f, -1.0f - 0x1p-8f}, DType::kBF16),
      (std::vector<uint16_t>{0x3f80, 0x3f82, 0x3f81, 0xbf80}));
  const float tie = 0x1p-25f;  // half of fp16's smallest number
  EXPECT_EQ(Narrow({1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f, tie, 1.5f * tie, 3 * tie, 65504.0f,
                    65519.0f, 65520.0f, -1e30f},
                   DType::kF16),
            (std::vector<uint16_t>{0x3c00, 0x3c02, 0x0000, 0x0001, 0x0002, 0x7bff, 0x7bff, 0x7c00,
                                   0xfc00}));
}

TEST(Cast, KnownHalfPrecisionValues_Match) {
  EXPECT_EQ(
      Widen({0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x7c00}, DType::kF16),
      (Floats{1.0f, -2.0f, 65504.0f, 0x1p-14f, 0x1p-24f, std::numeric_limits<float>::infinity()}));
}

TEST(MemoryDeathTest, Copy_OtherSizeOrDtype_NamesBoth) {
  Host host(1);
  Floats x(4), y(5);
  EXPECT_DEATH(Copy(*host.stream, View(x, {4}), View(y, {5})), "F32\\[4\\] to F32\\[5\\]");
}

TEST(Memory, CopyStrided_AnyStridesAndDtypes_MovesOrAddsElements) {
  Host host(3);
  Floats x = Random(4 * 5 * 6, 1), y = Random(6 * 5 * 4, 2);
  // [4,5,6] into the transpose of [6,5,4].
  const Tensor from = View(x, {4, 5, 6});
  const Floats before = y;
  const Tensor to(y.data(), DType::kF32, {4, 5, 6}, {1, 4, 20});
  const auto at = [](int64_t i, int64_t j, int64_t k) { return i + 4 * j + 20 * k; };
  CopyStrided(*host.stream, from, to, /*accumulate=*/true);
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      for (int64_t k = 0; k < 6; ++k) {
        ASSERT_EQ(y[at(i, j, k)], x[i * 30 + j * 6 + k] + before[at(i, j, k)]);
      }
    }
  }
  CopyStrided(*host.stream, from, to);
  EXPECT_EQ(y[at(3, 4, 5)], x[3 * 30 + 4 * 6 + 5]);
  // Every second row of a wider tensor, rounded to bf16, and back by addition.
  std::vector<uint16_t> narrow(2 * 10 * 8);
  const Tensor rows(narrow.data(), DType::kBF16, {10, 6}, {16, 1});
  Floats z(60, 1);
  CopyStrided(*host.stream, Tensor(x.data(), DType::kF32, {10, 6}), rows);
  CopyStrided(*host.stream, rows, View(z, {10, 6}), /*accumulate=*/true);
  const Floats rounded =
      Widen(Narrow(Floats(x.begin(), x.begin() + 60), DType::kBF16), DType::kBF16);
  for (int64_t i = 0; i < 60; ++i) ASSERT_EQ(z[i], rounded[i] + 1);
  CopyStrided(*host.stream, Tensor(x.data(), DType::kF32, {0, 6}),
              Tensor(z.data(), DType::kF32, {0, 6}));
}

}  // namespace
}  // namespace muster::kernels
