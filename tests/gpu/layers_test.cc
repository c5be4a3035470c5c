#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <tuple>

#include "kernels/embedding/embedding.h"
#include "kernels/gemm/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/memory/memory.h"
#include "kernels/norm/norm.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using EmbeddingGpuTest = GpuTest;
using LayerNormGpuTest = GpuTest;
using LinearGpuTest = GpuTest;
using CrossEntropyGpuTest = GpuTest;

// Random tokens below `distinct`. One in four lies outside of a table that holds the lower half of
// the rows.
std::vector<int32_t> SomeTokens(std::mt19937& random, int64_t t, int64_t distinct, bool missing) {
  std::vector<int32_t> tokens(t);
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(random() % distinct);
    if (missing && random() % 4 == 0) token = -1;
  }
  return tokens;
}

TEST_F(EmbeddingGpuTest, GroupTokens_AnyCountsAndVocabularies_GiveWhatTheHostGives) {
  for (int64_t t : {1, 31, 1024, 1025, 65'536, 70'001}) {
    for (int64_t vocab : {1, 37, 511, 512, 50'257, 128'256, 262'144}) {
      for (int64_t distinct : {int64_t{1}, (vocab + 99) / 100, vocab}) {
        std::vector<int32_t> tokens = SomeTokens(random_, t, distinct, t % 2 == 1);
        if (t > 40) tokens[40] = static_cast<int32_t>(vocab), tokens[7] = -9;
        Both ids = Integers(tokens);
        std::vector<int32_t> host(2 * t), device(2 * t);
        Tensor on_host(host.data(), DType::kI32, {2, t});
        GroupTokens(*cpu_stream_, Tensor(tokens.data(), DType::kI32, {t}), vocab, on_host);
        ASSERT_OK(cpu_stream_->Synchronize());
        Both groups(*device_, DType::kI32, {2, t}, std::vector<float>(2 * t));
        groups.Poison();
        groups.Upload(*stream_);
        GroupTokens(*stream_, AsIntegers(ids.gpu()), vocab, groups.gpu());
        groups.Download(*stream_);  // checks the guard words around the tensor
        Copy(*stream_, groups.gpu(), Tensor(device.data(), DType::kI32, {2, t}));
        ASSERT_OK(stream_->Synchronize());
        ASSERT_EQ(device, host) << t << " tokens of " << vocab << ", " << distinct << " distinct";
      }
    }
  }
}

struct EmbeddingCase {
  int64_t batch, sequence, vocab, columns;
  int64_t distinct;
  bool missing = false;
};

class EmbeddingCaseGpuTest : public EmbeddingGpuTest {
 protected:
  void Check(DType dtype, const EmbeddingCase& test, std::vector<int32_t> ids) {
    SCOPED_TRACE(absl::StrCat(Name(dtype), " ", test.batch, "x", test.sequence, " of ", test.vocab,
                              ", ", test.distinct, " distinct, width ", test.columns));
    const int64_t t = test.batch * test.sequence, c = test.columns, vocab = test.vocab;
    Both tokens = Integers(ids);
    Both wte = Input(dtype, {vocab, c}), wpe = Input(dtype, {test.sequence, c});
    for (const bool positions : {true, false}) {
      Both out = Output(dtype, {t, c});
      EmbeddingForward(*stream_, AsIntegers(tokens.gpu()), wte.gpu(),
                       positions ? wpe.gpu() : Tensor(), test.sequence, out.gpu());
      EmbeddingForward(*cpu_stream_, AsIntegers(tokens.cpu()), wte.cpu(),
                       positions ? wpe.cpu() : Tensor(), test.sequence, out.cpu());
      ExpectClose("embedding", out);
    }
    std::vector<int32_t> host_groups(2 * t);
    const Tensor groups(host_groups.data(), DType::kI32, {2, t});
    GroupTokens(*cpu_stream_, Tensor(ids.data(), DType::kI32, {t}), vocab, groups);
    Both device_groups(*device_, DType::kI32, {2, t}, std::vector<float>(2 * t));
    GroupTokens(*stream_, AsIntegers(tokens.gpu()), vocab, device_groups.gpu());
    Both dout = Input(dtype, {t, c});
    Both d_wte = Input(DType::kF32, {vocab, c}), d_wpe = Input(DType::kF32, {test.sequence, c});
    Both wte_alone(*device_, DType::kF32, {vocab, c}, d_wte.values());
    Both wpe_alone(*device_, DType::kF32, {test.sequence, c}, d_wpe.values());
    wte_alone.Upload(*stream_);
    wpe_alone.Upload(*stream_);
    EmbeddingBackward(*stream_, device_groups.gpu(), dout.gpu(), test.sequence, d_wte.gpu(),
                      d_wpe.gpu());
    EmbeddingBackward(*stream_, device_groups.gpu(), dout.gpu(), test.sequence, wte_alone.gpu(),
                      Tensor());
    EmbeddingBackward(*stream_, Tensor(), dout.gpu(), test.sequence, Tensor(), wpe_alone.gpu());
    EmbeddingBackward(*cpu_stream_, groups, dout.cpu(), test.sequence, d_wte.cpu(), d_wpe.cpu());
    // The device adds long sums in another order than the host.
    ExpectClose("d_wte", d_wte, 2e-6 + 1e-7 * std::sqrt(static_cast<double>(t)));
    ExpectClose("d_wpe", d_wpe);
    EXPECT_EQ(d_wte.Download(*stream_), wte_alone.Download(*stream_));
    EXPECT_EQ(d_wpe.Download(*stream_), wpe_alone.Download(*stream_));
  }
};

TEST_F(EmbeddingCaseGpuTest, ForwardAndBackward_SkewedTokens_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : FloatTypes()) {
    for (int64_t c : {1, 33, 64, 768, 1600, 2104}) {
      // Few distinct tokens give runs that span many windows.
      for (int64_t distinct : {1, 3, 9, 101}) {
        const EmbeddingCase test{5, 67, 101, c, distinct, /*missing=*/distinct == 9};
        Check(dtype, test, SomeTokens(random_, test.batch * test.sequence, distinct, test.missing));
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(EmbeddingCaseGpuTest, ForwardAndBackward_AllEqualAllDifferentAndOneToken_MatchTheHost) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t c : {24, 100}) {
      const EmbeddingCase equal{8, 4099, 5, c, 1};
      Check(dtype, equal, std::vector<int32_t>(equal.batch * equal.sequence, 3));
      const EmbeddingCase different{2, 640, 1300, c, 1280};
      std::vector<int32_t> tokens(1280);
      for (int i = 0; i < 1280; ++i) tokens[i] = i * 7 % 1280;  // a permutation
      Check(dtype, different, tokens);
      Check(dtype, {1, 1, 9, c, 1}, {8});
      // Runs of every length around that of a window, beginning anywhere in one.
      const EmbeddingCase runs{1, 67 * 33, 70, c, 66};
      std::vector<int32_t> lengths;
      for (int32_t length = 1; length < 67; ++length) lengths.insert(lengths.end(), length, length);
      lengths.resize(67 * 33, 66);
      Check(dtype, runs, lengths);
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
  const std::vector<float> before = d_wte.values();
  Both groups(*device_, DType::kI32, {2, 4}, std::vector<float>(8));
  GroupTokens(*stream_, AsIntegers(tokens.gpu()), 8, groups.gpu());
  EmbeddingBackward(*stream_, groups.gpu(), dout.gpu(), 4, d_wte.gpu(), Tensor());
  const std::vector<float> gradient = d_wte.Download(*stream_);  // checks the guard words
  for (int64_t i = 0; i < 8 * 16; ++i) {
    const int64_t row = i / 16;
    const float added = row == 1   ? dout.values()[i - 16]
                        : row == 2 ? dout.values()[3 * 16 + i - 32]
                                   : 0.0f;
    EXPECT_EQ(gradient[i], before[i] + added);
  }
  ASSERT_OK(stream_->Synchronize());
}

TEST_F(LayerNormGpuTest, ForwardAndBackward_EveryWidth_MatchTheHostAndRepeatBitForBit) {
  for (DType dtype : FloatTypes()) {
    for (int64_t c :
         {1, 33, 64, 256, 512, 768, 1024, 1280, 1536, 1600, 2560, 4096, 5120, 8192, 8200, 16400}) {
      for (bool branch : {false, true}) {
        // Narrow tensors have so many rows that every team of threads in backward gets several.
        const int64_t t = c > 4000 ? 9 : c == 64 ? 20011 : c == 768 ? 5003 : 131;
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
        // Both sides run backward on the inputs that the device has rounded.
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
        Both sums = Input(DType::kF32, {c});  // of dx's columns
        bool with_sums = false;
        const auto backward = [&](Stream& stream, const auto& side, Both& into, Both& gradient) {
          LayerNormBackward(stream, {.dy = side(dy),
                                     .x = side(x),
                                     .gamma = side(gamma),
                                     .mean = side(m),
                                     .rstd = side(r),
                                     .dx = side(into),
                                     .dgamma = side(gradient),
                                     .dbeta = side(dbeta),
                                     .dx_sums = with_sums ? side(sums) : Tensor(),
                                     .accumulate = c != 256,
                                     .accumulate_dx_sums = c != 33});
        };
        Both dx_again(*device_, dtype, {t, c}, dx.values());
        dx_again.Upload(*stream_);
        backward(*cpu_stream_, cpu, dx, dgamma);
        backward(*stream_, gpu, dx, dgamma);
        ExpectClose("dx " + what, dx, 3e-6);
        // A few sums may cancel to almost nothing; not all of many do.
        const double sum_slack = c < 8 ? 1e-4 : 4e-6 + 1e-7 * std::sqrt(static_cast<double>(t));
        ExpectClose("dgamma " + what, dgamma, sum_slack);
        ExpectClose("dbeta " + what, dbeta, sum_slack);
        backward(*stream_, gpu, dx_again, again);
        EXPECT_EQ(dgamma.Download(*stream_), again.Download(*stream_)) << what;
        EXPECT_EQ(dx.Download(*stream_), dx_again.Download(*stream_)) << what;
        // Twice with the column sums of dx, which choose another kernel where they need memory.
        with_sums = true;
        std::vector<std::vector<float>> first;
        for (int turn = 0; turn < 2; ++turn) {
          for (Both* both : {&dx_again, &again, &sums}) both->Upload(*stream_);
          backward(*stream_, gpu, dx_again, again);
          const std::vector<float> written = dx_again.Download(*stream_);
          ExpectClose("dx with sums " + what, written, dx.values(), dtype, 3e-6);
          ExpectClose("dgamma with sums " + what, again.Download(*stream_), dgamma.values(),
                      DType::kF32, sum_slack);
          std::vector<double> totals(c);
          for (int64_t i = 0; i < c && c != 33; ++i) totals[i] = sums.values()[i];
          for (int64_t i = 0; i < t * c; ++i) totals[i % c] += written[i];
          ExpectClose("sums of dx " + what, sums.Download(*stream_),
                      std::vector<float>(totals.begin(), totals.end()), DType::kF32, sum_slack);
          const std::vector<std::vector<float>> all = {written, again.Download(*stream_),
                                                       sums.Download(*stream_)};
          if (turn == 0) first = all;
          EXPECT_EQ(first, all) << what;
        }
      }
    }
  }
  ASSERT_OK(stream_->Synchronize());
}

// Allows for fp32 sums over K in another order, and for GELU's fast exponential.
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
        if (gelu) continue;
        Both added = Input(dtype, {t, k});
        const auto add = [&](Stream& stream, const auto& side) {
          LinearBackward(stream,
                         {.dy = side(dy), .w = side(w), .dx = side(added), .accumulate_dx = true});
        };
        add(*stream_, gpu);
        ASSERT_OK(stream_->Synchronize()) << what;
        add(*cpu_stream_, cpu);
        ExpectClose("dx added to " + what, added, SumSlack(n));
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
          // A tensor that is overwritten starts as NaN.
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
          // 16-bit x and dx are rounded before use, dx twice where GELU's gradient is a pass of its
          // own. Sums of few rows may cancel.
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
  PlannedLinearGpuTest() {
    options_.plan_cache = absl::StrCat(::testing::TempDir(), "plans-", getpid());
    std::filesystem::remove_all(options_.plan_cache);
    std::filesystem::create_directories(options_.plan_cache);
  }
  ~PlannedLinearGpuTest() override { std::filesystem::remove_all(options_.plan_cache); }

  int LinesOfPlans() const {
    int lines = 0;
    for (const auto& file : std::filesystem::directory_iterator(options_.plan_cache)) {
      std::ifstream in(file.path());
      for (std::string line; std::getline(in, line);) ++lines;
    }
    return lines;
  }
};

// The second GEMM is long enough to be timed at the power limit.
TEST_F(PlannedLinearGpuTest, Plans_OfAnotherProcess_GiveTheSameBitsAndAreNotMeasuredAgain) {
  for (const int64_t n : {256, 2048}) {
    const int64_t t = 384 * n / 256, k = 2 * n;
    Both x = Input(DType::kBF16, {t, k}), w = Input(DType::kBF16, {n, k});
    Both y = Output(DType::kBF16, {t, n}), z = Output(DType::kBF16, {t, n});
    int measured = 0, by_first = 0;  // GEMM shapes that each process reports to have measured
    // The second process starts before there are plans.
    options_.on_measuring = [&measured] { ++measured; };
    ASSERT_OK_AND_ASSIGN(auto device, MakeCudaDevice(0, options_));
    ASSERT_OK_AND_ASSIGN(auto stream, device->MakeStream());
    options_.on_measuring = [&by_first] { ++by_first; };
    ASSERT_OK_AND_ASSIGN(auto first_device, MakeCudaDevice(0, options_));
    ASSERT_OK_AND_ASSIGN(auto first, first_device->MakeStream());
    LinearForward(*first, {.x = x.gpu(), .w = w.gpu(), .y = y.gpu()});
    ASSERT_OK(first->Synchronize());
    const int lines = LinesOfPlans();
    EXPECT_GT(lines, 0);
    EXPECT_GT(by_first, 0);
    LinearForward(*stream, {.x = x.gpu(), .w = w.gpu(), .y = z.gpu()});
    EXPECT_EQ(z.Download(*stream), y.Download(*stream));
    EXPECT_EQ(LinesOfPlans(), lines);
    EXPECT_EQ(measured, 0);
  }
}

TEST_F(CrossEntropyGpuTest, LossAndGradient_MaskedPaddedAndLongRows_MatchTheHost) {
  const std::vector<std::tuple<int64_t, int64_t, int64_t>> shapes = {
      {5, 1, 1},           {37, 101, 99},        {64, 1024, 1000},
      {19, 50304, 50257},  {11, 128256, 128256}, {7, 128256, 96100},
      {3, 131072, 131001}, {3, 151936, 151669}};
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
        Both again = Output(dtype, {t, v}), losses_again = Output(DType::kF32, {t});
        Copy(*stream_, logits.gpu(), again.gpu());
        run(*stream_, logits.gpu(), AsIntegers(targets.gpu()), losses.gpu());
        run(*stream_, again.gpu(), AsIntegers(targets.gpu()), losses_again.gpu());
        EXPECT_EQ(again.Download(*stream_), logits.Download(*stream_)) << what;
        EXPECT_EQ(losses_again.Download(*stream_), losses.Download(*stream_)) << what;
        run(*cpu_stream_, logits.cpu(), AsIntegers(targets.cpu()), losses.cpu());
        if (vocab > 1) {
          ExpectClose("losses " + what, losses, 2e-6);
        } else {  // the reference is 0, so the error is absolute
          EXPECT_THAT(losses.Download(*stream_), ::testing::Each(::testing::FloatNear(0, 1e-6f)));
        }
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
