#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/compression/compression.h"
#include "kernels/device/device.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

// Positions in descending order of magnitude, and ascending among equal ones.
std::vector<int32_t> LargestOf(const Floats& x, int64_t k) {
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return std::abs(x[a]) > std::abs(x[b]); });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// Few distinct magnitudes, so that there are ties everywhere.
Floats Coarse(int64_t n, uint64_t salt) {
  Floats x = Random(n, salt);
  for (float& value : x) value = std::round(value * 4) / 4;
  return x;
}

TEST(TakeLargest, AnySizeAndCount_TakesTheLargestAndOfEqualOnesTheFirst) {
  for (const int64_t n : {1, 7, 1000, 32768, 100003}) {
    for (const int64_t k : {int64_t{1}, (n + 99) / 100, (n + 1) / 2, n}) {
      for (const bool ties : {false, true}) {
        SCOPED_TRACE(absl::StrCat(k, " of ", n, ties ? ", ties" : ""));
        Host host(2);
        const Floats before = ties ? Coarse(n, n) : Random(n, n);
        Floats x = before, also(n, 1.0f), values(k);
        std::vector<int32_t> indices(k);
        TakeLargest(*host.stream, {.x = View(x, {n}),
                                   .also = View(also, {n}),
                                   .k = k,
                                   .offset = 5,
                                   .indices = View(indices, {k}),
                                   .values = View(values, {k})});
        const std::vector<int32_t> expected = LargestOf(before, k);
        Floats rest = before, kept(n, 1.0f);
        for (int64_t i = 0; i < k; ++i) {
          ASSERT_EQ(indices[i], expected[i] + 5);
          ASSERT_EQ(values[i], before[expected[i]]);
          rest[expected[i]] = kept[expected[i]] = 0;
        }
        EXPECT_EQ(x, rest);
        EXPECT_EQ(also, kept);
      }
    }
  }
}

TEST(TakeLargest, DenseForm_PlusWhatIsLeft_IsExactlyWhatWasThere) {
  constexpr int64_t kN = 70001, kK = 700;
  Host host(2);
  const Floats before = Coarse(kN, 3);
  Floats x = before, dense(kN, 9.0f);
  TakeLargest(*host.stream, {.x = View(x, {kN}), .k = kK, .dense = View(dense, {kN})});
  int64_t sent = 0;
  for (int64_t i = 0; i < kN; ++i) {
    ASSERT_EQ(dense[i] + x[i], before[i]);
    ASSERT_TRUE(dense[i] == 0 || x[i] == 0);
    sent += dense[i] != 0 ? 1 : 0;
  }
  EXPECT_EQ(sent, kK);
}

TEST(TakeLargest, NotFiniteValues_GoFirst) {
  Host host(1);
  Floats x(1000, 1e30f), values(2);
  x[700] = std::numeric_limits<float>::quiet_NaN();
  x[900] = -std::numeric_limits<float>::infinity();
  std::vector<int32_t> indices(2);
  TakeLargest(
      *host.stream,
      {.x = View(x, {1000}), .k = 2, .indices = View(indices, {2}), .values = View(values, {2})});
  EXPECT_EQ(indices, (std::vector<int32_t>{700, 900}));
  EXPECT_TRUE(std::isnan(values[0]));
  EXPECT_EQ(values[1], -std::numeric_limits<float>::infinity());
}

// What `parts` ranks took from their own tensors, in the form that they exchange.
std::vector<int32_t> Entries(Stream& stream, int64_t parts, int64_t n, int64_t k) {
  std::vector<int32_t> entries(parts * 2 * k);
  for (int64_t part = 0; part < parts; ++part) {
    Floats x = Random(n, part);
    int32_t* row = entries.data() + part * 2 * k;
    TakeLargest(stream, {.x = View(x, {n}),
                         .k = k,
                         .indices = Tensor(row, DType::kI32, {k}),
                         .values = Tensor(row + k, DType::kF32, {k})});
    CHECK_OK(stream.Synchronize());
  }
  return entries;
}

TEST(SumSparse, AllElementsOfAnyNumberOfParts_HaveTheBitsOfTheDenseSum) {
  constexpr int64_t kN = 2500;
  for (const int64_t parts : {1, 2, 3, 7, 8}) {
    Host host(2);
    Floats dense, expected(kN), sum(kN, 9.0f);
    for (int64_t part = 0; part < parts; ++part) {
      const Floats x = Random(kN, part);
      dense.insert(dense.end(), x.begin(), x.end());
    }
    SumParts(*host.stream, View(dense, {parts * kN}), View(expected, {kN}));
    std::vector<int32_t> entries = Entries(*host.stream, parts, kN, kN);
    SumSparse(*host.stream, View(entries, {parts, 2, kN}), 0, View(sum, {kN}));
    EXPECT_EQ(sum, expected) << parts;
  }
}

TEST(SumSparse, PartOfTheRange_IsThatPartOfTheWhole) {
  constexpr int64_t kN = 5000, kK = 333, kParts = 3, kFirst = 1700, kCount = 2111;
  Host host(2);
  std::vector<int32_t> entries = Entries(*host.stream, kParts, kN, kK);
  Floats whole(kN), part(kCount);
  SumSparse(*host.stream, View(entries, {kParts, 2, kK}), 0, View(whole, {kN}));
  SumSparse(*host.stream, View(entries, {kParts, 2, kK}), kFirst, View(part, {kCount}));
  EXPECT_EQ(part, Floats(whole.begin() + kFirst, whole.begin() + kFirst + kCount));
  const int64_t filled = kN - std::count(whole.begin(), whole.end(), 0.0f);
  EXPECT_GT(filled, kK);
  EXPECT_LE(filled, kParts * kK);
}

TEST(TakeSigns, SentAndLeft_AddUpToWhatWasThere) {
  for (const int64_t n : {1, 31, 33, 40000}) {
    Host host(2);
    const Floats before = Random(n, n);
    Floats x = before, sum(n);
    const int64_t words = 1 + (n + 31) / 32;
    std::vector<int32_t> packed(words);
    TakeSigns(*host.stream, View(x, {n}), View(packed, {words}));
    SumSigns(*host.stream, View(packed, {1, words}), 0, View(sum, {n}));
    double mean = 0;
    for (const float value : before) mean += std::abs(value) / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_NEAR(std::abs(sum[i]), mean, 1e-6 * mean);
      ASSERT_EQ(std::signbit(sum[i]), std::signbit(before[i]));
      // The difference is rounded once.
      ASSERT_NEAR(sum[i] + x[i], before[i], 1e-6 * (mean + std::abs(before[i])));
    }
  }
}

TEST(SumSigns, SeveralPartsInStrides_AddInOrder) {
  constexpr int64_t kN = 3000, kWords = 1 + (kN + 31) / 32, kStride = kWords + 9, kParts = 5;
  Host host(2);
  std::vector<int32_t> packed(kParts * kStride);
  Floats each, expected(kN), sum(kN), tail(1234);
  for (int64_t part = 0; part < kParts; ++part) {
    Floats x = Random(kN, 40 + part), own(kN);
    const Tensor row(packed.data() + part * kStride, DType::kI32, {kWords});
    TakeSigns(*host.stream, View(x, {kN}), row);
    SumSigns(*host.stream, row.Reshape({1, kWords}), 0, View(own, {kN}));
    each.insert(each.end(), own.begin(), own.end());
  }
  SumParts(*host.stream, View(each, {kParts * kN}), View(expected, {kN}));
  const Tensor all(packed.data(), DType::kI32, {kParts, kWords}, {kStride, 1});
  SumSigns(*host.stream, all, 0, View(sum, {kN}));
  EXPECT_EQ(sum, expected);
  SumSigns(*host.stream, all, kN - 1234, View(tail, {1234}));
  EXPECT_EQ(tail, Floats(expected.end() - 1234, expected.end()));
}

}  // namespace
}  // namespace muster::kernels
