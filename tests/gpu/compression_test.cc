// The ops of gradient compression give the bits of the host: they only count, select and add.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/compression/compression.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

class CompressionGpuTest : public GpuTest {
 protected:
  // Equal magnitudes of both signs among them, and values of all sizes.
  std::vector<float> Gradient(int64_t n) {
    std::vector<float> values = Random(n);
    for (int64_t i = 0; i < n; ++i) {
      if (i % 3 == 0) values[i] = std::round(values[i] * 2) / 2;
      if (i % 7 == 0) values[i] *= 1e-20f;
    }
    return values;
  }
  Both Fp32(std::vector<float> values) {
    const auto n = static_cast<int64_t>(values.size());
    Both both(*device_, DType::kF32, {n}, std::move(values));
    both.Upload(*stream_);
    return both;
  }
  void ExpectSameBits(const std::string& what, Both& both) {
    ASSERT_OK(stream_->Synchronize()) << what;
    const std::vector<float> actual = both.Download(*stream_);
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(std::memcmp(&actual[i], &both.values()[i], sizeof(float)), 0)
          << what << " at " << i << ": " << actual[i] << " and " << both.values()[i];
    }
  }
};

TEST_F(CompressionGpuTest, TakeLargest_AnySizeAndCount_TakesWhatTheHostTakes) {
  for (const int64_t n : {1, 2, 31, 2048, 2049, 5000, 70001, 1 << 20, 5000011}) {
    for (const double share : {0.0, 0.001, 0.1, 0.5, 1.0}) {
      for (const bool dense : {false, true}) {
        const int64_t k =
            std::max<int64_t>(1, static_cast<int64_t>(share * static_cast<double>(n)));
        const std::string what = absl::StrCat(k, " of ", n, dense ? ", dense" : ", pairs");
        Both x = Fp32(Gradient(n)), also = Fp32(Random(n));
        Both indices = Output(DType::kI32, {k}), values = Output(DType::kF32, {k});
        Both whole = Output(DType::kF32, {n});
        for (const bool gpu : {true, false}) {
          const auto side = [&](Both& both) { return gpu ? both.gpu() : both.cpu(); };
          TakeLargestArgs args;
          args.x = side(x);
          args.also = side(also);
          args.k = k;
          args.offset = 12345;
          if (dense) {
            args.dense = side(whole);
          } else {
            args.indices = AsIntegers(side(indices));
            args.values = side(values);
          }
          TakeLargest(gpu ? *stream_ : *cpu_stream_, args);
        }
        ExpectSameBits(what + ", what is left", x);
        ExpectSameBits(what + ", also", also);
        if (dense) {
          ExpectSameBits(what, whole);
        } else {
          ExpectSameBits(what + ", indices", indices);
          ExpectSameBits(what + ", values", values);
        }
      }
    }
  }
}

TEST_F(CompressionGpuTest, TakeLargest_AllEqualOrNotFinite_TakesTheFirstAndNaNBeforeAll) {
  std::vector<float> special = Random(5000);
  special[17] = std::numeric_limits<float>::quiet_NaN();
  special[4000] = -std::numeric_limits<float>::infinity();
  special[4001] = std::numeric_limits<float>::infinity();
  for (const std::vector<float>& values :
       {std::vector<float>(5000, 0.25f), std::vector<float>(5000, 0.0f), special}) {
    for (const int64_t k : {1, 2, 3, 2500, 4999}) {
      Both x = Fp32(values), indices = Output(DType::kI32, {k}), taken = Output(DType::kF32, {k});
      TakeLargest(
          *stream_,
          {.x = x.gpu(), .k = k, .indices = AsIntegers(indices.gpu()), .values = taken.gpu()});
      TakeLargest(
          *cpu_stream_,
          {.x = x.cpu(), .k = k, .indices = AsIntegers(indices.cpu()), .values = taken.cpu()});
      const std::string what = absl::StrCat(k, " of ", values[0], "s");
      ExpectSameBits(what, x);
      ExpectSameBits(what, indices);
      ExpectSameBits(what, taken);
    }
  }
}

TEST_F(CompressionGpuTest, SumSparse_AnyNumberOfParts_HasTheBitsOfTheHost) {
  constexpr int64_t kN = 40000;
  for (const int64_t parts : {1, 2, 3, 4, 7, 8, 33, 1100}) {
    const int64_t k = parts > 100 ? 37 : 1999;
    std::vector<int32_t> entries;
    for (int64_t part = 0; part < parts; ++part) {
      Both x = Fp32(Gradient(kN)), indices = Output(DType::kI32, {k});
      Both values = Output(DType::kF32, {k});
      TakeLargest(
          *cpu_stream_,
          {.x = x.cpu(), .k = k, .indices = AsIntegers(indices.cpu()), .values = values.cpu()});
      for (const Both* half : {&indices, &values}) {
        const auto* bits = static_cast<const int32_t*>(half->cpu().data());
        entries.insert(entries.end(), bits, bits + k);
      }
    }
    Both all = Integers(entries);
    const auto shaped = [&](const Tensor& t) {
      return Tensor(t.data(), DType::kI32, {parts, 2, k});
    };
    for (const auto& [first, count] :
         {std::pair<int64_t, int64_t>{0, kN}, {1, kN - 1}, {1023, 2050}, {39999, 1}}) {
      Both out = Output(DType::kF32, {count});
      SumSparse(*stream_, shaped(all.gpu()), first, out.gpu());
      SumSparse(*cpu_stream_, shaped(all.cpu()), first, out.cpu());
      ExpectSameBits(absl::StrCat(parts, " parts from ", first), out);
    }
  }
}

TEST_F(CompressionGpuTest, Signs_TakenAndAdded_AreThoseOfTheHost) {
  for (const int64_t n : {1, 31, 32, 33, 255, 70001, 1 << 20}) {
    const int64_t words = 1 + (n + 31) / 32;
    Both x = Fp32(Gradient(n)), packed = Output(DType::kI32, {words});
    const std::vector<float> before = x.values();
    TakeSigns(*stream_, x.gpu(), AsIntegers(packed.gpu()));
    TakeSigns(*cpu_stream_, x.cpu(), AsIntegers(packed.cpu()));
    ASSERT_OK(stream_->Synchronize());
    const std::vector<float> actual = packed.Download(*stream_);
    // The mean is a sum in another order, in double.
    ASSERT_NEAR(actual[0], packed.values()[0], 1e-6 * packed.values()[0]) << n;
    EXPECT_EQ(std::memcmp(actual.data() + 1, packed.values().data() + 1, (words - 1) * 4), 0) << n;
    const std::vector<float> left = x.Download(*stream_);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(left[i], before[i] - std::copysign(actual[0], before[i])) << n << " at " << i;
    }
  }
  constexpr int64_t kN = 3000, kWords = 1 + (kN + 31) / 32, kStride = kWords + 9;
  for (const int64_t parts : {1, 2, 5, 21}) {
    std::vector<int32_t> bits(parts * kStride);
    for (int32_t& word : bits) word = static_cast<int32_t>(random_());
    for (int64_t part = 0; part < parts; ++part) {
      const float mean = 0.1f + static_cast<float>(part);
      std::memcpy(&bits[part * kStride], &mean, sizeof(mean));
    }
    Both packed = Integers(bits), sum = Output(DType::kF32, {kN - 1001});
    const auto shaped = [&](const Tensor& t) {
      return Tensor(t.data(), DType::kI32, {parts, kWords}, {kStride, 1});
    };
    SumSigns(*stream_, shaped(packed.gpu()), 1001, sum.gpu());
    SumSigns(*cpu_stream_, shaped(packed.cpu()), 1001, sum.cpu());
    ExpectSameBits(absl::StrCat(parts, " parts"), sum);
  }
}

}  // namespace
}  // namespace muster::kernels
