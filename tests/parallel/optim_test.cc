#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "kernels/ops.h"
#include "parallel/comm/communicator.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/schedule.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

Parameter Matrix(const std::string& name, int64_t rows, int64_t columns) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {rows, columns};
  parameter.weight_decay = true;
  parameter.initializer = Initializer::kNormal;
  parameter.stddev = 0.1f;
  return parameter;
}
Parameter Vector(const std::string& name, int64_t size) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {size};
  parameter.initializer = Initializer::kOnes;
  return parameter;
}

ParameterRegistry SomeParameters() {
  ParameterRegistry registry;
  Parameter padded = Matrix("table", 5, 7);
  padded.storage_rows = 16;
  registry.Add(padded);
  registry.Add(Vector("bias", 3));
  registry.Add(Matrix("wide", 10, 30));
  registry.Add(Vector("scale", 65));
  registry.Add(Matrix("last", 4, 4));
  return registry;
}

TEST(FlatLayout, WalksBackwardAlignsAndPads) {
  const ParameterRegistry registry = SomeParameters();
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const FlatLayout layout(registry, 1024, ranks);
    ASSERT_GT(layout.buckets().size(), 1u);
    int64_t end = 0;
    ParameterId next = registry.size() - 1;
    for (const FlatLayout::Bucket& bucket : layout.buckets()) {
      EXPECT_EQ(bucket.range.begin, end);
      EXPECT_EQ(bucket.range.size() % 128, 0);
      EXPECT_EQ(bucket.range.size() % ranks, 0);
      for (const ParameterId id : bucket.parameters) {
        EXPECT_EQ(id, next--);
        EXPECT_EQ((layout.offset(id) - bucket.range.begin) % 64, 0);
        EXPECT_GE(layout.offset(id), bucket.range.begin);
        EXPECT_LE(layout.offset(id) + registry.at(id).storage_elements(), bucket.range.end);
      }
      end = bucket.range.end;
    }
    EXPECT_EQ(next, -1);
    EXPECT_EQ(layout.elements(), end);
  }
}

TEST(FlatLayout, PartsOfAllRanks_HoldEveryRealElementOnce) {
  const ParameterRegistry registry = SomeParameters();
  for (const int ranks : {1, 2, 3, 5}) {
    const FlatLayout layout(registry, 1024, ranks);
    std::vector<std::vector<int>> seen;
    for (ParameterId id = 0; id < registry.size(); ++id) {
      seen.emplace_back(registry.at(id).elements(), 0);
    }
    for (size_t bucket = 0; bucket < layout.buckets().size(); ++bucket) {
      for (int rank = 0; rank < ranks; ++rank) {
        const FlatRange part = layout.Part(static_cast<int>(bucket), rank);
        for (const FlatPiece& piece : layout.Pieces(part)) {
          EXPECT_GE(piece.flat, part.begin);
          EXPECT_LE(piece.flat + piece.count, part.end);
          EXPECT_EQ(piece.flat, layout.offset(piece.parameter) + piece.first);
          for (int64_t i = 0; i < piece.count; ++i) ++seen[piece.parameter][piece.first + i];
        }
      }
    }
    for (const auto& counts : seen) {
      for (const int count : counts) EXPECT_EQ(count, 1);
    }
  }
}

TEST(FlatLayout, BucketsEndAtTheSameParametersForEveryNumberOfRanks) {
  const ParameterRegistry registry = SomeParameters();
  const FlatLayout one(registry, 1024, 1);
  const FlatLayout three(registry, 1024, 3);
  ASSERT_EQ(one.buckets().size(), three.buckets().size());
  for (size_t i = 0; i < one.buckets().size(); ++i) {
    EXPECT_EQ(one.buckets()[i].parameters, three.buckets()[i].parameters);
  }
}

TEST(Schedule, WarmsUpDecaysAndStays) {
  Schedule schedule = {Decay::kCosine, 1.0, 0.1, 10, 110};
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 1), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 10), 1.0);
  EXPECT_NEAR(LearningRate(schedule, 60), 0.55, 1e-12);
  EXPECT_NEAR(LearningRate(schedule, 110), 0.1, 1e-12);
  EXPECT_NEAR(LearningRate(schedule, 500), 0.1, 1e-12);
  schedule.decay = Decay::kLinear;
  EXPECT_NEAR(LearningRate(schedule, 35), 0.775, 1e-12);
  EXPECT_NEAR(LearningRate(schedule, 500), 0.1, 1e-12);
  schedule.decay = Decay::kConstant;
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 5), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(schedule, 500), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate({Decay::kLinear, 2.0, 0.0, 0, 1}, 1), 0.0);
}

// One rank with flat storage over SomeParameters().
struct Rank {
  explicit Rank(Communicator& communicator, int levels = 1, bool overlap = true)
      : registry(SomeParameters()),
        layout(registry, 1024, communicator.size()),
        device(kernels::MakeCpuDevice(1)),
        compute(*device->MakeStream()),
        communication(*device->MakeStream({.threaded = true})),
        flat(*FlatBuffers::Make(*device, *compute, registry, layout, levels, 3)),
        reducer(*GradientReducer::Make(*flat, communicator, *compute, *communication, overlap)) {}

  ParameterRegistry registry;
  FlatLayout layout;
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<kernels::Stream> compute, communication;
  std::unique_ptr<FlatBuffers> flat;
  std::unique_ptr<GradientReducer> reducer;
};

TEST(Optimizer, MatchesTheFormulasOfAdamWWithClipping) {
  const auto communicators = MakeLocalCommunicators(1, absl::Seconds(10));
  Rank rank(*communicators[0]);
  AdamWConfig config;
  config.clip_norm = 0.5;
  ASSERT_OK_AND_ASSIGN(auto optimizer, Optimizer::Make(*rank.flat, *rank.device, config));

  struct Reference {
    std::vector<double> p, m, v;
  };
  std::vector<Reference> reference(rank.registry.size());
  for (ParameterId id = 0; id < rank.registry.size(); ++id) {
    const int64_t n = rank.registry.at(id).elements();
    const float* p = rank.flat->parameter_views()[id].f32();
    reference[id] = {std::vector<double>(p, p + n), std::vector<double>(n), std::vector<double>(n)};
  }
  Rng rng(testing::TestSeed());
  for (int step = 1; step <= 5; ++step) {
    double square = 0;
    for (ParameterId id = 0; id < rank.registry.size(); ++id) {
      float* g = rank.flat->gradient_views(0)[id].f32();
      for (int64_t i = 0; i < rank.registry.at(id).elements(); ++i) {
        g[i] = static_cast<float>(rng.Uniform() - 0.5);
        square += static_cast<double>(g[i]) * g[i];
      }
    }
    optimizer->ComputeNorm(*rank.compute);
    ASSERT_OK(rank.compute->Synchronize());
    EXPECT_NEAR(optimizer->norm(), std::sqrt(square), 1e-5 * std::sqrt(square));
    const double lr = 0.01 * step;
    optimizer->Update(*rank.compute, step, lr);
    ASSERT_OK(rank.compute->Synchronize());
    const double clip = std::min(1.0, 0.5 / (std::sqrt(square) + 1e-6));
    for (ParameterId id = 0; id < rank.registry.size(); ++id) {
      const double decay = rank.registry.at(id).weight_decay ? config.weight_decay : 0;
      const float* g = rank.flat->gradient_views(0)[id].f32();
      const float* p = rank.flat->parameter_views()[id].f32();
      Reference& r = reference[id];
      for (size_t i = 0; i < r.p.size(); ++i) {
        const double gradient = g[i] * clip;
        r.m[i] = config.beta1 * r.m[i] + (1 - config.beta1) * gradient;
        r.v[i] = config.beta2 * r.v[i] + (1 - config.beta2) * gradient * gradient;
        const double m = r.m[i] / (1 - std::pow(config.beta1, step));
        const double v = r.v[i] / (1 - std::pow(config.beta2, step));
        r.p[i] -= lr * (m / (std::sqrt(v) + config.epsilon) + decay * r.p[i]);
        ASSERT_NEAR(p[i], r.p[i], 2e-6) << rank.registry.at(id).name << "[" << i << "]";
      }
    }
  }
}

// Element i of the gradient of micro-batch j: numbers whose sum depends on its order.
float Contribution(int64_t j, int64_t i) {
  Rng rng(static_cast<uint64_t>(j * 100003 + i));
  return static_cast<float>((rng.Uniform() - 0.5) * std::pow(10.0, static_cast<double>(j % 4)));
}

// Runs `micro_batches` over `ranks` threads; the reduced gradients of each rank.
std::vector<std::vector<float>> Reduce(int ranks, int64_t micro_batches, bool overlap) {
  const auto communicators = MakeLocalCommunicators(ranks, absl::Seconds(30));
  std::vector<std::vector<float>> results(ranks);
  std::vector<std::thread> threads;
  const int64_t per_rank = micro_batches / ranks;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(*communicators[r], GradientReducer::Levels(per_rank), overlap);
      rank.reducer->BeginStep(per_rank);
      for (int64_t j = r * per_rank; j < (r + 1) * per_rank; ++j) {
        const ParameterViews& views = rank.reducer->BeginMicroBatch();
        for (ParameterId id = rank.registry.size() - 1; id >= 0; --id) {
          for (int64_t i = 0; i < rank.registry.at(id).elements(); ++i) {
            views[id].f32()[i] += Contribution(j, id * 1000 + i);
          }
          rank.reducer->GradientReady(id);
        }
        rank.reducer->EndMicroBatch();
      }
      rank.reducer->Finish();
      EXPECT_OK(rank.communication->Synchronize());
      EXPECT_OK(rank.compute->Synchronize());
      for (ParameterId id = 0; id < rank.registry.size(); ++id) {
        const float* values = rank.flat->gradient_views(0)[id].f32();
        results[r].insert(results[r].end(), values, values + rank.registry.at(id).elements());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(GradientReducer, SumHasTheSameBitsForEveryNumberOfRanksAndWithAndWithoutOverlap) {
  const std::vector<float> alone = Reduce(1, 8, true)[0];
  for (const int ranks : {1, 2, 4, 8}) {
    for (const bool overlap : {false, true}) {
      for (const std::vector<float>& result : Reduce(ranks, 8, overlap)) EXPECT_EQ(result, alone);
    }
  }
}

TEST(GradientReducer, AddsEveryMicroBatchOnce) {
  for (const auto& [ranks, micro_batches] :
       std::vector<std::pair<int, int>>{{1, 1}, {1, 2}, {1, 3}, {1, 7}, {2, 6}, {3, 3}, {3, 9}}) {
    const auto results = Reduce(ranks, micro_batches, true);
    const ParameterRegistry registry = SomeParameters();
    size_t at = 0;
    for (ParameterId id = 0; id < registry.size(); ++id) {
      for (int64_t i = 0; i < registry.at(id).elements(); ++i, ++at) {
        double sum = 0;
        for (int j = 0; j < micro_batches; ++j) sum += Contribution(j, id * 1000 + i);
        for (const auto& result : results) {
          ASSERT_NEAR(result[at], sum, 1e-3) << ranks << " ranks, " << micro_batches;
        }
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
}

}  // namespace
}  // namespace muster::parallel
