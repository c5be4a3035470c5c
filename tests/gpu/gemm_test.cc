// Our GEMMs for Hopper, called directly: the ops take them only where they are the fastest way.
#include "kernels/gemm/gemm_hopper.h"

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/attention/rotary.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/linear_cuda.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/gemm/weight_gradient_hopper.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/optimizer/square_parts.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using cuda::CudaStream;
using cuda::Fused;
using cuda::HopperGemm;

// For sums in another order and intermediates rounded to 16 bits.
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
      for (Epilogue epilogue :
           {Epilogue::kNone, Epilogue::kGelu, Epilogue::kRelu2, Epilogue::kSwiglu}) {
        const std::string what = absl::StrCat(Name(dtype), " ", t, "x", k, "x", n, " epilogue ",
                                              static_cast<int>(epilogue));
        const bool plain = epilogue == Epilogue::kNone;
        const int64_t outputs = epilogue == Epilogue::kSwiglu ? 2 * n : n;
        Both x = Input(dtype, {t, k}), w = Input(dtype, {outputs, k}, 1 / std::sqrt(float(k)));
        Both bias = Input(dtype, {outputs});
        Both pre = Output(dtype, {t, outputs}), y = Output(dtype, {t, n});
        HopperGemm gemm;
        gemm.fused = plain                          ? Fused::kNone
                     : epilogue == Epilogue::kGelu  ? Fused::kGelu
                     : epilogue == Epilogue::kRelu2 ? Fused::kRelu2
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

TEST_F(HopperGemmGpuTest, Forward_AddingAResidual_MatchesTheHostAsOurGemmAndAsTheOp) {
  for (DType dtype : types_) {
    for (const auto& [t, k, n] : shapes_) {
      for (bool with_bias : {false, true}) {
        const std::string what = absl::StrCat(Name(dtype), " ", t, "x", k, "x", n, " ", with_bias);
        Both x = Input(dtype, {t, k}), w = Input(dtype, {n, k}, 1 / std::sqrt(float(k)));
        Both bias = Input(dtype, {n}), residual = Input(dtype, {t, n});
        Both y = Output(dtype, {t, n}), by_op = Output(dtype, {t, n});
        LinearForwardArgs args = {.x = x.cpu(), .w = w.cpu(), .y = y.cpu()};
        if (with_bias) args.bias = bias.cpu();
        args.residual = residual.cpu();
        LinearForward(*cpu_stream_, args);
        args.y = by_op.cpu();
        LinearForward(*cpu_stream_, args);
        HopperGemm gemm;
        gemm.fused = Fused::kResidual;
        gemm.a = args.x = x.gpu(), gemm.b = args.w = w.gpu();
        gemm.pre = args.residual = residual.gpu();
        if (with_bias) gemm.bias = args.bias = bias.gpu();
        gemm.out = y.gpu(), args.y = by_op.gpu();
        LinearForward(*stream_, args);
        ExpectClose("op " + what, by_op, Slack(dtype));
        Run(gemm);
        ExpectClose("ours " + what, y, Slack(dtype));
      }
    }
  }
}

TEST_F(HopperGemmGpuTest, Forward_ThroughRotary_MatchesTheHostAsOurGemmAndAsTheOp) {
  for (DType dtype : types_) {
    for (const auto& [batch, sequence, k] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 1, 8}, {3, 100, 520}, {1, 1031, 72}}) {
      for (int64_t depth : {32, 64, 128}) {
        for (int64_t heads : {1, 5}) {
          const int64_t t = batch * sequence, rotated = (heads + 2) / 2, n = (heads + 1) * depth;
          const std::string what = absl::StrCat(Name(dtype), " ", batch, "x", sequence, "x", k, " ",
                                                rotated, " of ", heads + 1, " heads of ", depth);
          Both x = Input(dtype, {t, k}), w = Input(dtype, {n, k}, 1 / std::sqrt(float(k)));
          Both bias = Input(dtype, {n}), table = Output(DType::kF32, {sequence, depth});
          Both y = Output(dtype, {t, n}), by_op = Output(dtype, {t, n});
          RotaryTable(*cpu_stream_, {.table = table.cpu(), .first_position = 17});
          RotaryTable(*stream_, {.table = table.gpu(), .first_position = 17});
          LinearForwardArgs args = {.x = x.cpu(),
                                    .w = w.cpu(),
                                    .bias = bias.cpu(),
                                    .y = y.cpu(),
                                    .epilogue = Epilogue::kRotary,
                                    .rotary = table.cpu(),
                                    .rotary_heads = rotated};
          LinearForward(*cpu_stream_, args);
          args.y = by_op.cpu();
          LinearForward(*cpu_stream_, args);
          args.x = x.gpu(), args.w = w.gpu(), args.bias = bias.gpu(), args.rotary = table.gpu();
          args.y = by_op.gpu();
          LinearForward(*stream_, args);
          ExpectClose("op " + what, by_op, Slack(dtype));
          HopperGemm gemm;
          gemm.fused = depth == 128 ? Fused::kRotary128 : Fused::kRotary64;
          gemm.a = args.x, gemm.b = args.w, gemm.bias = args.bias, gemm.out = y.gpu();
          gemm.rotary = args.rotary;
          gemm.rotary_columns = rotated * depth;
          EXPECT_EQ(Serves(gemm), depth >= 64) << what;
          if (depth < 64) continue;
          Run(gemm);
          ExpectClose("ours " + what, y, Slack(dtype));
        }
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

TEST_F(HopperGemmGpuTest, Backward_ThroughSquaredRelu_MatchesTheHostAsOurGemmAndAsTheOp) {
  for (DType dtype : types_) {
    for (const auto& [t, n, k] : shapes_) {
      for (bool recompute : {false, true}) {
        const std::string what =
            absl::StrCat(Name(dtype), " ", t, "x", n, "x", k, recompute ? " recomputed" : "");
        Both dy = Input(dtype, {t, n}), w = Input(dtype, {n, k}, 1 / std::sqrt(float(n)));
        Both pre = Input(dtype, {t, k}), x = Output(dtype, {t, k}), dx = Output(dtype, {t, k});
        Both by_op = Output(dtype, {t, k}), x_by_op = Output(dtype, {t, k});
        HopperGemm gemm;
        gemm.fused = Fused::kRelu2Gradient;
        gemm.transpose_b = false;
        gemm.a = dy.gpu();
        gemm.b = w.gpu();
        gemm.pre = pre.gpu();
        gemm.out = dx.gpu();
        if (recompute) gemm.activation = x.gpu();
        Run(gemm);
        const auto args = [&](bool gpu, Both& to, Both& again) {
          LinearBackwardArgs backward = {.dy = gpu ? dy.gpu() : dy.cpu(),
                                         .w = gpu ? w.gpu() : w.cpu(),
                                         .dx = gpu ? to.gpu() : to.cpu(),
                                         .pre = gpu ? pre.gpu() : pre.cpu(),
                                         .activation = Epilogue::kRelu2};
          if (recompute) backward.x = gpu ? again.gpu() : again.cpu();
          backward.recompute_x = recompute;
          return backward;
        };
        LinearBackward(*cpu_stream_, args(false, dx, x));
        LinearBackward(*cpu_stream_, args(false, by_op, x_by_op));
        LinearBackward(*stream_, args(true, by_op, x_by_op));
        ExpectClose("dx " + what, dx, Slack(dtype));
        ExpectClose("dx of the op " + what, by_op, Slack(dtype));
        if (!recompute) continue;
        ExpectClose("x " + what, x, 1e-5);
        ExpectClose("x of the op " + what, x_by_op, 1e-5);
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

// Our weight gradients against cuBLASLt's GEMM and a sum in double.
class HopperWeightGradientGpuTest : public HopperGemmGpuTest {
 protected:
  // dw (+)= dy^T x.
  static std::vector<double> Reference(Both& dy, Both& x, std::vector<float>* added) {
    const int64_t t = dy.cpu().dim(0), n = dy.cpu().dim(1), k = x.cpu().dim(1);
    std::vector<double> dw(n * k);
    if (added != nullptr) dw.assign(added->begin(), added->end());
    const float *left = dy.values().data(), *right = x.values().data();
    for (int64_t token = 0; token < t; ++token) {
      for (int64_t row = 0; row < n; ++row) {
        const double scale = left[token * n + row];
        double* out = dw.data() + row * k;
        for (int64_t c = 0; c < k; ++c) out[c] += scale * right[token * k + c];
      }
    }
    return dw;
  }
  static double Error(const std::vector<float>& values, const std::vector<double>& reference) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      error += (values[i] - reference[i]) * (values[i] - reference[i]);
      norm += reference[i] * reference[i];
    }
    return std::sqrt(error / norm);
  }
  static double SumOfSquares(const std::vector<float>& values) {
    double sum = 0;
    for (const float value : values) sum += double{value} * value;
    return sum;
  }
  static double Total(const std::vector<float>& pairs) {
    double sum = 0;
    for (const float value : pairs) sum += value;
    return sum;
  }
  cuda::HopperWeightGradient Gradient(Both& dy, Both& x, Both& dw, Both& squares, bool accumulate) {
    return {.dy = dy.gpu(),
            .x = x.gpu(),
            .dw = dw.gpu(),
            .accumulate = accumulate,
            .squares = squares.gpu()};
  }
  void Run(const cuda::HopperWeightGradient& gradient) {
    CudaStream& stream = CudaStream::Of(*stream_);
    ASSERT_TRUE(cuda::HopperWeightGradientServes(stream.cuda_device(), gradient));
    ASSERT_OK(cuda::RunHopperWeightGradient(stream, gradient));
    ASSERT_OK(stream_->Synchronize());
  }
  std::vector<float> Library(Both& dy, Both& x, Both& dw, bool accumulate) {
    CudaStream& stream = CudaStream::Of(*stream_);
    dw.Upload(*stream_);
    const cuda::Gemm gemm = {.m = x.gpu().dim(1),
                             .n = dy.gpu().dim(1),
                             .k = dy.gpu().dim(0),
                             .transpose_a = false,
                             .transpose_b = true,
                             .input = dy.dtype(),
                             .output = DType::kF32,
                             .a = x.gpu().data(),
                             .b = dy.gpu().data(),
                             .d = dw.gpu().data(),
                             .beta = accumulate ? 1.0f : 0.0f};
    EXPECT_OK(stream.cuda_device().linear_plans().Run(
        stream, gemm, stream.Scratch(cuda::LinearPlans::kWorkspaceBytes)));
    return dw.Download(*stream_);
  }
};

TEST_F(HopperWeightGradientGpuTest, OddShapes_AreAsNearAsTheLibraryAndRepeatTheirBits) {
  // Tokens, rows, columns: within one tile, odd numbers of tokens, several tiles, more than there
  // are blocks.
  for (const auto& [t, n, k] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 8, 8},
                                                          {7, 72, 264},
                                                          {256, 128, 512},
                                                          {300, 520, 136},
                                                          {1031, 776, 1288},
                                                          {77, 4104, 2056}}) {
    for (const DType dtype : types_) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(
            absl::StrCat(Name(dtype), " ", t, " tokens, ", n, "x", k, accumulate ? " added" : ""));
        Both dy = Input(dtype, {t, n}), x = Input(dtype, {t, k});
        Both dw = accumulate ? Input(DType::kF32, {n, k}) : Output(DType::kF32, {n, k});
        const std::vector<double> reference = Reference(dy, x, accumulate ? &dw.values() : nullptr);
        const double library = Error(Library(dy, x, dw, accumulate), reference);
        dw.Upload(*stream_);  // poison, or what is added to
        Both squares = Output(DType::kF32, {kSquareParts, 2});
        const cuda::HopperWeightGradient gradient = Gradient(dy, x, dw, squares, accumulate);
        Run(gradient);
        const std::vector<float> first = dw.Download(*stream_);
        const std::vector<float> pairs = squares.Download(*stream_);
        EXPECT_LE(Error(first, reference), 2 * library + 1e-7);
        EXPECT_NEAR(Total(pairs) / SumOfSquares(first), 1, 1e-6);
        dw.Upload(*stream_);
        squares.Upload(*stream_);
        Run(gradient);
        EXPECT_EQ(dw.Download(*stream_), first);
        EXPECT_EQ(squares.Download(*stream_), pairs);
      }
    }
  }
}

TEST_F(HopperWeightGradientGpuTest, NotFinite_ShowsInTheSquaresOfEveryWay) {
  for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Both dy = Input(DType::kF16, {64, 136}), x = Input(DType::kF16, {64, 264});
    std::vector<float> values = dy.values();
    values.back() = value;
    Both bad(*device_, DType::kF16, {64, 136}, values);
    bad.Upload(*stream_);
    Both dw = Output(DType::kF32, {136, 264}), squares = Output(DType::kF32, {kSquareParts, 2});
    Run(Gradient(bad, x, dw, squares, false));
    EXPECT_FALSE(std::isfinite(Total(squares.Download(*stream_))));
    cuda::SquareParts(CudaStream::Of(*stream_), dw.gpu(), squares.gpu());
    EXPECT_FALSE(std::isfinite(Total(squares.Download(*stream_))));
  }
}

// The ops, whichever way they take; on odd sizes and in fp32 that is cuBLASLt's.
TEST_F(HopperWeightGradientGpuTest, Ops_SquaresBiasesAndSeveralTensors_MatchTheHost) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [t, n, k] :
         std::vector<std::tuple<int64_t, int64_t, int64_t>>{{65, 33, 17}, {513, 264, 1032}}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(
            absl::StrCat(Name(dtype), " ", t, " tokens, ", n, "x", k, accumulate ? " added" : ""));
        Both dy = Input(dtype, {t, n}), x = Input(dtype, {t, k});
        Both dw = accumulate ? Input(DType::kF32, {n, k}) : Output(DType::kF32, {n, k});
        Both dbias = accumulate ? Input(DType::kF32, {n}) : Output(DType::kF32, {n});
        Both squares = Output(DType::kF32, {kSquareParts, 2});
        Both pair = Output(DType::kF32, {2}), of_rows = Output(DType::kF32, {2});
        const auto enqueue = [&](Stream& stream, auto side) {
          bool left = false;
          WeightGradient(stream,
                         {.dy = side(dy),
                          .x = side(x),
                          .dw = side(dw),
                          .dbias = side(dbias),
                          .squares = side(squares),
                          .accumulate = accumulate},
                         &left);
          if (!left) {
            Zero(stream, side(squares));
            SumSquaresPair(stream, side(dw), Tensor(side(squares).data(), DType::kF32, {2}), false);
          }
          SumPairs(stream, side(squares), side(pair), /*accumulate=*/false);
          SumPairs(stream, side(squares), side(pair), /*accumulate=*/true);
          std::vector<Tensor> rows;
          for (int64_t row = 0; row < n; ++row) rows.push_back(side(dw).Rows(row, 1));
          SumSquaresPair(stream, rows, side(of_rows), /*accumulate=*/false);
        };
        enqueue(*stream_, [](Both& both) { return both.gpu(); });
        enqueue(*cpu_stream_, [](Both& both) { return both.cpu(); });
        ASSERT_OK(cpu_stream_->Synchronize());
        ExpectClose("dw", dw, 1e-5);
        ExpectClose("dbias", dbias, 1e-5);
        const double sum = SumOfSquares(dw.Download(*stream_));
        const double host = SumOfSquares(dw.values());
        EXPECT_NEAR(Total(pair.Download(*stream_)) / sum, 2, 1e-6);
        EXPECT_NEAR(Total(of_rows.Download(*stream_)) / sum, 1, 1e-12);
        EXPECT_NEAR(Total(pair.values()) / host, 2, 1e-6);
        EXPECT_NEAR(Total(of_rows.values()) / host, 1, 1e-12);
      }
    }
  }
}

}  // namespace
}  // namespace muster::kernels
