// Compressed gradients. Sending all elements gives the bits of a dense run; no part of a gradient
// is lost; and residuals survive checkpoints and other numbers of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "parallel/comm/collective_plan.h"
#include "parallel/optim/gradient_compressor.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"
#include "tests/parity/harness.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

using ::testing::HasSubstr;

constexpr double kDensity = 0.05;

CompressionOptions TopK(double density) {
  CompressionOptions options;
  options.method = CompressionMethod::kTopK;
  options.density = density;
  options.min_elements = 0;
  return options;
}

CompressionOptions Sign() {
  CompressionOptions options = TopK(1);
  options.method = CompressionMethod::kSign;
  return options;
}

// Twelve steps of a small GPT-2.
Case TrainingOf(const PerAxis& degrees, const CompressionOptions& compression = {}, int zero = 0) {
  Case run;
  run.model = SmallGpt2();
  run.layout.degrees = degrees;
  run.layout.global_batch = 8;
  run.layout.micro_batch = 2;
  run.layout.zero = zero;
  run.steps = 12;
  run.model.sizes["hidden"] = 28;
  run.learning_rate = 5e-3;
  run.adjust = [compression](TrainerOptions& options) { options.compression = compression; };
  return run;
}

Case TrainingOf(int data, const CompressionOptions& compression = {}, int zero = 0) {
  return TrainingOf(PerAxis(1, data, 1, 1), compression, zero);
}

void ExpectSameBits(const std::vector<RankResult>& a, const std::vector<RankResult>& b) {
  EXPECT_EQ(a[0].losses, b[0].losses);
  EXPECT_EQ(a[0].norms, b[0].norms);
}

TEST(Compression, SendingEverything_HasTheBitsOfDense) {
  Harness harness;
  for (const int data : {1, 2, 4}) {
    const auto dense = harness.Train(TrainingOf(data));
    for (const int zero : {0, 1}) {
      CompressionOptions all = TopK(1);
      ExpectSameBits(dense, harness.Train(TrainingOf(data, all, zero)));
      all.dense_above = 1;  // sends pairs of index and value
      ExpectSameBits(dense, harness.Train(TrainingOf(data, all, zero)));
    }
  }
}

TEST(Compression, OneStep_IsTheSameInEveryEncodingAndLayout) {
  Harness harness;
  const auto expected = harness.Train(TrainingOf(4, TopK(kDensity)));
  EXPECT_LT(expected[0].losses.back(), expected[0].losses.front());
  CompressionOptions dense_form = TopK(kDensity);
  dense_form.dense_above = 1e-9;
  ExpectSameBits(expected, harness.Train(TrainingOf(4, dense_form)));
  ExpectSameBits(expected, harness.Train(TrainingOf(4, TopK(kDensity), /*zero=*/1)));
  Case sharded = TrainingOf(4, TopK(kDensity), /*zero=*/1);
  sharded.layout.zero_shards = 2;
  ExpectSameBits(expected, harness.Train(sharded));
  Case apart = TrainingOf(4, TopK(kDensity));
  apart.overlap = false;
  ExpectSameBits(expected, harness.Train(apart));
  // Elements are selected parameter by parameter, so the layout does not matter.
  Case one_bucket = TrainingOf(4, TopK(kDensity));
  one_bucket.bucket_bytes = 1 << 30;
  ExpectSameBits(expected, harness.Train(one_bucket));
}

TEST(Compression, PipelineStages_HaveTheBitsOfOne) {
  Harness harness;
  Case one = TrainingOf(2, TopK(kDensity)), two = TrainingOf(PerAxis(2, 2, 1, 1), TopK(kDensity));
  // Not GPT-2, whose tied table is summed in another order across stages.
  one.model = two.model = SmallLlama();
  ExpectSameBits(harness.Train(one), harness.Train(two));
}

TEST(Compression, TensorParallelRanks_Agree) {
  Harness harness;
  Case run = TrainingOf(PerAxis(1, 2, 1, 2), TopK(kDensity));
  run.model = SmallLlama();
  run.layout.sequence_parallel = true;
  const auto results = harness.Train(run);  // which compares the ranks
  EXPECT_LT(results[0].losses.back(), results[0].losses.front());
}

// One rank has 576 elements of attention's output weight and the other 1728. Both compress it, and
// the checkpoint has the residuals of both.
TEST(Compression, UnevenTensorRanks_CompressTheSameParameters) {
  Harness harness;
  CompressionOptions compression = TopK(kDensity);
  compression.min_elements = 1000;
  Case run = TrainingOf(PerAxis(1, 2, 1, 2), compression);
  run.model = SmallLlama();
  run.tensor_weights = {1, 3};
  run.save_every = run.steps;
  const Tensors residuals = harness.Read(harness.Train(run), kResidualPrefix);
  ASSERT_EQ(residuals.count("blocks.0.attention.output.weight"), 1u);
  EXPECT_EQ(residuals.at("blocks.0.attention.output.weight").size(), 2u * 48 * 48);
}

// Mamba-2, and hybrids of it with attention and MLPs of either kind.
std::vector<ModelDescription> ModelsThatScan() {
  return {SmallMamba2(), SmallHybrid(3, /*llama=*/false), SmallHybrid(3, /*llama=*/true)};
}

Case TrainingOf(const ModelDescription& model, const PerAxis& degrees,
                const CompressionOptions& compression = {}, int zero = 0) {
  Case run = TrainingOf(degrees, compression, zero);
  run.model = model;
  return run;
}

TEST(Compression, Mamba2AndHybrids_HaveTheBitsOfDenseAndOfEveryLayout) {
  Harness harness;
  const PerAxis two(1, 2, 1, 1);
  for (const ModelDescription& model : ModelsThatScan()) {
    SCOPED_TRACE(TrainingOf(model, two).ToString());
    CompressionOptions all = TopK(1);
    all.dense_above = 1;
    const auto dense = harness.Train(TrainingOf(model, two));
    ExpectSameBits(dense, harness.Train(TrainingOf(model, two, all)));
    for (const CompressionOptions& compression : {TopK(kDensity), Sign()}) {
      const auto expected = harness.Train(TrainingOf(model, two, compression));
      EXPECT_NE(expected[0].losses, dense[0].losses);
      EXPECT_LT(expected[0].losses.back(), expected[0].losses.front());
      Case sharded = TrainingOf(model, two, compression, /*zero=*/1);
      sharded.bucket_bytes = 1 << 30;
      ExpectSameBits(expected, harness.Train(sharded));
      Case uneven = TrainingOf(model, PerAxis(1, 2, 1, 2), compression);
      uneven.layout.sequence_parallel = true;
      uneven.tensor_weights = {1, 2};
      const auto tensor = harness.Train(uneven);  // which compares the ranks
      EXPECT_LT(tensor[0].losses.back(), tensor[0].losses.front());
      // The gradient group has the context ranks too.
      const auto context = harness.Train(TrainingOf(model, PerAxis(1, 1, 2, 1), compression));
      EXPECT_LT(context[0].losses.back(), context[0].losses.front());
    }
  }
}

TEST(Compression, Resumed_HasTheBitsOfAnUnbrokenRun) {
  Harness harness;
  CompressionOptions momentum = TopK(kDensity);
  momentum.momentum = 0.5;
  momentum.warmup_steps = 8;
  std::vector<Case> cases;
  for (const CompressionOptions& compression : {TopK(kDensity), momentum, Sign()}) {
    cases.push_back(TrainingOf(2, compression));
    cases.push_back(TrainingOf(SmallHybrid(), PerAxis(1, 2, 1, 1), compression));
  }
  for (const Case& unbroken : cases) {
    const auto whole = harness.Train(unbroken);
    Case first = unbroken, second = unbroken;
    first.stop_after = first.save_every = 5;
    second.restore = harness.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const auto resumed = harness.Train(second);
    ASSERT_EQ(resumed[0].losses.size(), 7u);
    const auto& losses = whole[0].losses;
    EXPECT_EQ(resumed[0].losses, std::vector<double>(losses.begin() + 5, losses.end()));
  }
}

// One more step. With beta1 0 and no clipping AdamW's first moment is the gradient of that step.
Case OneMoreStep(int data, const CompressionOptions& compression,
                 const std::vector<RankResult>& from) {
  Case run = TrainingOf(data, compression);
  run.adjust = [compression](TrainerOptions& options) {
    options.compression = compression;
    options.optimizer.beta1 = 0;
    options.optimizer.clip_norm = 0;
  };
  run.save_every = 1;
  run.steps = 1;
  if (!from.empty()) {
    run.restore = {from[0].saved[0]};
    run.steps = from[0].saved[0].id.step + 1;
  }
  return run;
}

// Sums the ranks' values (with `sizes`, their absolute values) in rank order.
Tensors Sum(const Tensors& per_rank, int ranks, bool sizes = false) {
  Tensors sums;
  for (const auto& [name, values] : per_rank) {
    std::vector<float>& sum = sums[name];
    sum.assign(values.size() / ranks, 0);
    for (size_t i = 0; i < values.size(); ++i) {
      sum[i % sum.size()] += sizes ? std::abs(values[i]) : values[i];
    }
  }
  return sums;
}

TEST(Compression, SentAndResidual_AreTheGradientAndSurviveOtherNumbersOfRanks) {
  Harness harness;
  const CompressionOptions compression = TopK(kDensity);
  std::vector<RankResult> before;
  Tensors left_before;
  for (const int data : {2, 1, 2}) {
    SCOPED_TRACE(absl::StrCat(data, " ranks after ", before.size()));
    const auto dense = harness.Train(OneMoreStep(data, {}, before));
    const auto compressed = harness.Train(OneMoreStep(data, compression, before));
    const Tensors gradients = harness.Read(dense, kFirstMomentPrefix);
    const Tensors sent = harness.Read(compressed, kFirstMomentPrefix);
    const Tensors residuals = harness.Read(compressed, kResidualPrefix);
    const Tensors left = Sum(residuals, data), sizes = Sum(residuals, data, /*sizes=*/true);
    ASSERT_FALSE(left.empty());
    for (const auto& [name, residual] : left) {
      const std::vector<float>& gradient = gradients.at(name);
      ASSERT_EQ(residual.size(), gradient.size());
      int64_t held_back = 0;
      for (size_t i = 0; i < residual.size(); ++i) {
        const float earlier = left_before.empty() ? 0.0f : left_before.at(name)[i];
        const float total = earlier + gradient[i], found = sent.at(name)[i] + residual[i];
        if (data == 1) {
          ASSERT_EQ(found, total) << name << " " << i;
        } else {
          // The ranks add in another order, and their values may cancel each other.
          const double size = std::abs(earlier) + std::abs(gradient[i]) + sizes.at(name)[i];
          ASSERT_NEAR(found, total, 1e-6 * size + 1e-12) << name << " " << i;
        }
        held_back += residual[i] != 0 ? 1 : 0;
      }
      EXPECT_GT(held_back, static_cast<int64_t>(residual.size()) / 2) << name;
    }
    before = compressed;
    left_before = left;
  }
}

// Four tensor ranks share two key/value heads, and the resumed run does not compress qkv: its
// residual is added to the gradient of the next step, with and without an offloaded optimizer.
TEST(Compression, ResidualOfAParameterThatIsNowSentWhole_JoinsTheNextGradient) {
  Harness harness;
  const CompressionOptions compression = TopK(kDensity);
  const auto one_more = [&](const PerAxis& degrees, const CompressionOptions& with,
                            const std::vector<RankResult>& from, double offload = 0) {
    Case run = OneMoreStep(1, with, from);
    run.model = SmallLlama();
    run.model.sizes["kv_heads"] = 2;
    run.layout.degrees = degrees;
    run.layout.zero = offload > 0 ? 1 : 0;
    run.offload_optimizer = offload;
    return harness.Train(run);
  };
  const auto before = one_more(PerAxis(1, 2, 1, 1), compression, {});
  const Tensors left = Sum(harness.Read(before, kResidualPrefix), 2);
  for (const double offload : {0.0, 1.0}) {
    const PerAxis degrees(1, 2, 1, 4);
    const Tensors gradients =
        harness.Read(one_more(degrees, {}, before, offload), kFirstMomentPrefix);
    const auto after = one_more(degrees, compression, before, offload);
    const Tensors sent = harness.Read(after, kFirstMomentPrefix);
    const Tensors left_now = Sum(harness.Read(after, kResidualPrefix), 2);
    int whole = 0, held_back = 0;
    for (const auto& [name, earlier] : left) {
      const auto residual = left_now.find(name);
      whole += residual == left_now.end();
      for (size_t i = 0; i < earlier.size(); ++i) {
        const float found =
            sent.at(name)[i] + (residual == left_now.end() ? 0 : residual->second[i]);
        const float total = earlier[i] + gradients.at(name)[i];
        ASSERT_NEAR(found, total, 1e-5 * (std::abs(earlier[i]) + std::abs(total)) + 1e-8)
            << name << " " << i;
        held_back += residual == left_now.end() && earlier[i] != 0;
      }
    }
    EXPECT_EQ(whole, 3);  // qkv of three blocks
    EXPECT_GT(held_back, 1000);
  }
}

// Deep Gradient Compression (arXiv 1712.01887), section 3.1: u = m u + g is added to the residual
// v; where v is sent, both start again from zero.
TEST(Compression, MomentumCorrection_AddsRunningSumsOfGradientsUntilTheyAreSent) {
  Harness harness;
  CompressionOptions compression = TopK(kDensity);
  compression.momentum = 0.5;
  const auto first = harness.Train(OneMoreStep(1, compression, {}));
  const Tensors left = harness.Read(first, kResidualPrefix);
  const Tensors sums = harness.Read(first, kResidualMomentumPrefix);
  // After one step the momentum is the residual.
  EXPECT_EQ(sums, left);
  const Tensors gradients =
      harness.Read(harness.Train(OneMoreStep(1, {}, first)), kFirstMomentPrefix);
  const auto second = harness.Train(OneMoreStep(1, compression, first));
  const Tensors sent = harness.Read(second, kFirstMomentPrefix);
  const Tensors left_now = harness.Read(second, kResidualPrefix);
  const Tensors sums_now = harness.Read(second, kResidualMomentumPrefix);
  ASSERT_FALSE(left_now.empty());
  int64_t held_back = 0;
  for (const auto& [name, residual] : left_now) {
    for (size_t i = 0; i < residual.size(); ++i) {
      const float u = 0.5f * sums.at(name)[i] + gradients.at(name)[i];
      const float v = left.at(name)[i] + u;
      const float tolerance = 1e-6f * (std::abs(left.at(name)[i]) + std::abs(u)) + 1e-12f;
      ASSERT_NEAR(sent.at(name)[i] + residual[i], v, tolerance) << name << " " << i;
      const bool stays = residual[i] != 0;
      ASSERT_NEAR(sums_now.at(name)[i], stays ? u : 0, tolerance) << name << " " << i;
      held_back += stays ? 1 : 0;
    }
  }
  EXPECT_GT(held_back, 0);
}

TEST(Compression, ExcludedAndSmallParameters_TravelWhole) {
  Harness harness;
  CompressionOptions compression = TopK(kDensity);
  const auto names = [&]() {
    std::vector<std::string> kept;
    const auto run = harness.Train(OneMoreStep(2, compression, {}));
    for (const auto& [name, residual] : harness.Read(run, kResidualPrefix)) kept.push_back(name);
    return kept;
  };
  const auto has = [](const std::vector<std::string>& all, const std::string& text) {
    return std::any_of(all.begin(), all.end(), [&](const std::string& name) {
      return name.find(text) != std::string::npos;
    });
  };
  compression.exclude = {};
  const std::vector<std::string> all = names();
  EXPECT_TRUE(has(all, "embedding.token"));
  EXPECT_FALSE(has(all, "bias"));
  EXPECT_FALSE(has(all, "norm"));
  compression.exclude = {"embedding.*"};
  const std::vector<std::string> some = names();
  EXPECT_FALSE(has(some, "embedding."));
  EXPECT_FALSE(some.empty());
  compression.min_elements = 1 << 20;
  compression.exclude = {};
  const auto none = harness.Train(OneMoreStep(2, compression, {}));
  EXPECT_TRUE(harness.Read(none, kResidualPrefix).empty());
}

// Of a mixer's parameters the projections and the filters are compressed, the latter in buckets of
// parameters that stay in fp32; what has a number for each head travels whole.
TEST(Compression, Mamba2_KeepsResidualsOfMatricesAndFilters) {
  Harness harness;
  Case run = OneMoreStep(2, TopK(kDensity), {});
  run.model = SmallMamba2();
  const Tensors left = harness.Read(harness.Train(run), kResidualPrefix);
  for (const char* name : {"mamba.in_proj.weight", "mamba.conv.weight", "mamba.out_proj.weight"}) {
    EXPECT_EQ(left.count(absl::StrCat("blocks.0.", name)), 1u) << name;
  }
  for (const auto& [name, values] : left) {
    EXPECT_THAT(name,
                ::testing::Not(::testing::ContainsRegex("a_log|dt_bias|norm|mamba\\.d$|bias")));
  }
  const auto model = *MakeModel(run.model, {});
  const FlatLayout layout(
      model->parameters(),
      {.bucket_bytes = run.bucket_bytes, .replicas = 2, .compressed = [](const Parameter& p) {
         return Compresses(TopK(kDensity), p);
       }});
  EXPECT_TRUE(std::any_of(layout.buckets().begin(), layout.buckets().end(), [](const auto& bucket) {
    return bucket.compressed && bucket.full_precision;
  }));
}

TEST(Compression, BytesDensityAndResidual_AreReported) {
  Harness harness;
  constexpr int kRanks = 4;
  CompressionOptions compression = TopK(kDensity);
  compression.warmup_steps = 4;
  const Case run = TrainingOf(kRanks, compression);
  const auto results = harness.Train(run);
  const auto model = *MakeModel(run.model, {});
  const FlatLayout layout(
      model->parameters(),
      {.bucket_bytes = run.bucket_bytes, .replicas = kRanks, .compressed = [&](const Parameter& p) {
         return Compresses(compression, p);
       }});
  int64_t expected = 0, sent = 0, elements = 0;
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    if (!bucket.compressed) {
      expected += AllReduceBytes(bucket.range.size(), 4, kRanks, 0);
      continue;
    }
    for (const ParameterId id : bucket.parameters) {
      const int64_t all = model->parameters().at(id).elements();
      const auto k = static_cast<int64_t>(std::ceil(kDensity * static_cast<double>(all)));
      expected += 8 * k * (kRanks - 1);
      sent += k;
      elements += all;
    }
  }
  const StepReport& last = results[0].reports.back();
  EXPECT_EQ(last.gradient_bytes, expected);
  EXPECT_DOUBLE_EQ(last.gradient_density,
                   static_cast<double>(sent) / static_cast<double>(elements));
  EXPECT_GT(last.residual_norm, 0);
  double density = 1;
  for (const StepReport& report : results[0].reports) {
    EXPECT_LE(report.gradient_density, density);
    density = report.gradient_density;
  }
  EXPECT_GT(results[0].reports[0].gradient_density, 0.4);
}

// The window of the second moment must be much longer than 1 / density, clipping must be off, and
// momentum is the compressor's instead of AdamW's: see engine.training.gradient_compression in
// docs/job-spec.md. The dense run to compare with is the better one of those with and without
// AdamW's momentum.
TEST(Compression, OnePercent_ComesWithinOnePercentOfDenseOnTheDemosText) {
  if (muster::testing::kSanitized)
    GTEST_SKIP() << "is about losses after 800 steps, which take minutes";
  // The demo's text: the King James Bible, which ./dev setup installs.
  const std::string path = absl::StrCat(::testing::TempDir(), "/muster-bible-", getpid());
  ASSERT_EQ(std::system(("bible -f gen1:1-rev22:21 > " + path).c_str()), 0) << "see ./dev setup";
  Harness harness({path});
  ASSERT_EQ(std::remove(path.c_str()), 0);
  static constexpr int64_t kSteps = 800;
  const auto train = [&](double beta1, const CompressionOptions& compression) {
    Case run = TrainingOf(4, compression);
    run.steps = kSteps;
    run.adjust = [=](TrainerOptions& options) {
      options.compression = compression;
      options.schedule = {Decay::kCosine, 3e-4, 3e-5, 20, kSteps};
      options.optimizer.beta1 = beta1;
      options.optimizer.beta2 = 0.999;
      options.optimizer.clip_norm = 0;
    };
    const std::vector<double> losses = harness.Train(run)[0].losses;
    double mean = 0;
    for (size_t i = losses.size() - 50; i < losses.size(); ++i) mean += losses[i] / 50;
    return mean;
  };
  const double dense = std::min(train(0.9, {}), train(0, {}));
  CompressionOptions compression = TopK(0.01);
  compression.warmup_steps = kSteps / 2;
  compression.min_elements = 256;
  compression.exclude = {"embedding.*"};
  compression.momentum = 0.5;
  const double sparse = train(0, compression);
  EXPECT_LT(dense, 3.6) << "nothing was learned";
  EXPECT_LT(sparse, 1.01 * dense);
  EXPECT_NE(sparse, dense);
}

TEST(Compression, OneBitPerElement_Learns) {
  Harness harness;
  for (const int zero : {0, 1}) {
    Case run = TrainingOf(4, Sign(), zero);
    run.steps = 100;
    const std::vector<double> losses = harness.Train(run)[0].losses;
    EXPECT_LT(losses.back(), 0.75 * losses.front());
  }
}

TEST(Compression, OneBitPerElement_HasTheSameBitsWithZeroOne) {
  Harness harness;
  ExpectSameBits(harness.Train(TrainingOf(4, Sign())),
                 harness.Train(TrainingOf(4, Sign(), /*zero=*/1)));
}

TEST(Compression, OptionsThatExcludeIt_AreAConfigurationError) {
  Harness harness;
  const auto message = [&](int zero, const std::function<void(TrainerOptions&)>& adjust) {
    Case run = TrainingOf(2, {}, zero);
    run.adjust = [&](TrainerOptions& options) {
      options.compression = TopK(kDensity);
      adjust(options);
    };
    run.may_fail = true;
    const absl::Status status = harness.Train(run)[0].status;
    EXPECT_EQ(DomainOf(status), FailureDomain::kConfiguration) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message(2, [](TrainerOptions&) {}), HasSubstr("use zero 0 or 1"));
  EXPECT_THAT(message(0, [](TrainerOptions& o) { o.gradient_wire = kernels::DType::kBF16; }),
              HasSubstr("not 16-bit gradients"));
  EXPECT_THAT(message(0, [](TrainerOptions& o) { o.compression.density = 1.5; }),
              HasSubstr("density 1.5 must be above 0"));
}

// A link on which reducing a bucket takes long, either whole or compressed. Groups that are split
// from it are as slow.
class SlowLink : public muster::testing::ForwardingCommunicator {
 public:
  enum class Slow { kDense, kCompressed };
  SlowLink(std::unique_ptr<Communicator> inner, Slow slow)
      : ForwardingCommunicator(std::move(inner)), slow_(slow) {}
  void AllReduce(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) override {
    Delay(Slow::kDense, data);
    inner_->AllReduce(stream, data, op);
  }
  void ReduceScatter(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) override {
    Delay(Slow::kDense, data);
    inner_->ReduceScatter(stream, data, op);
  }
  void AllGather(kernels::Stream& stream, kernels::Tensor data) override {
    Delay(Slow::kCompressed, data);
    inner_->AllGather(stream, data);
  }
  void AllToAll(kernels::Stream& stream, kernels::Tensor in, kernels::Tensor out) override {
    Delay(Slow::kCompressed, in);
    inner_->AllToAll(stream, in, out);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override {
    auto child = inner_->Split(color, key, name);
    if (!child.ok()) return child.status();
    return std::make_unique<SlowLink>(*std::move(child), slow_);
  }

 private:
  // The other collectives of a step are smaller.
  void Delay(Slow kind, const kernels::Tensor& data) const {
    if (kind != slow_ || data.elements() < 200) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }
  const Slow slow_;
};

TEST(Compression, CompressionThatTakesLongerThanDense_IsAWarningOfTheFirstRank) {
  Harness harness;
  for (const SlowLink::Slow slow : {SlowLink::Slow::kDense, SlowLink::Slow::kCompressed}) {
    for (const int zero : {0, 1}) {
      Case run = TrainingOf(2, TopK(kDensity), zero);
      run.steps = 1;
      run.wrap = [slow](std::unique_ptr<Communicator> world) {
        return std::make_unique<SlowLink>(std::move(world), slow);
      };
      SCOPED_TRACE(run.ToString());
      const auto results = harness.Train(run);
      EXPECT_TRUE(results[1].warnings.empty());
      if (slow == SlowLink::Slow::kDense) {
        EXPECT_TRUE(results[0].warnings.empty()) << results[0].warnings[0];
        continue;
      }
      ASSERT_EQ(results[0].warnings.size(), 1u);
      EXPECT_THAT(std::string(results[0].warnings[0].message()),
                  ::testing::AllOf(HasSubstr("gradient compression slows this job down"),
                                   HasSubstr("among 2 ranks"), HasSubstr("slower links")));
    }
  }
  // One rank sends nothing and measures nothing.
  EXPECT_TRUE(harness.Train(TrainingOf(1, TopK(kDensity)))[0].warnings.empty());
}

}  // namespace
}  // namespace muster::parallel::parity
