// Our own products with epilogues, called as they are: the ops take them only where they are the
// fastest way.
#include "kernels/gemm_hopper.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using cuda::CudaStream;
using cuda::Fused;
using cuda::HopperGemm;

// Sums in another order; intermediates rounded to 16 bits.
double Slack(DType dtype) { return dtype == DType::kBF16 ? 4e-3 : 5e-4; }

class HopperGemmGpuTest : public GpuTest {
 protected:
  // Rows, values of k, columns: within one tile and a step of k, odd ones, several tiles.
  const std::vector<std::tuple<int64_t, int64_t, int64_t>> shapes_ = {
      {1, 8, 8}, {7, 72, 264}, {256, 64, 256}, {300, 520, 136}, {1031, 776, 1288}};
  const std::vector<DType> types_ = {DType::kBF16, DType::kF16};

  bool Serves(const HopperGemm& gemm) {
    return cuda::HopperGemmServes(CudaStream::Of(*stream_).cuda_device(), gemm);
  }
  void Run(const HopperGemm& gemm) {
    CudaStream& stream = CudaStream::Of(*stream_);
    ASSERT_TRUE(Serves(gemm));
    ASSERT_OK(
        cuda::RunHopperGemm(stream, gemm, stream.Scratch(cuda::HopperGemmScratchBytes(gemm) + 1)));
    ASSERT_OK(stream_->Synchronize());
  }
  void SetUp() override {
    GpuTest::SetUp();
    if (device_ == nullptr) return;
    Both probe = Input(DType::kBF16, {8, 8});
    HopperGemm gemm;
    gemm.a = gemm.b = gemm.out = probe.gpu();
    if (!Serves(gemm)) GTEST_SKIP() << "not a Hopper GPU: " << device_->name();
  }
};

TEST_F(HopperGemmGpuTest, Forward_EveryActivationAndOddShapes_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : types_) {
    for (const auto& [t, k, n] : shapes_) {
      for (Epilogue epilogue : {Epilogue::kNone, Epilogue::kGelu, Epilogue::kSwiglu}) {
        const std::string what = absl::StrCat(Name(dtype), " ", t, "x", k, "x", n, " epilogue ",
                                              static_cast<int>(epilogue));
        const bool plain = epilogue == Epilogue::kNone;
        const int64_t outputs = epilogue == Epilogue::kSwiglu ? 2 * n : n;
        Both x = Input(dtype, {t, k}), w = Input(dtype, {outputs, k}, 1 / std::sqrt(float(k)));
        Both bias = Input(dtype, {outputs});
        Both pre = Output(dtype, {t, outputs}), y = Output(dtype, {t, n});
        HopperGemm gemm;
        gemm.fused = plain                         ? Fused::kNone
                     : epilogue == Epilogue::kGelu ? Fused::kGelu
                                                   : Fused::kSwiglu;
        gemm.a = x.gpu();
        gemm.b = w.gpu();
        gemm.bias = bias.gpu();
        gemm.out = plain ? y.gpu() : pre.gpu();
        if (!plain) gemm.activation = y.gpu();
        Run(gemm);
        LinearForward(*cpu_stream_, {.x = x.cpu(),
                                     .w = w.cpu(),
                                     .bias = bias.cpu(),
                                     .y = y.cpu(),
                                     .epilogue = epilogue,
                                     .pre = plain ? Tensor() : pre.cpu()});
        ExpectClose("y " + what, y, Slack(dtype));
        if (!plain) ExpectClose("pre " + what, pre, 1e-5);
        const std::vector<float> first = y.Download(*stream_);
        y.Upload(*stream_);  // poison
        Run(gemm);
        EXPECT_EQ(y.Download(*stream_), first) << what;
      }
    }
  }
}

TEST_F(HopperGemmGpuTest, Backward_PlainAndThroughGelu_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : types_) {
    for (const auto& [t, n, k] : shapes_) {
      for (bool gelu : {false, true}) {
        for (bool accumulate : {false, true}) {
          const std::string what = absl::StrCat(Name(dtype), " ", t, "x", n, "x", k,
                                                gelu ? " gelu" : "", accumulate ? " added" : "");
          Both dy = Input(dtype, {t, n}), w = Input(dtype, {n, k}, 1 / std::sqrt(float(n)));
          Both pre = Input(dtype, {t, k}), x = Output(dtype, {t, k}), dx = Output(dtype, {t, k});
          Both sums = accumulate ? Input(DType::kF32, {k}) : Output(DType::kF32, {k});
          Both again(*device_, DType::kF32, {k}, sums.values());
          HopperGemm gemm;
          gemm.transpose_b = false;
          gemm.a = dy.gpu();
          gemm.b = w.gpu();
          gemm.out = dx.gpu();
          if (gelu) {
            gemm.fused = Fused::kGeluGradient;
            gemm.pre = pre.gpu();
            gemm.column_sums = sums.gpu();
            gemm.accumulate = accumulate;
            if (accumulate) gemm.activation = x.gpu();  // recomputed
          }
          Run(gemm);
          LinearBackward(*cpu_stream_, {.dy = dy.cpu(),
                                        .x = gelu && accumulate ? x.cpu() : Tensor(),
                                        .w = w.cpu(),
                                        .dx = dx.cpu(),
                                        .pre = gelu ? pre.cpu() : Tensor(),
                                        .pre_dbias = gelu ? sums.cpu() : Tensor(),
                                        .recompute_x = gelu && accumulate,
                                        .accumulate = accumulate});
          ExpectClose("dx " + what, dx, Slack(dtype));
          if (!gelu) break;
          if (accumulate) ExpectClose("x " + what, x, 1e-5);
          ExpectClose("sums " + what, sums, 2 * Slack(dtype));
          const std::vector<float> first = dx.Download(*stream_);
          const std::vector<float> first_sums = sums.Download(*stream_);
          dx.Upload(*stream_);  // poison
          again.Upload(*stream_);
          gemm.column_sums = again.gpu();
          Run(gemm);
          EXPECT_EQ(dx.Download(*stream_), first) << what;
          EXPECT_EQ(again.Download(*stream_), first_sums) << what;
        }
      }
    }
  }
}

TEST_F(HopperGemmGpuTest, Backward_ThroughSwigluApartAndInPlace_MatchesTheHost) {
  for (DType dtype : types_) {
    for (const auto& [t, n, f] : shapes_) {
      for (bool in_place : {false, true}) {
        const std::string what =
            absl::StrCat(Name(dtype), " ", t, "x", n, "x", f, in_place ? " in place" : "");
        Both dy = Input(dtype, {t, n}), w = Input(dtype, {n, f}, 1 / std::sqrt(float(n)));
        Both packed = Input(dtype, {t, 2 * f}), d_packed = Output(dtype, {t, 2 * f});
        Both x = Output(dtype, {t, f});
        Both& gradient = in_place ? packed : d_packed;
        HopperGemm gemm;
        gemm.fused = Fused::kSwigluGradient;
        gemm.transpose_b = false;
        gemm.a = dy.gpu();
        gemm.b = w.gpu();
        gemm.pre = packed.gpu();
        gemm.out = gradient.gpu();
        if (in_place) gemm.activation = x.gpu();
        Run(gemm);
        LinearBackward(*cpu_stream_, {.dy = dy.cpu(),
                                      .x = in_place ? x.cpu() : Tensor(),
                                      .w = w.cpu(),
                                      .dx = x.cpu(),
                                      .recompute_x = in_place,
                                      .packed = packed.cpu(),
                                      .d_packed = gradient.cpu()});
        ExpectClose("gradient " + what, gradient, Slack(dtype));
        if (in_place) ExpectClose("x " + what, x, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace muster::kernels
