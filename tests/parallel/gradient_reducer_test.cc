#include "parallel/optim/gradient_reducer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "parallel/comm/communicator.h"
#include "tests/parallel/optim_rank.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

// Returns element i of the gradient of micro-batch j, one of numbers whose sum depends on its
// order.
float Contribution(int64_t j, int64_t i) {
  Rng rng(static_cast<uint64_t>(j * 100003 + i));
  return static_cast<float>((rng.Uniform() - 0.5) * std::pow(10.0, static_cast<double>(j % 4)));
}

// Runs `micro_batches` over `ranks` threads. Returns the reduced gradients by parameter, whole.
std::vector<std::vector<float>> Reduce(int ranks, int64_t micro_batches, const Sharding& sharding) {
  const auto communicators = MakeLocalCommunicators(ranks, absl::Seconds(30));
  std::vector<std::vector<std::vector<float>>> results(ranks);
  std::vector<std::thread> threads;
  const int64_t per_rank = micro_batches / ranks;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(*communicators[r], per_rank, sharding);
      rank.reducer->BeginStep(per_rank);
      for (int64_t i = 0; i < per_rank; ++i) {
        const int64_t j =
            GradientReducer::MicroBatchOf(i, per_rank, r, sharding.zero >= 2 ? sharding.shards : 1);
        const ParameterViews& views = rank.reducer->BeginMicroBatch();
        int block = 4;
        for (ParameterId id = rank.registry.size() - 1; id >= 0; --id) {
          for (; block > rank.registry.at(id).block; rank.reducer->AcquireBlock(block)) --block;
          for (int64_t k = 0; k < rank.registry.at(id).elements(); ++k) {
            views[id].f32()[k] += Contribution(j, id * 1000 + k);
          }
          rank.reducer->GradientReady(id);
        }
        rank.reducer->EndMicroBatch();
      }
      rank.reducer->Finish();
      EXPECT_OK(rank.communication->Synchronize());
      EXPECT_OK(rank.compute->Synchronize());
      rank.Collect([&](int bucket) { return rank.flat->own_gradient(bucket); }, results[r]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A rank has zeros where other ranks own the elements.
  std::vector<std::vector<float>> whole = results[0];
  for (int r = 1; r < sharding.shards; ++r) {
    for (size_t id = 0; id < whole.size(); ++id) {
      whole[id].resize(std::max(whole[id].size(), results[r][id].size()));
      for (size_t i = 0; i < results[r][id].size(); ++i) {
        if (results[r][id][i] != 0) whole[id][i] = results[r][id][i];
      }
    }
  }
  return whole;
}

TEST(GradientReducer, SumsInEveryLayout_HaveTheSameBits) {
  const auto alone = Reduce(1, 16, {});
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int zero : {0, 1, 2, 3}) {
      for (int shards = 1; shards <= (zero == 0 ? 1 : ranks); shards *= 2) {
        for (const bool overlap : {false, true}) {
          EXPECT_EQ(Reduce(ranks, 16, {.zero = zero, .shards = shards, .overlap = overlap}), alone)
              << ranks << " ranks, ZeRO-" << zero << " over " << shards;
        }
      }
    }
  }
}

TEST(GradientReducer, EveryMicroBatch_IsAddedOnce) {
  const ParameterRegistry registry = SomeParameters();
  for (const int zero : {0, 1, 2, 3}) {
    for (const auto& [ranks, micro_batches] : std::vector<std::pair<int, int>>{
             {1, 1}, {1, 2}, {1, 3}, {1, 7}, {2, 6}, {3, 3}, {3, 9}, {3, 15}}) {
      for (const bool chained : {false, true}) {
        const auto sums = Reduce(ranks, micro_batches,
                                 {.zero = zero, .shards = zero ? ranks : 1, .chained = chained});
        for (ParameterId id = 0; id < registry.size(); ++id) {
          for (int64_t i = 0; i < registry.at(id).elements(); ++i) {
            double sum = 0;
            for (int j = 0; j < micro_batches; ++j) sum += Contribution(j, id * 1000 + i);
            ASSERT_NEAR(sums[id][i], sum, 1e-3)
                << ranks << " ranks, " << micro_batches << " micro-batches, ZeRO-" << zero
                << (chained ? ", one after the other" : "");
          }
        }
      }
    }
  }
}

TEST(GradientReducer, SixteenBitWire_LosesOneRoundingOfEveryContribution) {
  const ParameterRegistry registry = SomeParameters();
  const auto exact = Reduce(4, 4, {});
  for (const Sharding& exactly :
       {Sharding{.zero = 0}, Sharding{.zero = 1, .shards = 4}, Sharding{.zero = 1, .shards = 2},
        Sharding{.zero = 3, .shards = 4}}) {
    Sharding wire = exactly;
    wire.wire = kernels::DType::kBF16;
    const auto rounded = Reduce(4, 4, wire);
    EXPECT_NE(rounded, exact);
    for (ParameterId id = 0; id < registry.size(); ++id) {
      for (int64_t i = 0; i < registry.at(id).elements(); ++i) {
        double size = 0;
        for (int j = 0; j < 4; ++j) size += std::abs(Contribution(j, id * 1000 + i));
        // Rounded are contributions and, with replicas, the shard's sum and the total on its way
        // back.
        ASSERT_NEAR(rounded[id][i], exact[id][i], 3 * size / 256);
      }
    }
  }
}

TEST(GradientReducer, Levels_AreTheDigitsOfABinaryCounter) {
  EXPECT_EQ(GradientReducer::Levels(1), 1);
  EXPECT_EQ(GradientReducer::Levels(2), 2);
  EXPECT_EQ(GradientReducer::Levels(3), 2);
  EXPECT_EQ(GradientReducer::Levels(4), 3);
  EXPECT_EQ(GradientReducer::Levels(7), 3);
  EXPECT_EQ(GradientReducer::Levels(8), 4);
  // ZeRO 2 and 3 count sums that wait for a partner, which the newest never does.
  EXPECT_EQ(GradientReducer::Levels(1, 2), 1);
  EXPECT_EQ(GradientReducer::Levels(2, 2), 1);
  EXPECT_EQ(GradientReducer::Levels(3, 2), 1);
  EXPECT_EQ(GradientReducer::Levels(4, 3), 2);
  EXPECT_EQ(GradientReducer::Levels(8, 3), 3);
}

TEST(GradientReducer, Chained_AddsInOrderInOneLevel) {
  EXPECT_EQ(GradientReducer::Levels(8, 0, /*chained=*/true), 1);
  EXPECT_EQ(GradientReducer::Levels(8, 3, /*chained=*/true), 1);
  const ParameterRegistry registry = SomeParameters();
  for (const int zero : {0, 1, 2, 3}) {
    const auto sums = Reduce(1, 5, {.zero = zero, .chained = true});
    for (ParameterId id = 0; id < registry.size(); ++id) {
      for (int64_t i = 0; i < registry.at(id).elements(); ++i) {
        float sum = 0;
        for (int j = 0; j < 5; ++j) sum += Contribution(j, id * 1000 + i);
        ASSERT_EQ(sums[id][i], sum) << "ZeRO-" << zero;
      }
    }
  }
}

}  // namespace
}  // namespace muster::parallel
