#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "kernels/device/device.h"
#include "kernels/low_precision.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/parameter_gatherer.h"
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
  registry.BeginBlock(0, /*resident=*/true);
  Parameter padded = Matrix("table", 5, 7);
  padded.storage_rows = 16;
  registry.Add(padded);
  registry.Add(Vector("bias", 3));
  registry.BeginBlock(1, /*resident=*/false);
  registry.Add(Matrix("wide", 10, 30));
  registry.Add(Vector("scale", 65));
  registry.BeginBlock(2, /*resident=*/false);
  registry.Add(Matrix("last", 4, 4));
  registry.BeginBlock(3, /*resident=*/false);
  registry.Add(Matrix("end", 9, 20));
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

// A bucket per block with one matrix of so many rows of 128 elements, in forward order.
FlatLayout Blocks(ParameterRegistry& registry, const std::vector<int64_t>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    registry.BeginBlock(static_cast<int>(i), /*resident=*/false);
    registry.Add(Matrix("block" + std::to_string(i), rows[i], 128));
  }
  return FlatLayout(registry, {.shards = 2, .by_block = true});
}

TEST(RotatingSlots, OfNeighbouringBlocks_AreDifferentAndLargeEnough) {
  for (const std::vector<int64_t>& rows :
       std::vector<std::vector<int64_t>>{{4},
                                         {4, 2},
                                         {9, 2, 9},
                                         {9, 2, 2, 9},
                                         {3, 2, 2, 3},
                                         {9, 2, 2, 2, 2, 2, 2, 9},
                                         {2, 2, 2, 2, 9}}) {
    ParameterRegistry registry;
    const FlatLayout layout = Blocks(registry, rows);
    const RotatingSlots slots = AssignSlots(layout);
    ASSERT_EQ(slots.slot.size(), rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int slot = slots.slot[i];
      const int64_t end = slot + 1 < slots.size() ? slots.begin[slot + 1] : slots.elements;
      EXPECT_LE(slots.begin[slot] + layout.buckets()[i].range.size(), end);
      if (i == 0) continue;
      EXPECT_NE(slot, slots.slot[i - 1]) << rows.size() << " blocks, bucket " << i;
    }
  }
}

TEST(RotatingSlots, WithLargeTablesAtBothEnds_HaveOneBufferForThese) {
  const auto elements = [](const std::vector<int64_t>& rows, bool one_each = false) {
    ParameterRegistry registry;
    return AssignSlots(Blocks(registry, rows), one_each).elements / 128;
  };
  EXPECT_EQ(elements({9, 2, 2, 9}), 9 + 2 + 2);
  EXPECT_EQ(elements({9, 2, 3, 2, 3, 9}), 9 + 2 + 3);
  EXPECT_EQ(elements({9, 2, 9}), 9 + 2);  // by turns, as the tables are not neighbours
  EXPECT_EQ(elements({3, 2, 2, 3}), 3 + 3);
  EXPECT_EQ(elements({9, 2, 2, 2}), 9 + 2);  // the first stage of a pipeline
  EXPECT_EQ(elements({9, 2, 2, 9}, /*one_each=*/true), 9 + 2 + 2 + 9);
  EXPECT_EQ(elements({}), 0);
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

struct Layout {
  int zero = 0;
  int shards = 1;
  bool overlap = true;
  bool reshard = true;
  kernels::DType compute = kernels::DType::kF32;
  kernels::DType wire = kernels::DType::kF32;
  bool chained = false;
};

// One rank with flat storage over SomeParameters().
struct Rank {
  explicit Rank(Communicator& communicator, int64_t micro_batches = 1, const Layout& how = {})
      : groups(*MeshGroups::MakeData(communicator, how.shards)),
        registry(SomeParameters()),
        layout(registry, {.bucket_bytes = 1024,
                          .shards = how.shards,
                          .replicas = communicator.size() / how.shards,
                          .by_block = how.zero >= 2,
                          .resident_elements = 20}),
        device(kernels::MakeCpuDevice(1)),
        compute(*device->MakeStream()),
        communication(*device->MakeStream({.threaded = true})),
        gathering(*device->MakeStream({.threaded = true})),
        flat(*FlatBuffers::Make(
            *device, *compute, registry, layout,
            {.gradient_levels = GradientReducer::Levels(micro_batches, how.zero, how.chained),
             .seed = 3,
             .compute = how.compute,
             .zero = how.zero,
             .shard = groups->shard().rank(),
             .reshard_after_forward = how.reshard})),
        reducer(*GradientReducer::Make(
            *flat, *groups, *compute, *communication,
            {.overlap = how.overlap, .wire = how.wire, .chained = how.chained})),
        gatherer(*ParameterGatherer::Make(*flat, groups->gather(), *reducer, {{0, 4}}, *compute,
                                          *gathering, how.overlap)) {}

  // Every real element of the own parts, by parameter: what `at` says of a bucket.
  template <typename At>
  void Collect(At at, std::vector<std::vector<float>>& values) {
    values.resize(registry.size());
    for (int bucket = 0; bucket < static_cast<int>(layout.buckets().size()); ++bucket) {
      const FlatRange part = layout.Part(bucket, groups->shard().rank());
      const kernels::Tensor own = at(bucket);
      for (const FlatPiece& piece : layout.Pieces(part)) {
        auto& to = values[piece.parameter];
        to.resize(registry.at(piece.parameter).elements());
        const float* from = own.f32() + (piece.flat - part.begin);
        std::copy(from, from + piece.count, to.begin() + piece.first);
      }
    }
  }

  std::unique_ptr<MeshGroups> groups;
  ParameterRegistry registry;
  FlatLayout layout;
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<kernels::Stream> compute, communication, gathering;
  std::unique_ptr<FlatBuffers> flat;
  std::unique_ptr<GradientReducer> reducer;
  std::unique_ptr<ParameterGatherer> gatherer;
};

// One micro-batch of one token on one rank: what Optimizer::Prepare() reads besides the pair.
struct StepValues {
  std::array<float, 5> values = {1.0f, 1.0f, 0.0f, 0.0f, 0.0f};
  kernels::Tensor all() { return kernels::Tensor(values.data(), kernels::DType::kF32, {5}); }
  kernels::Tensor pair() { return all().Rows(3, 2); }
};

// The master weights of one rank, as they stand in flat storage of one shard.
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

// What every rank's own parts hold after three updates.
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
          for (const FlatPiece& piece : layout.Pieces(part)) {
            float* g = flat->own_gradient(i).f32() + (piece.flat - part.begin);
            for (int64_t j = 0; j < piece.count; ++j) {
              g[j] = std::sin(static_cast<float>(piece.flat + j + 1000 * step));
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

TEST(MasterHalves, EveryStageOfZero_HaveTheBitsOfWholeMastersInTwoBytesLess) {
  for (const int zero : {0, 1, 2, 3}) {
    const int shards = zero == 0 ? 1 : 2;
    const FlatBuffersOptions halves = {.seed = 4, .compute = kernels::DType::kBF16, .zero = zero};
    FlatBuffersOptions whole = halves;
    whole.halves = false;
    const State a(halves, shards), b(whole, shards);
    EXPECT_EQ(a.masters, b.masters);
    EXPECT_TRUE(a.moments == b.moments);
    EXPECT_TRUE(a.parameters == b.parameters);
    EXPECT_EQ(b.bytes - a.bytes, 2 * static_cast<int64_t>(a.masters.size()) / shards);
    EXPECT_EQ(a.parameters.size(), 2 * a.masters.size());
  }
}

TEST(MasterHalves, WrittenAndRead_AreTheSameNumbersInAnyStorage) {
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

class OptimizerIn : public ::testing::TestWithParam<kernels::DType> {};

TEST_P(OptimizerIn, MatchesTheFormulasOfAdamWWithClipping) {
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
    StepValues values;
    optimizer->SumSquares(*rank.compute, values.pair());
    optimizer->Prepare(*rank.compute, values.all(), 1, 1, 1.0);
    optimizer->Update(*rank.compute, [](int) {});
    kernels::StepOutcome outcome;
    optimizer->CopyOutcome(*rank.compute, &outcome);
    ASSERT_OK(rank.compute->Synchronize());
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

// Element i of the gradient of micro-batch j: numbers whose sum depends on its order.
float Contribution(int64_t j, int64_t i) {
  Rng rng(static_cast<uint64_t>(j * 100003 + i));
  return static_cast<float>((rng.Uniform() - 0.5) * std::pow(10.0, static_cast<double>(j % 4)));
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
  // Of a step with this gradient everywhere: the scale it ran with, then the state after it.
  const auto run = [&](float gradient) {
    const kernels::Tensor all = rank.flat->all_gradients(0);
    std::fill(all.f32(), all.f32() + all.elements(), gradient);
    const float before = rank.flat->all_masters().f32()[0];
    StepValues values;
    optimizer->SumSquares(*rank.compute, values.pair());
    optimizer->Prepare(*rank.compute, values.all(), 1, 1, 1.0);
    optimizer->Update(*rank.compute, [](int) {});
    kernels::StepOutcome outcome;
    optimizer->CopyOutcome(*rank.compute, &outcome);
    EXPECT_OK(rank.compute->Synchronize());
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

// Runs `micro_batches` over `ranks` threads; the reduced gradients, put together from all ranks.
std::vector<std::vector<float>> Reduce(int ranks, int64_t micro_batches, const Layout& layout) {
  const auto communicators = MakeLocalCommunicators(ranks, absl::Seconds(30));
  std::vector<std::vector<std::vector<float>>> results(ranks);
  std::vector<std::thread> threads;
  const int64_t per_rank = micro_batches / ranks;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(*communicators[r], per_rank, layout);
      rank.reducer->BeginStep(per_rank);
      for (int64_t i = 0; i < per_rank; ++i) {
        const int64_t j =
            GradientReducer::MicroBatchOf(i, per_rank, r, layout.zero >= 2 ? layout.shards : 1);
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
  // Every shard holds its own parts; what it does not hold is zero in `results`.
  std::vector<std::vector<float>> whole = results[0];
  for (int r = 1; r < layout.shards; ++r) {
    for (size_t id = 0; id < whole.size(); ++id) {
      whole[id].resize(std::max(whole[id].size(), results[r][id].size()));
      for (size_t i = 0; i < results[r][id].size(); ++i) {
        if (results[r][id][i] != 0) whole[id][i] = results[r][id][i];
      }
    }
  }
  return whole;
}

TEST(GradientReducer, SumHasTheSameBitsInEveryLayout) {
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

TEST(GradientReducer, AddsEveryMicroBatchOnce) {
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
  for (const Layout& layout : {Layout{.zero = 0}, Layout{.zero = 1, .shards = 4},
                               Layout{.zero = 1, .shards = 2}, Layout{.zero = 3, .shards = 4}}) {
    Layout wire = layout;
    wire.wire = kernels::DType::kBF16;
    const auto rounded = Reduce(4, 4, wire);
    EXPECT_NE(rounded, exact);
    for (ParameterId id = 0; id < registry.size(); ++id) {
      for (int64_t i = 0; i < registry.at(id).elements(); ++i) {
        double size = 0;
        for (int j = 0; j < 4; ++j) size += std::abs(Contribution(j, id * 1000 + i));
        // Contributions; with replicas also the shard's sum, and the total on its way back.
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
  // Sums that wait for a partner, when the newest is never one of them.
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
