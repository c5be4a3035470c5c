#include "parallel/optim/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/rng.h"
#include "kernels/device/device.h"
#include "kernels/low_precision.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/schedule.h"
#include "tests/parallel/optim_rank.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

TEST(Schedule, LearningRate_WarmsUpDecaysAndStays) {
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

// What Optimizer::Prepare() reads of a step of one micro-batch of one token on one rank, with the
// pair of the norm.
struct StepValues {
  std::array<float, 5> values = {1.0f, 1.0f, 0.0f, 0.0f, 0.0f};
  kernels::Tensor all() { return kernels::Tensor(values.data(), kernels::DType::kF32, {5}); }
  kernels::Tensor pair() { return all().Rows(3, 2); }
};

// Returns the master weights of the own parts, bucket after bucket.
std::vector<float> Masters(FlatBuffers& flat, kernels::Stream& stream) {
  std::vector<float> masters;
  for (int i = 0; i < static_cast<int>(flat.layout().buckets().size()); ++i) {
    std::vector<float> own(flat.m(i).elements());
    flat.ReadMaster(
        stream, i, 0,
        kernels::Tensor(own.data(), kernels::DType::kF32, {static_cast<int64_t>(own.size())}));
    EXPECT_OK(stream.Synchronize());
    masters.insert(masters.end(), own.begin(), own.end());
  }
  return masters;
}

// What the own parts of every rank hold after three updates.
struct State {
  std::vector<float> masters;
  std::vector<char> moments, parameters;
  int64_t bytes = 0;

  State(FlatBuffersOptions options, int shards) {
    const ParameterRegistry registry = SomeParameters();
    const FlatLayout layout(registry, {.bucket_bytes = 1024,
                                       .shards = shards,
                                       .by_block = options.zero >= 2,
                                       .resident_elements = 32});
    options.host_buckets = std::min<int>(options.host_buckets, layout.buckets().size());
    const auto device = kernels::MakeCpuDevice(1);
    const auto stream = *device->MakeStream({});
    for (options.shard = 0; options.shard < shards; ++options.shard) {
      const auto flat = *FlatBuffers::Make(*device, *stream, registry, layout, options);
      bytes = FlatBuffers::Bytes(layout, options);
      EXPECT_GE(device->allocated_bytes(), bytes);
      const auto optimizer = *Optimizer::Make(*flat, *device, *stream, {.schedule = {.peak = 0.1}});
      for (int step = 0; step < 3; ++step) {
        for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
          const FlatRange part = layout.Part(i, options.shard);
          for (const FlatSlice& slice : layout.Slices(part)) {
            float* g = flat->own_gradient(i).f32() + (slice.flat - part.begin);
            for (int64_t j = 0; j < slice.count; ++j) {
              g[j] = std::sin(static_cast<float>(slice.flat + j + 1000 * step));
            }
          }
        }
        StepValues values;
        optimizer->SumSquares(*stream, values.pair());
        values.values[3] = 1;  // every rank clips alike, whatever it holds
        values.values[4] = 0;
        optimizer->Prepare(*stream, values.all(), 1, 1, 1.0);
        optimizer->Update(*stream, [](int) {});
      }
      Append(registry, layout, *flat, *stream);
    }
  }
  void Append(const ParameterRegistry& registry, const FlatLayout& layout, FlatBuffers& flat,
              kernels::Stream& stream) {
    const std::vector<float> own = Masters(flat, stream);
    masters.insert(masters.end(), own.begin(), own.end());
    for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
      for (const kernels::Tensor& moment : {flat.m(i), flat.v(i)}) {
        const char* data = static_cast<const char*>(moment.data());
        moments.insert(moments.end(), data, data + moment.bytes());
      }
      const kernels::Tensor copy = flat.copy(i);
      const char* data = static_cast<const char*>(copy.data());
      parameters.insert(parameters.end(), data, data + copy.bytes());
    }
  }
};

TEST(SplitMasters, EveryStageOfZero_HaveTheBitsOfWholeMastersInTwoBytesLess) {
  for (const int zero : {0, 1, 2, 3}) {
    const int shards = zero == 0 ? 1 : 2;
    const FlatBuffersOptions split = {.seed = 4, .compute = kernels::DType::kBF16, .zero = zero};
    FlatBuffersOptions whole = split;
    whole.split_master = false;
    const State a(split, shards), b(whole, shards);
    EXPECT_EQ(a.masters, b.masters);
    EXPECT_TRUE(a.moments == b.moments);
    EXPECT_TRUE(a.parameters == b.parameters);
    EXPECT_EQ(b.bytes - a.bytes, 2 * static_cast<int64_t>(a.masters.size()) / shards);
    EXPECT_EQ(a.parameters.size(), 2 * a.masters.size());
  }
}

TEST(SplitMasters, WrittenAndRead_AreTheSameNumbersInAnyStorage) {
  const ParameterRegistry registry = SomeParameters();
  const FlatLayout layout(registry, 1024, 2);
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream({});
  Rng rng(testing::TestSeed());
  for (const kernels::DType compute :
       {kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kF16}) {
    for (const int host_buckets : {0, 1}) {
      const auto flat = *FlatBuffers::Make(
          *device, *stream, registry, layout,
          {.compute = compute, .zero = 1, .shard = 1, .host_buckets = host_buckets});
      for (const int bucket : {0, 1}) {
        std::vector<float> values(flat->m(bucket).elements() - 3), read(values.size());
        for (float& value : values) value = static_cast<float>(rng.Uniform() - 0.5);
        const auto count = static_cast<int64_t>(values.size());
        ASSERT_OK(flat->WriteMaster(*stream, bucket, 3, values.data(), count));
        flat->ReadMaster(*stream, bucket, 3,
                         kernels::Tensor(read.data(), kernels::DType::kF32, {count}));
        ASSERT_OK(stream->Synchronize());
        EXPECT_EQ(read, values);
        flat->RefreshCopies(*stream);
        for (int64_t i = 0; i < count && compute == kernels::DType::kBF16; ++i) {
          ASSERT_EQ(flat->copy(bucket).as<uint16_t>()[3 + i],
                    (kernels::BitsOf(values[i]) + 0x8000u) >> 16);
        }
      }
    }
  }
}

// Updates one rank from the gradients that it has.
kernels::StepOutcome Step(Optimizer& optimizer, kernels::Stream& compute) {
  StepValues values;
  optimizer.SumSquares(compute, values.pair());
  optimizer.Prepare(compute, values.all(), 1, 1, 1.0);
  optimizer.Update(compute, [](int) {});
  kernels::StepOutcome outcome;
  optimizer.CopyOutcome(compute, &outcome);
  EXPECT_OK(compute.Synchronize());
  return outcome;
}

class OptimizerIn : public ::testing::TestWithParam<kernels::DType> {};

TEST_P(OptimizerIn, AdamWWithClipping_MatchesTheFormulas) {
  const auto communicators = MakeLocalCommunicators(1, absl::Seconds(10));
  Rank rank(*communicators[0], 1, {.compute = GetParam()});
  const bool half = GetParam() != kernels::DType::kF32;
  AdamWConfig config;
  config.clip_norm = 0.5;
  const Schedule schedule = {.peak = 0.05, .warmup_steps = 5};
  ASSERT_OK_AND_ASSIGN(auto optimizer, Optimizer::Make(*rank.flat, *rank.device, *rank.compute,
                                                       {.adamw = config, .schedule = schedule}));

  struct Reference {
    std::vector<double> p, m, v;
  };
  std::vector<Reference> reference(rank.registry.size());
  const std::vector<float> initial = Masters(*rank.flat, *rank.compute);
  for (ParameterId id = 0; id < rank.registry.size(); ++id) {
    const int64_t n = rank.registry.at(id).elements();
    const float* p = initial.data() + rank.layout.offset(id);
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
    const kernels::StepOutcome outcome = Step(*optimizer, *rank.compute);
    EXPECT_FLOAT_EQ(static_cast<float>(outcome.gradient_norm),
                    static_cast<float>(std::sqrt(square)));
    const double lr = 0.01 * step;
    EXPECT_DOUBLE_EQ(outcome.learning_rate, lr);
    EXPECT_EQ(outcome.state.updates, step);
    const double clip = std::min(1.0, 0.5 / (std::sqrt(square) + 1e-6));
    const std::vector<float> masters = Masters(*rank.flat, *rank.compute);
    for (ParameterId id = 0; id < rank.registry.size(); ++id) {
      const double decay = rank.registry.at(id).weight_decay ? config.weight_decay : 0;
      const float* g = rank.flat->gradient_views(0)[id].f32();
      const float* p = masters.data() + rank.layout.offset(id);
      const kernels::Tensor& copy = rank.flat->parameter_views()[id];
      Reference& r = reference[id];
      for (size_t i = 0; i < r.p.size(); ++i) {
        const double gradient = g[i] * clip;
        r.m[i] = config.beta1 * r.m[i] + (1 - config.beta1) * gradient;
        r.v[i] = config.beta2 * r.v[i] + (1 - config.beta2) * gradient * gradient;
        const double m = r.m[i] / (1 - std::pow(config.beta1, step));
        const double v = r.v[i] / (1 - std::pow(config.beta2, step));
        r.p[i] -= lr * (m / (std::sqrt(v) + config.epsilon) + decay * r.p[i]);
        ASSERT_NEAR(p[i], r.p[i], 2e-6) << rank.registry.at(id).name << "[" << i << "]";
        const auto at = static_cast<int64_t>(i);
        if (GetParam() == kernels::DType::kBF16) {
          ASSERT_EQ(copy.as<uint16_t>()[at], (kernels::BitsOf(p[i]) + 0x8000u) >> 16);
        } else if (half) {
          ASSERT_EQ(copy.as<uint16_t>()[at], kernels::ToF16(p[i]));
        } else {
          ASSERT_EQ(copy.f32()[at], p[i]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, OptimizerIn,
                         ::testing::Values(kernels::DType::kF32, kernels::DType::kBF16,
                                           kernels::DType::kF16));

TEST(Optimizer, Overflows_ShrinkTheLossScaleAndCountAsNoUpdate) {
  const auto communicators = MakeLocalCommunicators(1, absl::Seconds(10));
  Rank rank(*communicators[0]);
  OptimizerOptions options;
  options.schedule = {.peak = 0.01, .warmup_steps = 10};
  options.loss_scaling = {.dynamic = true, .initial = 1024, .growth_interval = 3, .hysteresis = 2};
  ASSERT_OK_AND_ASSIGN(auto optimizer,
                       Optimizer::Make(*rank.flat, *rank.device, *rank.compute, options));
  // Returns the outcome of a step with this gradient everywhere.
  const auto run = [&](float gradient) {
    const kernels::Tensor all = rank.flat->all_gradients(0);
    std::fill(all.f32(), all.f32() + all.elements(), gradient);
    const float before = rank.flat->all_masters().f32()[0];
    const kernels::StepOutcome outcome = Step(*optimizer, *rank.compute);
    EXPECT_EQ(outcome.skipped != 0, std::isinf(gradient));
    EXPECT_EQ(rank.flat->all_masters().f32()[0] == before, std::isinf(gradient));
    return outcome;
  };
  const float inf = std::numeric_limits<float>::infinity();
  const kernels::StepOutcome first = run(1024);
  EXPECT_EQ(first.loss_scale, 1024);
  EXPECT_NEAR(first.gradient_norm, std::sqrt(rank.layout.elements()), 1e-3) << "unscaled";
  // Hysteresis forgives one overflow, then each of them halves.
  EXPECT_EQ(run(inf).state.loss_scale, 1024);
  EXPECT_EQ(run(inf).state.loss_scale, 512);
  EXPECT_EQ(run(1).state.updates, 2);
  EXPECT_EQ(run(inf).state.loss_scale, 256);
  // Three clean steps in a row grow it and refill the hysteresis.
  EXPECT_EQ(run(1).state.loss_scale, 256);
  EXPECT_EQ(run(1).state.loss_scale, 256);
  const kernels::StepOutcome grown = run(1);
  EXPECT_EQ(grown.state.loss_scale, 512);
  EXPECT_EQ(grown.state.updates, 5);
  EXPECT_DOUBLE_EQ(grown.learning_rate, 0.005) << "the schedule counts updates, not steps";
  EXPECT_EQ(run(inf).state.loss_scale, 512);
  // What is saved and set again goes on the same way.
  ASSERT_OK_AND_ASSIGN(const kernels::StepState saved, optimizer->GetState(*rank.compute));
  ASSERT_OK(optimizer->SetState(*rank.compute, optimizer->initial_state()));
  ASSERT_OK(optimizer->SetState(*rank.compute, saved));
  EXPECT_EQ(run(inf).state.loss_scale, 256);
}

// Gradients that are all zero overflow at no scale.
TEST(Optimizer, LossScaleThatNothingStops_StaysFinite) {
  const auto communicators = MakeLocalCommunicators(1, absl::Seconds(10));
  Rank rank(*communicators[0]);
  OptimizerOptions options;
  options.schedule = {.peak = 0.01};
  options.loss_scaling = {.dynamic = true, .initial = 1, .growth_interval = 1, .hysteresis = 1};
  ASSERT_OK_AND_ASSIGN(auto optimizer,
                       Optimizer::Make(*rank.flat, *rank.device, *rank.compute, options));
  const kernels::Tensor all = rank.flat->all_gradients(0);
  std::fill(all.f32(), all.f32() + all.elements(), 0.0f);
  kernels::StepOutcome outcome;
  for (int step = 0; step < 200; ++step) {
    StepValues values;
    optimizer->SumSquares(*rank.compute, values.pair());
    optimizer->Prepare(*rank.compute, values.all(), 1, 1, 1.0);
    optimizer->CopyOutcome(*rank.compute, &outcome);
    ASSERT_OK(rank.compute->Synchronize());
    ASSERT_EQ(outcome.skipped, 0) << step;
  }
  EXPECT_EQ(outcome.state.loss_scale, 0x1p40f);
  EXPECT_EQ(outcome.state.updates, 200);
}

}  // namespace
}  // namespace muster::parallel
