#include <limits>

#include "kernels/activation/activation.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using MemoryGpuTest = GpuTest;
using OptimizerGpuTest = GpuTest;

TEST_F(MemoryGpuTest, Cast_EveryPairOddSizesAndOffsets_RoundsAsTheHost) {
  for (DType from : FloatTypes()) {
    for (DType to : FloatTypes()) {
      for (int64_t offset : {0, 3}) {
        for (int64_t n : {1, 7, 4099}) {
          Both x = Input(from, {n}, 3, 0, offset);
          Both y = Output(to, {n}, offset);
          Cast(*stream_, x.gpu(), y.gpu());
          const std::vector<float> actual = y.Download(*stream_);
          for (int64_t i = 0; i < n; ++i) EXPECT_EQ(actual[i], RoundTo(to, x.values()[i])) << i;
        }
      }
    }
  }
}

TEST_F(MemoryGpuTest, ZeroAll_MoreTensorsThanALaunchTakes_ZeroesThemAndNothingElse) {
  const int64_t count = 20, size = 3001;
  Both all = Input(DType::kF32, {count * (size + 1)});
  for (const bool gpu : {true, false}) {
    std::vector<Tensor> outs;
    for (int64_t i = 0; i < count; ++i) {
      const Tensor side = gpu ? all.gpu() : all.cpu();
      outs.push_back(Tensor(side.f32() + i * (size + 1), DType::kF32, {size}));
    }
    ZeroAll(gpu ? *stream_ : *cpu_stream_, outs);
  }
  ExpectClose("zeroed", all, 0);
}

TEST_F(MemoryGpuTest, AxpyScaleZeroAndGelu_MatchTheHost) {
  for (int64_t offset : {0, 1}) {
    const int64_t n = 10007;
    Both x = Input(DType::kF32, {n}, 1, 0, offset), y = Input(DType::kF32, {n}, 1, 0, offset);
    Axpy(*stream_, 0.3f, x.gpu(), y.gpu());
    Axpy(*cpu_stream_, 0.3f, x.cpu(), y.cpu());
    ExpectClose("axpy", y, 1e-7);
    Scale(*stream_, -1.7f, y.gpu());
    Scale(*cpu_stream_, -1.7f, y.cpu());
    ExpectClose("scale", y, 1e-6);
    Zero(*stream_, y.gpu());
    for (float value : y.Download(*stream_)) ASSERT_EQ(value, 0);
    for (DType dtype : FloatTypes()) {
      Both z = Input(dtype, {n}, 2, 0, offset), out = Output(dtype, {n}, offset);
      GeluForward(*stream_, z.gpu(), out.gpu());
      GeluForward(*cpu_stream_, z.cpu(), out.cpu());
      ExpectClose("gelu", out);
      Both dy = Input(dtype, {n}, 1, 0, offset);
      GeluBackward(*stream_, z.gpu(), dy.gpu(), dy.gpu());  // in place
      GeluBackward(*cpu_stream_, z.cpu(), dy.cpu(), dy.cpu());
      ExpectClose("gelu gradient", dy);
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(OptimizerGpuTest, Sums_OddSizes_MatchTheHostAndRepeatBitForBit) {
  for (int64_t n : {1, 31, 4097, 1000003}) {
    for (int64_t offset : {0, 2}) {
      Both x = Input(DType::kF32, {n}, 1, 0.1f, offset);
      Both sum = Input(DType::kF32, {1}), again = Input(DType::kF32, {1});
      Sum(*stream_, x.gpu(), sum.gpu(), /*accumulate=*/true);
      Sum(*cpu_stream_, x.cpu(), sum.cpu(), /*accumulate=*/true);
      ExpectClose("sum", sum, 1e-6);
      SumSquares(*stream_, x.gpu(), sum.gpu(), /*accumulate=*/false);
      SumSquares(*stream_, x.gpu(), again.gpu(), /*accumulate=*/false);
      SumSquares(*cpu_stream_, x.cpu(), sum.cpu(), /*accumulate=*/false);
      ExpectClose("sum of squares", sum, 1e-6);
      EXPECT_EQ(sum.Download(*stream_), again.Download(*stream_));
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(OptimizerGpuTest, AdamW_ClippedStepsThenOverflow_MatchesTheHostAndSkips) {
  const int64_t n = 10007;
  for (DType copy_type : {DType::kF32, DType::kBF16, DType::kF16}) {  // fp32: no copy
    Both p = Input(DType::kF32, {n}), g = Input(DType::kF32, {n}, 0.1f);
    Both m = Input(DType::kF32, {n}, 0.01f), v = Input(DType::kF32, {n}, 0.001f, 0.01f);
    for (float& x : v.values()) x = std::abs(x);
    v = Both(*device_, DType::kF32, {n}, v.values());
    v.Upload(*stream_);
    Both copy = Output(copy_type, {n});
    Both squares = Output(DType::kF32, {1}), norm = Output(DType::kF32, {1});
    StepScalars host{.learning_rate = 1e-2f, .beta1_correction = 0.19f, .beta2_correction = 0.1f};
    ASSERT_OK_AND_ASSIGN(auto scalars, device_->Allocate(sizeof(StepScalars)));
    const Tensor host_bytes(&host, DType::kU8, {sizeof(StepScalars)});
    const Tensor device_bytes(scalars->data(), DType::kU8, {sizeof(StepScalars)});
    Copy(*stream_, host_bytes, device_bytes);
    auto* on_device = static_cast<StepScalars*>(scalars->data());
    const auto step = [&](Stream& stream, bool gpu, StepScalars* s) {
      const auto side = [&](Both& both) { return gpu ? both.gpu() : both.cpu(); };
      SumSquares(stream, side(g), side(squares), false);
      ClipCoefficient(stream, side(squares), 1.0f, side(norm), s);
      AdamWArgs args{.parameter = side(p),
                     .gradient = side(g),
                     .m = side(m),
                     .v = side(v),
                     .weight_decay = 0.1f,
                     .scalars = s};
      if (gpu && copy_type != DType::kF32) args.copy = copy.gpu();
      AdamW(stream, args);
    };
    step(*stream_, true, on_device);
    step(*cpu_stream_, false, &host);
    ExpectClose("norm", norm, 1e-6);
    ExpectClose("parameter", p, 1e-6);
    ExpectClose("m", m, 1e-6);
    ExpectClose("v", v, 1e-6);
    if (copy_type != DType::kF32) {
      const std::vector<float> master = p.Download(*stream_), rounded = copy.Download(*stream_);
      for (int64_t i = 0; i < n; ++i) {
        const float expected = copy_type == DType::kBF16
                                   ? FloatOf((BitsOf(master[i]) + 0x8000u) & 0xffff0000u)
                                   : RoundTo(copy_type, master[i]);
        ASSERT_EQ(rounded[i], expected);
      }
    }
    // After an infinite gradient nothing changes.
    const std::vector<float> before = p.Download(*stream_);
    g.values()[n / 2] = INFINITY;
    g = Both(*device_, DType::kF32, {n}, g.values());
    g.Upload(*stream_);
    step(*stream_, true, on_device);
    EXPECT_EQ(p.Download(*stream_), before);
    StepScalars after{};
    Copy(*stream_, device_bytes, Tensor(&after, DType::kU8, {sizeof(StepScalars)}));
    ASSERT_OK(stream_->Synchronize());
    EXPECT_EQ(after.skip, 1);
  }
}

// Compares bits, for odd sizes, aligned or not, and in pinned memory of the host, too.
TEST_F(OptimizerGpuTest, MasterHalves_AnyNumber_AreThoseOfTheHost) {
  for (const int64_t offset : {0, 3}) {
    const int64_t n = 100003;
    ASSERT_OK_AND_ASSIGN(auto device, device_->Allocate((n + offset) * 8));
    ASSERT_OK_AND_ASSIGN(auto pinned, device_->AllocateHost(n * 4));
    auto* base = static_cast<char*>(device->data());
    const Tensor master(base + 4 * offset, DType::kF32, {n});
    const Tensor upper(base + 4 * (n + offset) + 2 * offset, DType::kBF16, {n});
    const Tensor lower(base + 6 * (n + offset) + 2 * offset, DType::kU16, {n});
    const Tensor out(pinned->data(), DType::kF32, {n});
    std::vector<float> values(n);
    for (float& value : values) value = FloatOf(static_cast<uint32_t>(random_()));
    values[7] = FloatOf(0x3f808000u);
    values[8] = FloatOf(0x7f7fffffu);
    values[9] = -std::numeric_limits<float>::infinity();
    Copy(*stream_, Tensor(values.data(), DType::kF32, {n}), master);
    SplitMaster(*stream_, master, upper, lower);
    JoinMaster(*stream_, upper, lower, out);
    std::vector<uint16_t> high(n), low(n), expected_high(n), expected_low(n);
    Copy(*stream_, upper, Tensor(high.data(), DType::kBF16, {n}));
    Copy(*stream_, lower, Tensor(low.data(), DType::kU16, {n}));
    ASSERT_OK(stream_->Synchronize());
    SplitMaster(*cpu_stream_, Tensor(values.data(), DType::kF32, {n}),
                Tensor(expected_high.data(), DType::kBF16, {n}),
                Tensor(expected_low.data(), DType::kU16, {n}));
    EXPECT_EQ(high, expected_high);
    EXPECT_EQ(low, expected_low);
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(values[i])) continue;
      ASSERT_EQ(BitsOf(out.f32()[i]), BitsOf(values[i])) << i;
    }
  }
}

// Parameters that the host updates (ZeRO-Offload) must not differ from those of the device.
TEST_F(OptimizerGpuTest, AdamW_WholeAndInHalves_HasTheBitsOfTheHost) {
  for (const int64_t offset : {0, 1}) {
    const int64_t n = 10007;
    Both p = Input(DType::kF32, {n}, 1, 0, offset), g = Input(DType::kF32, {n}, 0.1f, 0, offset);
    Both m = Input(DType::kF32, {n}, 0.01f, 0, offset), v = Output(DType::kF32, {n}, offset);
    Both m2(*device_, DType::kF32, {n}, m.values(), offset);
    Both v2 = Output(DType::kF32, {n}, offset);
    m2.Upload(*stream_);
    Both upper = Output(DType::kBF16, {n}, offset), low = Output(DType::kBF16, {n}, offset);
    const Tensor lower(low.gpu().data(), DType::kU16, {n});
    Both copy = Output(DType::kBF16, {n}, offset), joined = Output(DType::kF32, {n}, offset);
    Zero(*stream_, v.gpu());
    Zero(*stream_, v2.gpu());
    SplitMaster(*stream_, p.gpu(), upper.gpu(), lower);
    ASSERT_OK_AND_ASSIGN(auto scalars, device_->Allocate(sizeof(StepScalars)));
    auto* on_device = static_cast<StepScalars*>(scalars->data());
    for (int step = 1; step <= 3; ++step) {
      StepScalars host{.learning_rate = 1e-2f,
                       .beta1_correction = 1 - std::pow(0.9f, static_cast<float>(step)),
                       .beta2_correction = 1 - std::pow(0.95f, static_cast<float>(step)),
                       .gradient_scale = 0.37f};
      Copy(*stream_, Tensor(&host, DType::kU8, {sizeof(StepScalars)}),
           Tensor(scalars->data(), DType::kU8, {sizeof(StepScalars)}));
      ASSERT_OK(stream_->Synchronize());
      AdamWArgs args{.parameter = p.cpu(),
                     .gradient = g.cpu(),
                     .m = m.cpu(),
                     .v = v.cpu(),
                     .weight_decay = 0.1f,
                     .scalars = &host};
      AdamW(*cpu_stream_, args);
      args.scalars = on_device;
      args.parameter = p.gpu();
      args.gradient = g.gpu();
      args.m = m.gpu();
      args.v = v.gpu();
      args.copy = copy.gpu();
      AdamW(*stream_, args);
      args.parameter = Tensor();
      args.m = m2.gpu();
      args.v = v2.gpu();
      args.copy = upper.gpu();
      args.lower = lower;
      AdamW(*stream_, args);
    }
    JoinMaster(*stream_, upper.gpu(), lower, joined.gpu());
    EXPECT_EQ(p.Download(*stream_), p.values());
    EXPECT_EQ(m.Download(*stream_), m.values());
    EXPECT_EQ(v.Download(*stream_), v.values());
    EXPECT_EQ(joined.Download(*stream_), p.values());
    EXPECT_EQ(m2.Download(*stream_), m.values());
    EXPECT_EQ(v2.Download(*stream_), v.values());
    EXPECT_EQ(upper.Download(*stream_), copy.Download(*stream_));
  }
}

TEST_F(MemoryGpuTest, Device_UnknownOrdinal_IsUnavailable) {
  EXPECT_EQ(MakeCudaDevice(99).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(MemoryGpuTest, Allocate_MoreThanTheDevice_IsResourceExhaustedAndLeavesItUsable) {
  EXPECT_EQ(device_->Allocate(int64_t{1} << 45).status().code(),
            absl::StatusCode::kResourceExhausted);
  Both x = Input(DType::kF32, {5});
  Scale(*stream_, 2, x.gpu());
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(MemoryGpuTest, FullDevice_IsRefusedByItsUuidAndUsableOnceItIsFree) {
  ASSERT_OK_AND_ASSIGN(const DeviceMemory memory, device_->Memory());
  constexpr int64_t kLeft = int64_t{256} << 20;
  ASSERT_OK_AND_ASSIGN(auto held, device_->Allocate(memory.free - kLeft));
  const absl::Status refused = MakeCudaDevice(0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  for (const char* part : {"cuda:0", "GPU-", "MiB free; another process holds the rest"}) {
    EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr(part));
  }
  held.reset();
  EXPECT_OK(MakeCudaDevice(0).status());
}

TEST_F(MemoryGpuTest, Events_AcrossStreams_OrderWorkAndMeasureTime) {
  ASSERT_OK_AND_ASSIGN(auto other, device_->MakeStream({.high_priority = true}));
  ASSERT_OK_AND_ASSIGN(auto begin, device_->MakeEvent(/*timing=*/true));
  ASSERT_OK_AND_ASSIGN(auto end, device_->MakeEvent(/*timing=*/true));
  const int64_t n = 1 << 26;
  ASSERT_OK_AND_ASSIGN(auto buffer, device_->Allocate(n * 4));
  ASSERT_OK_AND_ASSIGN(auto pinned, device_->AllocateHost(4));
  const Tensor x(buffer->data(), DType::kF32, {n});
  stream_->Record(*begin);
  Zero(*stream_, x);
  for (int i = 0; i < 20; ++i) Scale(*stream_, 1, x);
  std::vector<float> last = {7};
  Copy(*stream_, Tensor(last.data(), DType::kF32, {1}), x.Rows(n - 1, 1));
  stream_->Record(*end);
  other->Wait(*end);
  Copy(*other, x.Rows(n - 1, 1), Tensor(pinned->data(), DType::kF32, {1}));
  float seen = 0;
  other->Enqueue([&] { seen = *static_cast<float*>(pinned->data()); });
  ASSERT_OK(other->Synchronize());
  EXPECT_EQ(seen, 7);
  EXPECT_GT(end->SecondsSince(*begin), 0);
  stream_->Fail(absl::DataLossError("first"));
  stream_->Fail(absl::InternalError("second"));
  EXPECT_EQ(stream_->Synchronize().code(), absl::StatusCode::kDataLoss);
  EXPECT_OK(stream_->Synchronize());
}

}  // namespace
}  // namespace muster::kernels
