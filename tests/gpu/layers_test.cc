#include <tuple>

#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using EmbeddingGpuTest = GpuTest;
using LayerNormGpuTest = GpuTest;
using LinearGpuTest = GpuTest;
using CrossEntropyGpuTest = GpuTest;

TEST_F(EmbeddingGpuTest, ForwardAndBackward_SkewedTokens_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : FloatTypes()) {
    for (int64_t c : {1, 33, 64, 768}) {
      const int64_t batch = 5, sequence = 67, t = batch * sequence, vocab = 101;
      for (int64_t distinct : {1, 3, 101}) {  // few distinct tokens: runs over many chunks
        std::vector<int32_t> ids(t);
        for (int32_t& id : ids) {
          id = std::uniform_int_distribution<int32_t>(0,
                                                      static_cast<int32_t>(distinct) - 1)(random_);
        }
        Both tokens = Integers(ids);
        Both wte = Input(dtype, {vocab, c}), wpe = Input(dtype, {sequence, c});
        Both out = Output(dtype, {t, c});
        EmbeddingForward(*stream_, AsIntegers(tokens.gpu()), wte.gpu(), wpe.gpu(), sequence,
                         out.gpu());
        EmbeddingForward(*cpu_stream_, AsIntegers(tokens.cpu()), wte.cpu(), wpe.cpu(), sequence,
                         out.cpu());
        ExpectClose("embedding", out);
        Both dout = Input(dtype, {t, c});
        Both d_wte = Input(DType::kF32, {vocab, c}), d_wpe = Input(DType::kF32, {sequence, c});
        Both again(*device_, DType::kF32, {vocab, c}, d_wte.values());
        again.Upload(*stream_);
        EmbeddingBackward(*stream_, AsIntegers(tokens.gpu()), dout.gpu(), sequence, d_wte.gpu(),
                          d_wpe.gpu());
        EmbeddingBackward(*stream_, AsIntegers(tokens.gpu()), dout.gpu(), sequence, again.gpu(),
                          Tensor());
        EmbeddingBackward(*cpu_stream_, AsIntegers(tokens.cpu()), dout.cpu(), sequence, d_wte.cpu(),
                          d_wpe.cpu());
        ExpectClose("d_wte", d_wte);
        ExpectClose("d_wpe", d_wpe);
        EXPECT_EQ(d_wte.Download(*stream_), again.Download(*stream_));
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(EmbeddingGpuTest, Forward_TokenOutsideTheVocabulary_IsNaNAndNothingElse) {
  Both tokens = Integers({1, 100, -5, 2});
  Both wte = Input(DType::kBF16, {8, 16}), out = Output(DType::kBF16, {4, 16});
  EmbeddingForward(*stream_, AsIntegers(tokens.gpu()), wte.gpu(), Tensor(), 4, out.gpu());
  const std::vector<float> actual = out.Download(*stream_);
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(actual[i]), i / 16 == 1 || i / 16 == 2);
  Both dout = Input(DType::kBF16, {4, 16}), d_wte = Input(DType::kF32, {8, 16});
  EmbeddingBackward(*stream_, AsIntegers(tokens.gpu()), dout.gpu(), 4, d_wte.gpu(), Tensor());
  d_wte.Download(*stream_);  // checks the guards
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(LayerNormGpuTest, ForwardAndBackward_EveryWidth_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : FloatTypes()) {
    for (int64_t c : {1, 33, 64, 256, 768, 1600, 4096, 5120, 8200, 16400}) {
      for (bool branch : {false, true}) {
        const int64_t t = c > 4000 ? 9 : 131;
        Both residual = Input(dtype, {t, c}, 1, 0.5f), added = Input(dtype, {t, c});
        Both gamma = Input(branch ? dtype : DType::kF32, {c}, 0.1f, 1);
        Both beta = Input(branch ? dtype : DType::kF32, {c}, 0.1f);
        Both y = Output(dtype, {t, c}), mean = Output(DType::kF32, {t}),
             rstd = Output(DType::kF32, {t});
        const auto forward = [&](Stream& stream, const auto& side) {
          LayerNormForward(stream, {.residual = side(residual),
                                    .branch = branch ? side(added) : Tensor(),
                                    .sum = branch ? side(residual) : Tensor(),  // in place
                                    .gamma = side(gamma),
                                    .beta = side(beta),
                                    .y = side(y),
                                    .mean = side(mean),
                                    .rstd = side(rstd)});
        };
        const auto gpu = [](Both& both) { return both.gpu(); };
        const auto cpu = [](Both& both) { return both.cpu(); };
        forward(*stream_, gpu);
        forward(*cpu_stream_, cpu);
        const std::string what = absl::StrCat(Name(dtype), " C=", c, branch ? " branch" : "");
        if (branch) ExpectClose("sum " + what, residual);
        ExpectClose("y " + what, y, 3e-6);
        // Backward reads what each side has: compare on the device's own (rounded) inputs.
        Both x(*device_, dtype, {t, c}, residual.Download(*stream_));
        x.Upload(*stream_);
        Both m(*device_, DType::kF32, {t}, mean.Download(*stream_)),
            r(*device_, DType::kF32, {t}, rstd.Download(*stream_));
        m.Upload(*stream_);
        r.Upload(*stream_);
        Both dy = Input(dtype, {t, c}), dx = Input(dtype, {t, c});
        Both dgamma = Input(DType::kF32, {c}), dbeta = Input(DType::kF32, {c});
        Both again(*device_, DType::kF32, {c}, dgamma.values());
        again.Upload(*stream_);
        const auto backward = [&](Stream& stream, const auto& side, Both& into, Both& gradient) {
          LayerNormBackward(stream, {.dy = side(dy),
                                     .x = side(x),
                                     .gamma = side(gamma),
                                     .mean = side(m),
                                     .rstd = side(r),
                                     .dx = side(into),
                                     .dgamma = side(gradient),
                                     .dbeta = side(dbeta),
                                     .accumulate = c != 256});
        };
        Both dx_again(*device_, dtype, {t, c}, dx.values());
        dx_again.Upload(*stream_);
        backward(*cpu_stream_, cpu, dx, dgamma);
        backward(*stream_, gpu, dx, dgamma);
        ExpectClose("dx " + what, dx, 3e-6);
        // Few sums may cancel; many do not all.
        const double sum_slack = c < 8 ? 1e-4 : 5e-6;
        ExpectClose("dgamma " + what, dgamma, sum_slack);
        ExpectClose("dbeta " + what, dbeta, sum_slack);
        backward(*stream_, gpu, dx_again, again);
        EXPECT_EQ(dgamma.Download(*stream_), again.Download(*stream_)) << what;
        EXPECT_EQ(dx.Download(*stream_), dx_again.Download(*stream_)) << what;
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

// fp32 sums of K products in another order, and GELU's fast exponential.
double SumSlack(int64_t k) { return 2e-7 * std::sqrt(static_cast<double>(k)) + 4e-6; }

TEST_F(LinearGpuTest, ForwardAndBackward_OddShapesAndEpilogues_MatchTheHost) {
  const std::vector<std::tuple<int64_t, int64_t, int64_t>> shapes = {
      {3, 1, 9}, {7, 13, 29}, {33, 50, 18}, {130, 72, 200}, {257, 768, 96}, {512, 256, 1024}};
  for (DType dtype : FloatTypes()) {
    for (const auto& [t, k, n] : shapes) {
      for (bool gelu : {false, true}) {
        const std::string what = absl::StrCat(Name(dtype), " ", t, "x", k, "x", n);
        const float scale = 1 / std::sqrt(static_cast<float>(k));
        Both x = Input(dtype, {t, k}), w = Input(dtype, {n, k}, scale), bias = Input(dtype, {n});
        Both y = Output(dtype, {t, n}), pre = Output(dtype, {t, n});
        const auto gpu = [](Both& both) { return both.gpu(); };
        const auto cpu = [](Both& both) { return both.cpu(); };
        const auto forward = [&](Stream& stream, const auto& side) {
          LinearForward(stream, {.x = side(x),
                                 .w = side(w),
                                 .bias = side(bias),
                                 .y = side(y),
                                 .epilogue = gelu ? Epilogue::kGelu : Epilogue::kNone,
                                 .pre = gelu ? side(pre) : Tensor()});
        };
        forward(*stream_, gpu);
        ASSERT_OK(stream_->Synchronize()) << what;
        forward(*cpu_stream_, cpu);
        ExpectClose("y " + what, y, SumSlack(k));
        if (gelu) ExpectClose("pre " + what, pre, SumSlack(k));
        Both dy = Input(dtype, {t, n}), before = Input(dtype, {t, k});
        Both dx = Output(dtype, {t, k}), dw = Input(DType::kF32, {n, k}),
             dbias = Input(DType::kF32, {n});
        const auto backward = [&](Stream& stream, const auto& side) {
          LinearBackward(stream, {.dy = side(dy),
                                  .x = side(x),
                                  .w = side(w),
                                  .dx = side(dx),
                                  .pre = gelu ? side(before) : Tensor(),
                                  .dw = side(dw),
                                  .dbias = side(dbias)});
        };
        backward(*stream_, gpu);
        ASSERT_OK(stream_->Synchronize()) << what;
        backward(*cpu_stream_, cpu);
        ExpectClose("dx " + what, dx, SumSlack(n));
        ExpectClose("dw " + what, dw, SumSlack(t));
        ExpectClose("dbias " + what, dbias, SumSlack(t));
      }
    }
  }
}

TEST_F(LinearGpuTest, Backward_RecomputedInputBiasInFrontAndOverwriting_MatchTheHost) {
  const std::vector<std::tuple<int64_t, int64_t, int64_t>> shapes = {
      {7, 13, 29}, {130, 72, 200}, {1031, 768, 96}, {512, 1024, 256}};
  for (DType dtype : FloatTypes()) {
    for (const auto& [t, k, n] : shapes) {
      for (bool recompute : {false, true}) {
        for (bool accumulate : {false, true}) {
          const std::string what =
              absl::StrCat(Name(dtype), " ", t, "x", k, "x", n, recompute ? " recomputed" : "",
                           accumulate ? " added" : " overwritten");
          const float scale = 1 / std::sqrt(static_cast<float>(k));
          Both pre = Input(dtype, {t, k}), w = Input(dtype, {n, k}, scale);
          Both x = recompute ? Output(dtype, {t, k}) : Input(dtype, {t, k});
          Both dy = Input(dtype, {t, n}), dx = Output(dtype, {t, k});
          // What is overwritten starts as NaN.
          const auto gradient = [&](std::initializer_list<int64_t> shape) {
            return accumulate ? Input(DType::kF32, shape) : Output(DType::kF32, shape);
          };
          Both dw = gradient({n, k}), dbias = gradient({n}), front = gradient({k});
          const auto backward = [&](Stream& stream, const auto& side) {
            LinearBackward(stream, {.dy = side(dy),
                                    .x = side(x),
                                    .w = side(w),
                                    .dx = side(dx),
                                    .pre = side(pre),
                                    .dw = side(dw),
                                    .dbias = side(dbias),
                                    .pre_dbias = side(front),
                                    .recompute_x = recompute,
                                    .accumulate = accumulate});
          };
          backward(*stream_, [](Both& both) { return both.gpu(); });
          ASSERT_OK(stream_->Synchronize()) << what;
          backward(*cpu_stream_, [](Both& both) { return both.cpu(); });
          if (recompute) ExpectClose("x " + what, x);
          ExpectClose("dx " + what, dx, SumSlack(n));
          // 16-bit x and dx are rounded before they are used, dx twice where GELU's gradient is a
          // pass of its own; sums of few rows cancel.
          const double rounded = dtype == DType::kBF16 ? 8e-3 : dtype == DType::kF16 ? 1e-3 : 0;
          ExpectClose("dw " + what, dw, SumSlack(t) + rounded);
          ExpectClose("dbias " + what, dbias, SumSlack(t));
          ExpectClose("pre_dbias " + what, front, SumSlack(t) + rounded);
        }
      }
    }
  }
}

class PlannedLinearGpuTest : public GpuTest {
 protected:
  PlannedLinearGpuTest() { options_.plan_cache = ::testing::TempDir(); }
};

TEST_F(PlannedLinearGpuTest, Plans_OfAnotherProcess_GiveTheSameBits) {
  Both x = Input(DType::kBF16, {384, 512}), w = Input(DType::kBF16, {256, 512});
  Both y = Output(DType::kBF16, {384, 256}), z = Output(DType::kBF16, {384, 256});
  LinearForward(*stream_, {.x = x.gpu(), .w = w.gpu(), .y = y.gpu()});
  ASSERT_OK_AND_ASSIGN(auto device, MakeCudaDevice(0, options_));
  ASSERT_OK_AND_ASSIGN(auto stream, device->MakeStream());
  const std::vector<float> first = y.Download(*stream_);
  LinearForward(*stream, {.x = x.gpu(), .w = w.gpu(), .y = z.gpu()});
  EXPECT_EQ(z.Download(*stream), first);
}

TEST_F(CrossEntropyGpuTest, LossAndGradient_MaskedPaddedAndLongRows_MatchTheHost) {
  const std::vector<std::tuple<int64_t, int64_t, int64_t>> shapes = {
      {5, 1, 1}, {37, 101, 99}, {64, 1024, 1000}, {19, 50304, 50257}, {3, 131072, 131001}};
  for (DType dtype : FloatTypes()) {
    for (const auto& [t, v, vocab] : shapes) {
      for (bool write : {true, false}) {
        const std::string what =
            absl::StrCat(Name(dtype), " ", t, "x", v, write ? "" : " loss only");
        std::vector<int32_t> wanted(t);
        for (int64_t i = 0; i < t; ++i) {
          wanted[i] = i % 5 == 3 ? -1
                                 : std::uniform_int_distribution<int32_t>(
                                       0, static_cast<int32_t>(vocab) - 1)(random_);
        }
        Both targets = Integers(wanted), losses = Output(DType::kF32, {t});
        Both logits = Input(dtype, {t, v}, 3);
        const auto run = [&](Stream& stream, const Tensor& z, const Tensor& y, const Tensor& out) {
          CrossEntropy(stream, {.logits = z,
                                .targets = y,
                                .losses = out,
                                .vocab = vocab,
                                .scale = 1.0f / 37,
                                .write_gradient = write});
        };
        const std::vector<float> before = logits.values();
        run(*stream_, logits.gpu(), AsIntegers(targets.gpu()), losses.gpu());
        run(*cpu_stream_, logits.cpu(), AsIntegers(targets.cpu()), losses.cpu());
        ExpectClose("losses " + what, losses, 2e-6);
        if (write) {
          ExpectClose("gradient " + what, logits, 1e-5);
        } else {
          EXPECT_EQ(logits.Download(*stream_), before) << what;
        }
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

}  // namespace
}  // namespace muster::kernels
