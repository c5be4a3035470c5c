// Every way to share out the data-parallel state trains like one rank, costs what the formulas say,
// and resumes what any other has saved.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "base/rng.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_reducer.h"
#include "tests/parity/harness.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

// Of runs whose sums are made in another order. Later on, a token and its position may nearly
// cancel in these small models: the first norm then amplifies rounding by 10^5, and for one step
// gradients are 10^-3 apart while losses are still equal to 10^-8.
constexpr int64_t kUnequalSteps = 12;

Case Data(int ranks, int zero = 0, int shards = 0) {
  Case run;
  run.model = SmallGpt2();
  run.layout.degrees = PerAxis(1, ranks, 1, 1);
  run.layout.zero = zero;
  run.layout.zero_shards = shards;
  run.layout.global_batch = 16;
  run.layout.micro_batch = 2;
  run.steps = 20;
  return run;
}

class Layouts : public ::testing::Test {
 protected:
  void ExpectSameBits(const Case& a, const Case& b) {
    SCOPED_TRACE(b.ToString());
    const RankResult one = harness_.Train(a)[0], other = harness_.Train(b)[0];
    EXPECT_EQ(one.losses, other.losses);
    EXPECT_EQ(one.norms, other.norms);
  }
  Harness harness_;
};

TEST_F(Layouts, EveryStageOfZero_HasTheGradientsAndWeightsOfOneRankToTheLastBit) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama()}) {
    Case alone = Data(1);
    alone.model = model;
    const Tensors gradients = harness_.FirstGradients(alone);
    const Tensors weights = harness_.Weights(alone);
    EXPECT_GT(gradients.size(), 20u);
    for (Case run : {Data(4), Data(4, 1), Data(4, 2), Data(4, 3), Data(8, 3, 2)}) {
      SCOPED_TRACE(run.ToString());
      run.model = model;
      EXPECT_EQ(harness_.FirstGradients(run), gradients);
      EXPECT_EQ(harness_.Weights(run), weights);
    }
  }
}

// Drawn from all that can be combined. MUSTER_PARITY_LAYOUTS sets how many: ./dev test --full runs
// 200 of 50 steps.
TEST_F(Layouts, RandomLayouts_TrainLikeOneRankToTheLastBit) {
  const char* wanted = std::getenv("MUSTER_PARITY_LAYOUTS");
  const int layouts = wanted == nullptr ? 8 : std::atoi(wanted);
  Rng rng(testing::TestSeed());
  const auto pick = [&](std::vector<int> choices) { return choices[rng.Below(choices.size())]; };
  for (int i = 0; i < layouts; ++i) {
    Case run = Data(pick({1, 2, 4, 8}));
    if (rng.Chance(0.5)) run.model = SmallLlama();
    const int ranks = run.layout.degrees[Axis::kData];
    run.layout.zero = pick({0, 1, 2, 3});
    if (run.layout.zero > 0) run.layout.zero_shards = 1 << rng.Below(std::log2(ranks) + 1);
    run.layout.micro_batch = pick({1, 2});
    run.overlap = rng.Chance(0.7);
    run.reshard_after_forward = rng.Chance(0.5);
    run.bucket_bytes = pick({1024, 8192, 1 << 20});
    run.resident_elements = pick({0, 100, 2000});
    run.seed = rng.Next() % 1000;
    if (wanted != nullptr) run.steps = 50;
    ASSERT_OK(Validate(run.layout, {.layers = 3}, {.ranks = ranks}));
    Case alone = Data(1);
    alone.model = run.model;
    alone.layout.micro_batch = run.layout.micro_batch;
    alone.seed = run.seed;
    alone.steps = run.steps;
    ExpectSameBits(alone, run);
  }
}

TEST_F(Layouts, OddNumbersOfRanks_AgreeWithOne) {
  Case alone = Data(1);
  alone.layout.global_batch = 24;
  alone.steps = kUnequalSteps;
  const RankResult expected = harness_.Train(alone)[0];
  for (Case run : {Data(3, 1), Data(3, 2), Data(6, 3, 3), Data(6, 3, 2)}) {
    SCOPED_TRACE(run.ToString());
    run.layout.global_batch = 24;
    run.steps = kUnequalSteps;
    const RankResult result = harness_.Train(run)[0];
    ASSERT_EQ(result.losses.size(), expected.losses.size());
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      EXPECT_NEAR(result.losses[i] / expected.losses[i], 1, 1e-5);
      EXPECT_NEAR(result.norms[i] / expected.norms[i], 1, 1e-5);
    }
  }
}

TEST_F(Layouts, WhatOneLayoutSaves_AnyOtherResumes) {
  const RankResult whole = harness_.Train(Data(1))[0];
  for (const auto& [saving, resuming] :
       std::vector<std::pair<Case, Case>>{{Data(4, 3), Data(1)},
                                          {Data(1), Data(4, 3)},
                                          {Data(4, 1), Data(2, 2)},
                                          {Data(4, 3, 2), Data(4, 3, 2)},
                                          {Data(2, 2), Data(8, 1, 4)}}) {
    SCOPED_TRACE(saving.ToString() + " -> " + resuming.ToString());
    Case first = saving, second = resuming;
    first.save_every = 100;
    first.stop_after = 8;
    second.restore = harness_.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const RankResult rest = harness_.Train(second)[0];
    // Same bits, as all of these train alike.
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 8, whole.losses.end()));
    EXPECT_EQ(rest.norms, std::vector<double>(whole.norms.begin() + 8, whole.norms.end()));
  }
}

// Elements of flat storage with all padding: in all, and of the blocks that ZeRO-3 shards.
struct Elements {
  int64_t all = 0, blocks = 0, largest = 0;
  int64_t units = 0;
};
Elements Count(const Case& run) {
  const auto model = *MakeModel(run.model);
  const int shards = run.layout.EffectiveShards();
  const FlatLayout layout(model->parameters(),
                          {.bucket_bytes = run.bucket_bytes,
                           .shards = shards,
                           .replicas = run.layout.degrees[Axis::kData] / shards,
                           .by_block = run.layout.zero >= 2,
                           .resident_elements = run.resident_elements});
  Elements elements;
  elements.all = layout.elements();
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    if (bucket.block < 0) continue;
    ++elements.units;
    elements.blocks += bucket.range.size();
    elements.largest = std::max(elements.largest, bucket.range.size());
  }
  return elements;
}

TEST_F(Layouts, BytesSent_AreThoseOfTheMethod) {
  for (Case run : {Data(4), Data(4, 1), Data(4, 2), Data(4, 3), Data(8, 1, 4), Data(8, 3, 4)}) {
    for (const bool reshard : {true, false}) {
      run.reshard_after_forward = reshard;
      SCOPED_TRACE(run.ToString());
      run.steps = 3;
      const Elements elements = Count(run);
      const int ranks = run.layout.degrees[Axis::kData];
      const int shards = run.layout.EffectiveShards(), replicas = ranks / shards;
      const int64_t n = run.layout.global_batch / run.layout.micro_batch / ranks;
      // What a ring, or an exchange of equal parts, sends of so many fp32.
      const auto moved = [](int64_t count, int size) { return 4 * count * (size - 1) / size; };
      // Reduce-scatter: once a step, or for every micro-batch.
      const int64_t reductions = run.layout.zero >= 2 ? 3 * n : 3;
      // All-gather: what stays whole after every update and at the start; blocks on demand.
      const int64_t kept = reshard ? std::min<int64_t>(2, elements.units) : elements.units;
      const int64_t block = run.layout.zero == 3 ? elements.blocks : 0;
      ASSERT_TRUE(block == 0 || block == elements.units * elements.largest);
      const int64_t blocks = elements.units + (2 * n - 1) * (elements.units - kept);
      for (const RankResult& result : harness_.Train(run)) {
        EXPECT_EQ(result.reduced_bytes, reductions * moved(elements.all, shards));
        EXPECT_EQ(result.gathered_bytes,
                  4 * moved(elements.all - block, shards) +
                      (block > 0 ? 3 * blocks * moved(elements.largest, shards) : 0));
        // An all-reduce is a reduce-scatter and an all-gather; uneven parts differ by a few lines.
        EXPECT_NEAR(result.replica_bytes, 3 * 2 * moved(elements.all / shards, replicas),
                    0.1 * result.replica_bytes);
      }
    }
  }
}

TEST_F(Layouts, StateOfARank_IsThatOfTheFormulas) {
  const auto state = [this](Case run) {
    run.steps = 1;
    return harness_.Train(run)[0].state_bytes;
  };
  for (const int ranks : {2, 4, 8}) {
    Case run = Data(ranks);
    run.layout.micro_batch = 16 / ranks;  // no accumulation
    const auto stage = [&](int zero) {
      run.layout.zero = zero;
      return Count(run);
    };
    // fp32 parameters and gradients whole, moments of the own part.
    Elements e = stage(0);
    EXPECT_EQ(state(run), 16 * e.all);
    e = stage(1);
    EXPECT_EQ(state(run), 8 * e.all + 8 * e.all / ranks);
    // Gradients of the own part; of blocks whole only in two rotating buffers.
    e = stage(2);
    EXPECT_EQ(state(run), 4 * e.all + 12 * e.all / ranks + 4 * (e.all - e.blocks) + 8 * e.largest);
    // Parameters likewise.
    e = stage(3);
    EXPECT_EQ(state(run),
              12 * e.all / ranks + 4 * e.blocks / ranks + 8 * (e.all - e.blocks) + 16 * e.largest);
  }
}

TEST_F(Layouts, PipelinesAndZero_AreBitEqualTogether) {
  Case alone = Data(1);
  alone.model = SmallLlama();
  for (Case run : {Data(2), Data(2, 1), Data(4, 1, 2)}) {
    run.model = alone.model;
    run.layout.degrees[Axis::kPipeline] = 2;
    ExpectSameBits(alone, run);
  }
}

// Tensor parallelism changes the order of sums inside a layer: close to one rank, and bit-equal
// among the ways to share out the state.
TEST_F(Layouts, TensorAndSequenceParallelism_GoWithDataZeroAndPipelines) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama()}) {
    Case alone = Data(1);
    alone.model = model;
    alone.steps = kUnequalSteps;
    const RankResult expected = harness_.Train(alone)[0];
    const Tensors gradients = harness_.FirstGradients(alone);
    RankResult like;  // tensor 2 x data 2
    for (const auto& [pipeline, data, zero, sequence, uneven] :
         std::vector<std::tuple<int, int, int, bool, bool>>{{1, 2, 0, false, false},
                                                            {1, 2, 1, false, false},
                                                            {1, 2, 3, false, false},
                                                            {1, 1, 0, true, false},
                                                            {1, 2, 3, true, false},
                                                            {2, 2, 1, true, false},
                                                            {1, 2, 2, false, true}}) {
      Case run = alone;
      run.layout.degrees = PerAxis(pipeline, data, 1, 2);
      run.layout.zero = zero;
      run.layout.sequence_parallel = sequence;
      if (uneven) run.tensor_weights = {3, 1};
      const bool tied = model.family == "gpt2";
      if (!Validate(run.layout, {.layers = 3, .tied = tied}, {.ranks = 2 * data * pipeline}).ok()) {
        continue;
      }
      SCOPED_TRACE(run.ToString());
      const RankResult result = harness_.Train(run)[0];
      ASSERT_EQ(result.losses.size(), expected.losses.size());
      for (size_t i = 0; i < expected.losses.size(); ++i) {
        EXPECT_NEAR(result.losses[i] / expected.losses[i], 1, 1e-5);
        EXPECT_NEAR(result.norms[i] / expected.norms[i], 1, 1e-5);
      }
      for (const auto& [name, values] : harness_.FirstGradients(run)) {
        const std::vector<float>& reference = gradients.at(name);
        ASSERT_EQ(values.size(), reference.size());
        double square = 0, difference = 0;
        for (size_t i = 0; i < values.size(); ++i) {
          square += static_cast<double>(reference[i]) * reference[i];
          difference += std::pow(static_cast<double>(values[i]) - reference[i], 2);
        }
        EXPECT_LE(std::sqrt(difference), 1e-5 * std::sqrt(square) + 1e-8) << name;
      }
      if (pipeline > 1 || sequence || uneven || data == 1) continue;
      if (zero == 0) like = result;
      EXPECT_EQ(result.losses, like.losses);
      EXPECT_EQ(result.norms, like.norms);
    }
  }
}

}  // namespace
}  // namespace muster::parallel::parity
