// Waits of the computing stream are counted by what they wait for, and a rank that comes late is
// the one that does not wait.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/comm/exposure.h"
#include "tests/parity/harness.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

void BusyFor(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

double Of(const ExposedSeconds& seconds, Exposure kind) { return seconds.of(kind); }

TEST(ExposureMeter, WaitsOfTheComputingStream_AreCountedByKindCollectiveAndStep) {
  const auto device = kernels::MakeCpuDevice(1);
  const auto compute = *device->MakeStream();
  const auto beside = *device->MakeStream({.threaded = true});
  const auto done = *device->MakeEvent();
  ExposureMeter meter(*device, *compute, 2);
  const auto wait = [&](Exposure kind, Collective collective, kernels::Stream& stream) {
    meter.Begin(kind, collective, stream);
    // Enqueued after Begin(), so that a pause of this thread cannot make the measured wait shorter.
    beside->Enqueue([] { BusyFor(std::chrono::milliseconds(20)); });
    beside->Record(*done);
    stream.Wait(*done);
    meter.End(stream);
  };
  wait(Exposure::kTensor, Collective::kAllReduce, *compute);  // outside of a step
  meter.BeginStep(0);
  wait(Exposure::kGradients, Collective::kAllReduce, *compute);
  wait(Exposure::kGradients, Collective::kReduceScatter, *compute);
  wait(Exposure::kPipeline, Collective::kSendReceive, *compute);
  wait(Exposure::kContext, Collective::kSendReceive, *beside);
  ASSERT_OK(beside->Synchronize());
  meter.BeginStep(1);
  wait(Exposure::kParameters, Collective::kAllGather, *compute);
  meter.EndStep();
  const ExposedSeconds first = meter.Seconds(0), second = meter.Seconds(1);
  EXPECT_GE(Of(first, Exposure::kGradients), 0.040);
  EXPECT_GE(Of(first, Exposure::kPipeline), 0.020);
  EXPECT_GE(first.at(Exposure::kGradients, Collective::kReduceScatter), 0.020);
  EXPECT_GE(first.at(Exposure::kPipeline, Collective::kSendReceive), 0.020);
  EXPECT_EQ(first.at(Exposure::kPipeline, Collective::kAllReduce), 0);
  EXPECT_DOUBLE_EQ(first.of(Collective::kAllReduce) + first.of(Collective::kReduceScatter) +
                       first.of(Collective::kSendReceive),
                   first.total());
  EXPECT_EQ(Of(first, Exposure::kContext), 0);
  EXPECT_EQ(Of(first, Exposure::kTensor), 0);
  EXPECT_EQ(Of(first, Exposure::kParameters), 0);
  EXPECT_GE(Of(second, Exposure::kParameters), 0.020);
  EXPECT_EQ(Of(second, Exposure::kGradients), 0);
  // BeginStep() clears the slot.
  meter.BeginStep(0);
  EXPECT_EQ(meter.Seconds(0), ExposedSeconds{});
}

// Delays one of two ranks by 20 ms before the exchange at the end of every step.
class LateRank : public muster::testing::ForwardingCommunicator {
 public:
  LateRank(std::unique_ptr<Communicator> inner, int late,
           std::shared_ptr<std::atomic<int>> arrivals)
      : ForwardingCommunicator(std::move(inner)), late_(late), arrivals_(std::move(arrivals)) {}
  void AllReduce(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) override {
    ++calls_;
    if (rank() == late_) {
      while (*arrivals_ < calls_) std::this_thread::yield();
      BusyFor(std::chrono::milliseconds(20));
    } else {
      ++*arrivals_;
    }
    inner_->AllReduce(stream, data, op);
  }

 private:
  const int late_;
  const std::shared_ptr<std::atomic<int>> arrivals_;
  int calls_ = 0;
};

Case Steps(const PerAxis& degrees, int zero = 0) {
  Case run;
  run.model = SmallLlama();
  run.layout.degrees = degrees;
  run.layout.zero = zero;
  run.layout.global_batch = 8;
  run.layout.micro_batch = 2;
  run.steps = 7;
  return run;
}

TEST(Exposure, TheOthers_WaitForTheLateRank) {
  Harness harness;
  Case run = Steps(PerAxis(1, 2, 1, 1));
  const auto arrivals = std::make_shared<std::atomic<int>>(0);
  run.wrap = [&](std::unique_ptr<Communicator> world) {
    return std::make_unique<LateRank>(std::move(world), /*late=*/1, arrivals);
  };
  const auto results = harness.Train(run);
  for (const StepReport& report : results[0].reports) {
    EXPECT_GE(Of(report.exposed, Exposure::kSlowest), 0.020);
    EXPECT_LE(report.exposed_communication_seconds, report.seconds);
  }
}

// The waits of a run, summed over ranks and steps.
double Waits(Harness& harness, const Case& run, Exposure kind, Collective collective) {
  double seconds = 0;
  for (const RankResult& result : harness.Train(run)) {
    for (const StepReport& report : result.reports) seconds += report.exposed.at(kind, collective);
  }
  return seconds;
}

TEST(Exposure, EveryAxis_HasItsKindAndCollective) {
  Harness harness;
  const auto waits = [&](const PerAxis& degrees, int zero, Exposure kind, Collective collective) {
    return Waits(harness, Steps(degrees, zero), kind, collective);
  };
  const PerAxis data(1, 2, 1, 1);
  EXPECT_GT(waits(data, 0, Exposure::kGradients, Collective::kAllReduce), 0);
  EXPECT_GT(waits(data, 1, Exposure::kGradients, Collective::kReduceScatter), 0);
  EXPECT_EQ(waits(data, 1, Exposure::kGradients, Collective::kAllReduce), 0);
  EXPECT_GT(waits(data, 3, Exposure::kParameters, Collective::kAllGather), 0);
  EXPECT_GT(waits(data, 0, Exposure::kSlowest, Collective::kAllReduce), 0);
  EXPECT_GT(waits(PerAxis(2, 1, 1, 1), 0, Exposure::kPipeline, Collective::kSendReceive), 0);
  EXPECT_GT(waits(PerAxis(1, 1, 1, 2), 0, Exposure::kTensor, Collective::kAllReduce), 0);
  EXPECT_EQ(waits(data, 0, Exposure::kTensor, Collective::kAllReduce), 0);
  EXPECT_EQ(waits(PerAxis(1, 1, 1, 1), 0, Exposure::kSlowest, Collective::kAllReduce), 0);
}

// With overlap, attention waits for the rest of an exchange; without, for all of it.
TEST(Exposure, EveryContextMethod_HasItsCollective) {
  Harness harness;
  Case run = Steps(PerAxis(1, 1, 2, 1));
  for (const bool overlap : {true, false}) {
    run.overlap = overlap;
    const auto waits = [&](ContextMethod method, Collective collective) {
      run.context_method = method;
      return Waits(harness, run, Exposure::kContext, collective);
    };
    EXPECT_GT(waits(ContextMethod::kRing, Collective::kSendReceive), 0);
    EXPECT_GT(waits(ContextMethod::kAllGather, Collective::kAllGather), 0);
    EXPECT_GT(waits(ContextMethod::kAllToAll, Collective::kAllToAll), 0);
    EXPECT_EQ(waits(ContextMethod::kRing, Collective::kAllToAll), 0);
  }
}

// What the computing stream waits for of collectives that run beside it counts as kTensor alone.
TEST(Exposure, TensorCollectivesThatOverlap_CountAsSuch) {
  Harness harness;
  for (const TensorOverlap overlap : {TensorOverlap::kNone, TensorOverlap::kBackward,
                                      TensorOverlap::kChunked, TensorOverlap::kHalves}) {
    Case run = Steps(PerAxis(1, 1, 1, 2));
    run.layout.sequence_parallel = true;
    run.tensor_overlap = overlap;
    SCOPED_TRACE(run.ToString());
    for (const RankResult& result : harness.Train(run)) {
      for (const StepReport& report : result.reports) {
        EXPECT_GT(Of(report.exposed, Exposure::kTensor), 0);
        EXPECT_EQ(Of(report.exposed, Exposure::kContext), 0);
        EXPECT_EQ(Of(report.exposed, Exposure::kPipeline), 0);
        EXPECT_LE(report.exposed_communication_seconds, report.seconds);
      }
    }
  }
}

}  // namespace
}  // namespace muster::parallel::parity
