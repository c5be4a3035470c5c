#include <tuple>

#include "kernels/activation/activation.h"
#include "kernels/attention/rotary.h"
#include "kernels/memory/memory.h"
#include "kernels/norm/norm.h"
#include "kernels/random/dropout.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using RmsNormGpuTest = GpuTest;
using RotaryGpuTest = GpuTest;
using SwigluGpuTest = GpuTest;
using AddGpuTest = GpuTest;
using DropoutGpuTest = GpuTest;

TEST_F(RmsNormGpuTest, ForwardAndBackward_EveryWidth_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : FloatTypes()) {
    for (int64_t c :
         {1, 33, 64, 512, 768, 1024, 1280, 1536, 1600, 2048, 2560, 5120, 3072, 4096, 8192, 8200}) {
      for (bool branch : {false, true}) {
        // So many rows that every team of threads in backward gets several.
        const int64_t t = c > 4000 ? 9 : c == 512 ? 9001 : 131;
        const bool accumulate = branch;
        const std::string what = absl::StrCat(Name(dtype), " C=", c, branch ? " branch" : "");
        Both residual = Input(dtype, {t, c}), added = Input(dtype, {t, c});
        Both gamma = Input(branch ? dtype : DType::kF32, {c}, 0.1f, 1);
        Both y = Output(dtype, {t, c}), rstd = Output(DType::kF32, {t});
        const auto gpu = [](Both& both) { return both.gpu(); };
        const auto cpu = [](Both& both) { return both.cpu(); };
        const auto forward = [&](Stream& stream, const auto& side) {
          RmsNormForward(stream, {.residual = side(residual),
                                  .branch = branch ? side(added) : Tensor(),
                                  .sum = branch ? side(residual) : Tensor(),  // in place
                                  .gamma = side(gamma),
                                  .y = side(y),
                                  .rstd = side(rstd)});
        };
        forward(*stream_, gpu);
        forward(*cpu_stream_, cpu);
        if (branch) ExpectClose("sum " + what, residual);
        ExpectClose("y " + what, y, 3e-6);
        ExpectClose("rstd " + what, rstd, dtype == DType::kF32 ? 3e-6 : 1e-2);
        // Both sides run backward on the inputs that the device has rounded.
        Both x(*device_, dtype, {t, c}, residual.Download(*stream_));
        x.Upload(*stream_);
        Both r(*device_, DType::kF32, {t}, rstd.Download(*stream_));
        r.Upload(*stream_);
        Both dy = Input(dtype, {t, c}), dx = Input(dtype, {t, c});
        Both dgamma = accumulate ? Input(DType::kF32, {c}) : Output(DType::kF32, {c});
        Both again(*device_, DType::kF32, {c}, dgamma.values());
        again.Upload(*stream_);
        Both dx_again(*device_, dtype, {t, c}, dx.values());
        dx_again.Upload(*stream_);
        const auto backward = [&](Stream& stream, const auto& side, Both& into, Both& gradient) {
          RmsNormBackward(stream, {.dy = side(dy),
                                   .x = side(x),
                                   .gamma = side(gamma),
                                   .rstd = side(r),
                                   .dx = side(into),
                                   .dgamma = side(gradient),
                                   .accumulate = accumulate});
        };
        backward(*stream_, gpu, dx, dgamma);
        backward(*cpu_stream_, cpu, dx, dgamma);
        ExpectClose("dx " + what, dx, 3e-6);
        ExpectClose("dgamma " + what, dgamma,
                    c < 8 ? 1e-4 : 4e-6 + 1e-7 * std::sqrt(static_cast<double>(t)));
        backward(*stream_, gpu, dx_again, again);
        EXPECT_EQ(dgamma.Download(*stream_), again.Download(*stream_)) << what;
        EXPECT_EQ(dx.Download(*stream_), dx_again.Download(*stream_)) << what;
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(RotaryGpuTest, PackedHeadsBothWays_MatchTheHost) {
  for (DType dtype : FloatTypes()) {
    for (const auto& [heads, width] :
         std::vector<std::tuple<int64_t, int64_t>>{{5, 64}, {8, 128}, {3, 6}, {1, 40}}) {
      const int64_t batch = 3, sequence = 37, row = (heads + 2) * width;
      const std::string what = absl::StrCat(Name(dtype), " H=", heads, " D=", width);
      Both table = Output(DType::kF32, {sequence, width});
      std::vector<int32_t> places(sequence);
      for (int64_t s = 0; s < sequence; ++s) places[s] = static_cast<int32_t>(s * s * 7 % 9001);
      Both positions = Integers(places);
      const RotaryScaling scaling = {.factor = 8, .original_context = 512};
      const auto make = [&](Stream& stream, const Tensor& out, const Tensor& at, bool scaled) {
        RotaryTable(stream, {.table = out,
                             .positions = scaled ? AsIntegers(at) : Tensor(),
                             .first_position = 11,
                             .theta = 500000,
                             .scaling = scaled ? scaling : RotaryScaling()});
      };
      for (bool scaled : {false, true}) {
        make(*stream_, table.gpu(), positions.gpu(), scaled);
        make(*cpu_stream_, table.cpu(), positions.cpu(), scaled);
        ExpectClose("table " + what, table, 1e-7);
      }
      Both x = Input(dtype, {batch * sequence, row});
      const std::vector<float> before = x.values();
      const std::initializer_list<int64_t> shape = {batch, sequence, heads, width};
      const std::initializer_list<int64_t> strides = {sequence * row, row, width, 1};
      Rotary(*stream_, x.Gpu(width, shape, strides), table.gpu(), false);
      Rotary(*cpu_stream_, x.Cpu(width, shape, strides), table.cpu(), false);
      ExpectClose("rotated " + what, x);
      Both y(*device_, dtype, {batch * sequence, row}, before);
      y.Upload(*stream_);
      Rotary(*stream_, y.Gpu(width, shape, strides), table.gpu(), true);
      Rotary(*cpu_stream_, y.Cpu(width, shape, strides), table.cpu(), true);
      ExpectClose("rotated back " + what, y);
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(SwigluGpuTest, ForwardAndBackward_InPlaceAndOddWidths_MatchTheHost) {
  for (DType dtype : FloatTypes()) {
    for (int64_t f : {1, 33, 64, 2048, 2056, 8192}) {
      const int64_t t = 67;
      const std::string what = absl::StrCat(Name(dtype), " F=", f);
      Both packed = Input(dtype, {t, 2 * f}, 2), y = Output(dtype, {t, f});
      Both dy = Input(dtype, {t, f}), d_packed = Output(dtype, {t, 2 * f});
      SwigluForward(*stream_, packed.gpu(), y.gpu());
      SwigluForward(*cpu_stream_, packed.cpu(), y.cpu());
      ExpectClose("y " + what, y);
      SwigluBackward(*stream_, packed.gpu(), dy.gpu(), d_packed.gpu());
      SwigluBackward(*cpu_stream_, packed.cpu(), dy.cpu(), d_packed.cpu());
      ExpectClose("gradient " + what, d_packed);
      SwigluBackward(*stream_, packed.gpu(), dy.gpu(), packed.gpu(), dy.gpu());
      EXPECT_EQ(packed.Download(*stream_), d_packed.Download(*stream_)) << what;
      EXPECT_EQ(dy.Download(*stream_), y.Download(*stream_)) << what;
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(DropoutGpuTest, OddWidthsPartsAndPositions_DropWhatTheHostDrops) {
  for (DType dtype : FloatTypes()) {
    for (int64_t columns : {1, 6, 33, 64, 768, 2056}) {
      for (int64_t offset : {0, 3}) {
        const int64_t rows = 67, sequence = 12;
        const std::string what = absl::StrCat(Name(dtype), " C=", columns, " from ", offset);
        Both x = Input(dtype, {rows, columns}, 1, 0, offset);
        Both y = Output(dtype, {rows, columns}, offset);
        // The sample numbers carry into the upper 32 bits of the counter.
        Both sample = Integers({-3, 7});
        Both positions = Integers({4, 5, 6, 7, 8, 9, 50, 51, 52, 53, 54, 55});
        const auto run = [&](Stream& stream, const Tensor& from, const Tensor& to, bool host) {
          Dropout(stream, {.x = from,
                           .out = to,
                           .probability = 0.3,
                           .seed = 0x123456789abcdef,
                           .site = 9,
                           .sample = AsIntegers(host ? sample.cpu() : sample.gpu()),
                           .sequence = sequence,
                           .first_row = 5,
                           .positions =
                               offset == 0 ? Tensor()
                                           : AsIntegers(host ? positions.cpu() : positions.gpu())});
        };
        run(*stream_, x.gpu(), y.gpu(), /*host=*/false);
        run(*cpu_stream_, x.cpu(), y.cpu(), /*host=*/true);
        const std::vector<float> actual = y.Download(*stream_);
        for (int64_t i = 0; i < rows * columns; ++i) {
          ASSERT_EQ(actual[i], RoundTo(dtype, y.values()[i])) << what << " at " << i;
        }
        run(*stream_, x.gpu(), x.gpu(), /*host=*/false);
        EXPECT_EQ(x.Download(*stream_), actual) << what << " in place";
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(AddGpuTest, OddSizesAndInPlace_MatchTheHost) {
  for (DType dtype : FloatTypes()) {
    for (int64_t offset : {0, 3}) {
      Both a = Input(dtype, {1003}, 1, 0, offset), b = Input(dtype, {1003}, 1, 0, offset);
      Add(*stream_, a.gpu(), b.gpu(), a.gpu());
      Add(*cpu_stream_, a.cpu(), b.cpu(), a.cpu());
      ExpectClose("sum", a);
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

}  // namespace
}  // namespace muster::kernels
