#include "cli/step_breakdown.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "kernels/device/trace.h"

namespace muster::cli {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pair;

constexpr int64_t kMs = 1'000'000;

// Matches a part by its seconds, given as milliseconds.
auto Part(const char* name, double ms) { return Pair(name, DoubleNear(ms * 1e-3, 1e-9)); }

TEST(StepBreakdown, KernelsOfTwoSteps_CountOnceAndCommunicationOnlyWhereNothingElseRuns) {
  kernels::Trace trace;
  trace.Add("engine", "step 7", 100 * kMs, 120 * kMs);
  trace.Add("engine", "step 8", 120 * kMs, 140 * kMs);
  const std::string stream = "device, stream 7", other = "device, stream 9";
  // The rest of a step before the recorded ones.
  trace.Add(stream, "nvjet_hsh_128x256", 96 * kMs, 110 * kMs);
  trace.Add(stream, "void muster::kernels::cuda::flash::ForwardKernel<__nv_bfloat16>(Data)",
            110 * kMs, 113 * kMs);
  trace.Add(stream,
            "void muster::kernels::cuda::forward::HopperAttentionForwardKernel<__half>(Data)",
            113 * kMs, 116 * kMs);
  trace.Add(stream, "cudnn_generated_fort_native_sdpa_sm90", 116 * kMs, 118 * kMs);
  trace.Add(stream, "muster::kernels::cuda::(anonymous namespace)::HopperGemmKernel", 118 * kMs,
            120 * kMs);
  trace.Add(stream, "ElementwiseKernel with \"quotes\"", 122 * kMs, 130 * kMs);
  trace.Add(other, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 112 * kMs, 134 * kMs);
  trace.Add(other, "copy of 12 bytes", 139 * kMs, 150 * kMs);
  const StepBreakdown found = BreakDown(trace.ToJson(3, "rank 3"));
  EXPECT_EQ(found.steps, 2);
  EXPECT_TRUE(found.gpu);
  EXPECT_DOUBLE_EQ(found.step, 0.02);
  // Of 40 ms: GEMMs 10 + 2, attention 8, others 8 + 1, only NCCL at 120-122 and 130-134, idle 5.
  EXPECT_THAT(found.parts,
              ElementsAre(Part("gemm", 6), Part("attention", 4), Part("bandwidth", 4.5),
                          Part("communication", 3), Part("idle", 2.5)));
}

// Collectives by copy engines run no kernel of NCCL's.
TEST(StepBreakdown, CopyEngines_AreCommunicationAndOtherCopiesAreNot) {
  kernels::Trace trace;
  trace.Add("engine", "step 1", 0, 100 * kMs);
  const std::string computing = "device, stream 7", gradients = "device, stream 9",
                    lane = "device, stream 11", offload = "device, stream 13";
  trace.Add(computing, "nvjet_hsh_128x256", 0, 40 * kMs);
  trace.Add(computing, "copy of 8 bytes, device to device", 40 * kMs, 45 * kMs);
  trace.Add(gradients, "muster::kernels::cuda::(anonymous namespace)::PeerBarrierKernel(int)",
            45 * kMs, 50 * kMs);
  trace.Add(lane, "copy of 64 bytes, between devices", 50 * kMs, 60 * kMs);
  trace.Add(lane, "copy of 64 bytes, device to device", 60 * kMs, 65 * kMs);
  trace.Add(gradients, "void muster::ElementwiseKernel<4, SumPartsElements<2, float>>(long)",
            65 * kMs, 68 * kMs);
  trace.Add(offload, "copy of 99 bytes, device to host", 68 * kMs, 78 * kMs);
  trace.Add(computing, "nvjet_hsh_128x256", 90 * kMs, 100 * kMs);
  EXPECT_THAT(BreakDown(trace.ToJson(0, "rank 0")).parts,
              ElementsAre(Part("gemm", 50), Part("attention", 0), Part("bandwidth", 15),
                          Part("communication", 23), Part("idle", 12)));
}

// The host enqueues two steps while the device still runs the one before.
TEST(StepBreakdown, HostThatEnqueuesAhead_CountsTheStepsAsTheDeviceRunsThem) {
  kernels::Trace trace;
  const std::string stream = "device, stream 7";
  trace.Add("enqueued by the host", "step 7", 50 * kMs, 60 * kMs);
  trace.Add("enqueued by the host", "step 8", 60 * kMs, 90 * kMs);
  trace.Add(stream, "nvjet_hsh_128x256", 100 * kMs, 180 * kMs);
  trace.Add("steps", "step 7", 100 * kMs, 200 * kMs);
  trace.Add(stream, "ElementwiseKernel", 200 * kMs, 290 * kMs);
  trace.Add("steps", "step 8", 200 * kMs, 300 * kMs);
  trace.Add(stream, "nvjet_hsh_128x256", 300 * kMs, 380 * kMs);  // of the step after them
  const StepBreakdown found = BreakDown(trace.ToJson(3, "rank 3"));
  EXPECT_EQ(found.steps, 2);
  EXPECT_DOUBLE_EQ(found.step, 0.1);
  EXPECT_THAT(found.parts,
              ElementsAre(Part("gemm", 40), Part("attention", 0), Part("bandwidth", 45),
                          Part("communication", 0), Part("idle", 15)));
}

TEST(StepBreakdown, TraceOfAHost_IsBrokenDownByPhases) {
  kernels::Trace trace;
  trace.Add("engine", "step 1", 0, 100 * kMs);
  trace.Add("engine", "wait for data", 0, 1 * kMs);
  for (int64_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
    trace.Add("engine", "forward", (10 + 40 * micro_batch) * kMs, (20 + 40 * micro_batch) * kMs);
    trace.Add("engine", "backward", (20 + 40 * micro_batch) * kMs, (45 + 40 * micro_batch) * kMs);
  }
  trace.Add("engine", "update", 85 * kMs, 95 * kMs);
  const StepBreakdown found = BreakDown(trace.ToJson(0, "rank 0"));
  EXPECT_FALSE(found.gpu);
  EXPECT_THAT(found.parts, ElementsAre(Part("forward", 20), Part("backward", 50),
                                       Part("update", 10), Part("data", 1), Part("other", 19)));
}

TEST(StepBreakdown, GarbageAndTracesWithoutSteps_HaveNoSteps) {
  for (const char* trace : {"", "[]", "garbage\n{\"ph\":\n[[[", "[{\"ph\":\"X\"}]", "[1,\n{}]"}) {
    EXPECT_EQ(BreakDown(trace).steps, 0) << trace;
  }
}

}  // namespace
}  // namespace muster::cli
