// Optimizer state and activations in host memory give the same bits as on the device, and take less
// device memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/rng.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/optim/optimizer_offload.h"
#include "parallel/pipeline/executor.h"
#include "tests/parity/harness.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

Case Offloaded(double share, int data = 2, int zero = 0) {
  Case run;
  run.model = SmallLlama();
  run.layout.degrees = PerAxis(1, data, 1, 1);
  run.layout.zero = zero;
  run.layout.global_batch = 8;
  run.layout.micro_batch = 2;
  run.steps = 10;
  run.adjust = [share](TrainerOptions& options) {
    options.offload_optimizer = share;
    options.host_threads = 2;
    options.verify_every = 5;
  };
  return run;
}

TEST(Offload, EveryShareAndStageOfZero_HasTheBitsOfTheDevice) {
  Harness harness;
  const auto expected = harness.Train(Offloaded(0));
  EXPECT_EQ(expected[0].host_state_bytes, 0);
  for (const int zero : {0, 1, 2, 3}) {
    for (const double share : {0.4, 1.0}) {
      for (const bool overlap : {true, false}) {
        SCOPED_TRACE(absl::StrCat("zero ", zero, ", share ", share, ", overlap ", overlap));
        Case run = Offloaded(share, 2, zero);
        run.overlap = overlap;
        const auto results = harness.Train(run);
        EXPECT_EQ(results[0].losses, expected[0].losses);
        EXPECT_EQ(results[0].norms, expected[0].norms);
        EXPECT_GT(results[0].host_state_bytes, 0);
      }
    }
  }
  EXPECT_EQ(harness.Train(Offloaded(1, 1))[0].losses, expected[0].losses);
}

// The model has six blocks; the activations of two of them are on the device at a time.
TEST(Offload, Activations_GiveTheSameBitsWithLessOfTheDevice) {
  Harness harness;
  struct Layout {
    PerAxis degrees;
    PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
    int chunks = 1;
    ContextMethod method = ContextMethod::kRing;
  };
  for (const Layout& layout : {Layout{PerAxis(1, 1, 1, 1)}, Layout{PerAxis(1, 2, 1, 2)},
                               Layout{PerAxis(2, 1, 1, 1), PipelineSchedule::kGPipe},
                               Layout{PerAxis(2, 1, 1, 1), PipelineSchedule::kInterleaved, 3},
                               Layout{PerAxis(1, 1, 2, 1), PipelineSchedule::kOneForwardOneBackward,
                                      1, ContextMethod::kAllToAll}}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      Case run = Offloaded(0);
      run.model = SmallLlama(/*layers=*/6);
      run.layout.degrees = layout.degrees;
      run.layout.pipeline_chunks = layout.chunks;
      run.schedule = layout.schedule;
      run.context_method = layout.method;
      run.recompute = recompute;
      run.evaluate_every = 4;
      if (muster::testing::kSanitized) run.steps = 4;
      SCOPED_TRACE(run.ToString());
      const RankResult on_device = harness.Train(run)[0];
      run.offload_activations = true;
      ExpectSameBits(on_device, harness.Train(run)[0]);
    }
  }
}

TEST(Offload, DeviceMemoryOfActivations_DoesNotGrowWithTheBlocks) {
  const auto planned = [](int layers, bool offload) {
    kernels::Arena arena;
    ModelParallel part;
    part.offload_activations = offload;
    const auto model = *MakeModel(SmallLlama(layers), part);
    const int64_t host = PipelineExecutor::PlanMemory(
        MakePipelinePlan({.micro_batches = 2}), *model, 0, arena, {.batch = 2, .sequence = 16});
    return std::pair(arena.peak_bytes(), host);
  };
  EXPECT_EQ(planned(8, true).first, planned(4, true).first);
  EXPECT_EQ(planned(2, true).first, planned(2, false).first);
  EXPECT_EQ(planned(2, true).second, 0);
  EXPECT_EQ(planned(8, false).second, 0);
  // The host has what the device does not.
  EXPECT_EQ(planned(8, true).first + planned(8, true).second, planned(8, false).first);
}

// Two kinds of blocks in turn: each has a slot of its own, and the host has nothing but
// activations.
TEST(Offload, ActivationsOfUnequalBlocks_TakeWhatEachNeeds) {
  ModelDescription model = SmallHybrid(/*layers=*/1, /*llama=*/true);
  model.sizes["layers"] = 6;
  model.texts["pattern"] = "M-MM-MM-M";
  const auto planned = [&](bool offload) {
    kernels::Arena arena;
    ModelParallel part;
    part.offload_activations = offload;
    const int64_t host = PipelineExecutor::PlanMemory(MakePipelinePlan({.micro_batches = 2}),
                                                      **MakeModel(model, part), 0, arena,
                                                      {.batch = 2, .sequence = 16});
    return std::pair(arena.peak_bytes(), host);
  };
  const auto [device, host] = planned(true);
  EXPECT_GT(host, 0);
  EXPECT_EQ(device + host, planned(false).first);

  Harness harness;
  for (const char* const pattern : {"M-MM-MM-M", "MM-MMM-M-"}) {
    Case run = Offloaded(0);
    model.texts["pattern"] = pattern;
    run.model = model;
    SCOPED_TRACE(run.ToString());
    const RankResult on_device = harness.Train(run)[0];
    run.offload_activations = true;
    ExpectSameBits(on_device, harness.Train(run)[0]);
  }
}

TEST(Offload, ActivationsWithABackwardInTwoParts_AreRefused) {
  ModelParallel part;
  part.offload_activations = part.split_backward = true;
  EXPECT_THAT(MakeModel(SmallLlama(), part).status(),
              ::muster::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                          ::testing::HasSubstr("use schedule 1f1b")));
}

TEST(Offload, PipelineAndTensorParallelRanks_HaveTheBitsOfTheDevice) {
  Harness harness;
  for (const PerAxis& degrees : {PerAxis(2, 2, 1, 1), PerAxis(1, 2, 1, 2)}) {
    Case on_device = Offloaded(0), on_host = Offloaded(0.7);
    on_device.layout.degrees = on_host.layout.degrees = degrees;
    EXPECT_EQ(harness.Train(on_host)[0].losses, harness.Train(on_device)[0].losses);
  }
}

TEST(Offload, CheckpointsOfOneKind_AreResumedByTheOther) {
  Harness harness;
  const auto whole = harness.Train(Offloaded(0));
  for (const double first_share : {0.0, 0.5}) {
    Case first = Offloaded(first_share);
    first.stop_after = first.save_every = 4;
    Case second = Offloaded(0.5 - first_share, 2, /*zero=*/1);
    second.restore = harness.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const auto& losses = whole[0].losses;
    EXPECT_EQ(harness.Train(second)[0].losses,
              std::vector<double>(losses.begin() + 4, losses.end()));
  }
}

TEST(Offload, StateBytes_MoveFromTheDeviceToTheHost) {
  Harness harness;
  const auto on_device = harness.Train(Offloaded(0, 2, /*zero=*/1));
  const auto on_host = harness.Train(Offloaded(1, 2, /*zero=*/1));
  // fp32: the device needs the parameters themselves either way, but not the two moments.
  EXPECT_EQ(on_host[0].host_state_bytes % 12, 0);
  EXPECT_EQ(on_device[0].state_bytes - on_host[0].state_bytes,
            on_host[0].host_state_bytes / 12 * 8);
}

ParameterRegistry TwoMatrices() {
  ParameterRegistry registry;
  for (const char* name : {"first", "second"}) {
    Parameter parameter;
    parameter.name = name;
    // Longer than a tile, and no multiple of one.
    parameter.global_shape = {4400, 1009};
    parameter.weight_decay = true;
    parameter.initializer = Initializer::kNormal;
    parameter.stddev = 0.1f;
    registry.Add(parameter);
  }
  return registry;
}

// Three updates, the second of which is skipped, with `host_buckets` of two buckets offloaded.
struct Updated {
  std::vector<float> masters;
  std::vector<char> copies;
  int64_t device_bytes = 0, host_bytes = 0;

  Updated(kernels::DType compute, int host_buckets) {
    const ParameterRegistry registry = TwoMatrices();
    const FlatLayout layout(registry, 1 << 20, 1);
    CHECK_EQ(layout.buckets().size(), 2u);
    const auto cpu = kernels::MakeCpuDevice(1);
    kernels::Device& device = *cpu;
    const auto stream = *device.MakeStream({});
    const auto flat =
        *FlatBuffers::Make(device, *stream, registry, layout,
                           {.seed = 5, .compute = compute, .host_buckets = host_buckets});
    // With dynamic loss scaling, the second step, which overflows, is skipped in every dtype.
    const auto optimizer = *Optimizer::Make(
        *flat, device, *stream,
        {.schedule = {.peak = 0.01},
         .loss_scaling = {.dynamic = true, .initial = 8, .growth_interval = 99, .hysteresis = 1}});
    std::unique_ptr<OptimizerOffload> offload;
    if (host_buckets > 0) offload = *OptimizerOffload::Make(*flat, *optimizer, device, 2);
    device_bytes = device.allocated_bytes();
    host_bytes = FlatBuffers::HostBytes(layout, flat->options()) +
                 OptimizerOffload::HostBytes(layout, flat->options());
    Rng rng(7);
    for (int step = 0; step < 3; ++step) {
      for (int bucket = 0; bucket < 2; ++bucket) {
        const kernels::Tensor gradient = flat->own_gradient(bucket);
        for (const FlatSlice& slice : layout.Slices(layout.Part(bucket, 0))) {
          float* g = gradient.f32() + (slice.flat - layout.buckets()[bucket].range.begin);
          for (int64_t i = 0; i < slice.count; ++i) g[i] = static_cast<float>(rng.Uniform() - 0.5);
        }
        if (step == 1) gradient.f32()[3] = std::numeric_limits<float>::infinity();
      }
      std::vector<float> values = {1, 1, 0, 0, 0};
      const kernels::Tensor all(values.data(), kernels::DType::kF32, {5});
      if (offload != nullptr) {
        offload->FetchGradients(*stream, [](int) { return nullptr; });
      }
      optimizer->SumSquares(*stream, all.Rows(3, 2));
      optimizer->Prepare(*stream, all, 1, 1, 1.0);
      if (offload != nullptr) offload->Update(*stream);
      optimizer->Update(*stream, [](int) {});
      // From here on the device may write the gradients of the next step.
      for (int bucket = 0; bucket < 2; ++bucket) kernels::Zero(*stream, flat->own_gradient(bucket));
    }
    if (offload != nullptr) {
      offload->Join(*stream);
      EXPECT_OK(offload->status());
    }
    for (int bucket = 0; bucket < 2; ++bucket) {
      const kernels::Tensor whole = flat->whole_parameters(bucket);
      std::vector<float> own(flat->m(bucket).elements());
      flat->ReadMaster(
          *stream, bucket, 0,
          kernels::Tensor(own.data(), kernels::DType::kF32, {static_cast<int64_t>(own.size())}));
      EXPECT_OK(stream->Synchronize());
      masters.insert(masters.end(), own.begin(), own.end());
      const char* bytes = static_cast<const char*>(whole.data());
      copies.insert(copies.end(), bytes, bytes + whole.bytes());
    }
  }
};

TEST(Offload, TilesSkippedStepsAndSixteenBitCopies_HaveTheBitsOfTheDevice) {
  for (const kernels::DType compute : {kernels::DType::kF32, kernels::DType::kBF16}) {
    const Updated expected(compute, 0);
    for (const int host_buckets : {1, 2}) {
      const Updated offloaded(compute, host_buckets);
      EXPECT_EQ(offloaded.masters, expected.masters);
      EXPECT_TRUE(offloaded.copies == expected.copies);
      const int64_t moved = host_buckets * int64_t{4400 * 1009};
      // m, v, and the lower 16 bits of the master weights, which the bf16 weights do not have.
      const double per_element = compute == kernels::DType::kF32 ? 8 : 10;
      EXPECT_NEAR(static_cast<double>(expected.device_bytes - offloaded.device_bytes) /
                      static_cast<double>(moved),
                  per_element, 0.01);
      EXPECT_GT(offloaded.host_bytes, 16 * moved);
    }
  }
}

TEST(Offload, Shares_AreRoundedToBuckets) {
  const ParameterRegistry registry = TwoMatrices();
  const FlatLayout layout(registry, 1 << 20, 1);
  EXPECT_EQ(HostBuckets(layout, 0), 0);
  EXPECT_EQ(HostBuckets(layout, 1e-6), 1);
  EXPECT_EQ(HostBuckets(layout, 0.5), 1);
  EXPECT_EQ(HostBuckets(layout, 0.74), 1);
  EXPECT_EQ(HostBuckets(layout, 0.76), 2);
  EXPECT_EQ(HostBuckets(layout, 1), 2);
}

}  // namespace
}  // namespace muster::parallel::parity
