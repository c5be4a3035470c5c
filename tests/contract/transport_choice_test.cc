// The choice between copy engines and NCCL, from measured times; and the measurement, on hosts.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/transport_choice.h"
#include "parallel/comm/transport_timing.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;
using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(ChooseTransports, NothingTimed_LeavesEverythingToCopyEngines) {
  const TransportChoice choice = ChooseTransports({});
  EXPECT_EQ(choice.AllGather(1), Transport::kCopyEngines);
  EXPECT_THAT(Describe(choice, {}), HasSubstr("not timed"));
}

TEST(ChooseTransports, CopyEnginesALittleSlowerAlone_AreTaken) {
  const TransportTimes times = {{{4 * kMiB, 50e-6, 41e-6}, {64 * kMiB, 400e-6, 390e-6}}, {}};
  EXPECT_EQ(ChooseTransports(times).all_gather_from, 0);
}

TEST(ChooseTransports, CopyEnginesTooSlowBelowASize_AreTakenFromThereOn) {
  const TransportTimes times = {
      {{4 * kMiB, 90e-6, 41e-6}, {16 * kMiB, 120e-6, 110e-6}, {64 * kMiB, 400e-6, 390e-6}}, {}};
  const TransportChoice choice = ChooseTransports(times);
  EXPECT_EQ(choice.AllGather(16 * kMiB - 1), Transport::kNccl);
  EXPECT_EQ(choice.AllGather(16 * kMiB), Transport::kCopyEngines);
  EXPECT_THAT(Describe(choice, times), HasSubstr("copy engines from 16 MiB on, else NCCL"));
}

TEST(ChooseTransports, CopyEnginesTooSlowAtTheLargestSize_AreNotTaken) {
  const TransportTimes times = {{{4 * kMiB, 40e-6, 41e-6}, {64 * kMiB, 4e-3, 1e-3}},
                                {{4 * kMiB, 40e-6, 41e-6}, {64 * kMiB, 4e-3, 1e-3}}};
  const TransportChoice choice = ChooseTransports(times);
  EXPECT_EQ(choice.all_gather_from, TransportChoice::kNever);
  EXPECT_EQ(choice.AllGather(int64_t{1} << 40), Transport::kNccl);
  // Sums do not follow: their bits would depend on a clock.
  EXPECT_THAT(Describe(choice, times), HasSubstr("all-gather by NCCL (4 MiB: 40 us, NCCL 41 us; "
                                                 "64 MiB: 4000 us, NCCL 1000 us)"));
  EXPECT_THAT(Describe(choice, times), HasSubstr("sums by copy engines, always"));
  EXPECT_THAT(Describe(choice, times), HasSubstr("parallel.copy_engines: false"));
}

TEST(SlowestOf, TakesTheSlowestRankOfEachTime) {
  const TransportTimes first = {{{4 * kMiB, 1, 4}}, {{4 * kMiB, 2, 2}}};
  const TransportTimes second = {{{4 * kMiB, 3, 2}}, {{4 * kMiB, 1, 5}}};
  ASSERT_OK_AND_ASSIGN(const TransportTimes slowest, SlowestOf({first, second}));
  EXPECT_EQ(slowest.ToText(), (TransportTimes{{{4 * kMiB, 3, 4}}, {{4 * kMiB, 2, 5}}}.ToText()));
  EXPECT_THAT(SlowestOf({first, {}}).status(), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(TransportTimes, Text_IsReadBackAndGarbageIsAnError) {
  const TransportTimes times = {{{4 * kMiB, 1.25e-5, 3e-5}, {64 * kMiB, 2, 3}}, {}};
  ASSERT_OK_AND_ASSIGN(const TransportTimes read, TransportTimes::FromText(times.ToText()));
  ASSERT_EQ(read.all_gather.size(), 2u);
  EXPECT_EQ(read.all_gather[0].copy_engines_s, 1.25e-5);
  EXPECT_EQ(read.all_gather[1].bytes, 64 * kMiB);
  EXPECT_TRUE(read.reduce_scatter.empty());
  for (const char* bad : {"", "1 2 3", "1 2;", "a b c;", "1 2 3 4;"}) {
    EXPECT_THAT(TransportTimes::FromText(bad), Not(IsOk())) << bad;
  }
}

// What every rank of a group of two gets that has `bytes` of shared memory.
std::vector<TransportTimes> TimedWith(const std::vector<int64_t>& bytes) {
  auto group = MakeLocalCommunicators(2, absl::Seconds(60));
  auto host = MakeLocalCommunicators(2, absl::Seconds(60));
  std::vector<TransportTimes> times(2);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = kernels::MakeCpuDevice(1);
      std::vector<char> memory(static_cast<size_t>(bytes[rank]));
      std::vector<Transport> forced;
      const auto timed = TimeTransports(
          {.group = *group[rank],
           .host = *host[rank],
           .device = *device,
           .shared = memory.empty() ? Tensor() : Tensor(memory.data(), DType::kU8, {bytes[rank]}),
           .least_bytes = 0,
           .force = [&](Transport transport) { forced.push_back(transport); },
           .use_for_sums = [](const Tensor& sums) { EXPECT_GE(sums.bytes(), 4 * kMiB); }});
      ASSERT_OK(timed);
      times[rank] = *timed;
      EXPECT_EQ(forced.size(), 2 * timed->all_gather.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return times;
}

TEST(TimeTransports, RanksGetTheSameTimesOfTheSizesThatFit) {
  const std::vector<TransportTimes> times = TimedWith({17 * kMiB, 5 * kMiB});
  EXPECT_EQ(times[0].ToText(), times[1].ToText());
  ASSERT_EQ(times[0].all_gather.size(), 1u);
  EXPECT_EQ(times[0].all_gather[0].bytes, 4 * kMiB);
  EXPECT_GT(times[0].all_gather[0].copy_engines_s, 0);
  EXPECT_GT(times[0].reduce_scatter[0].nccl_s, 0);
}

TEST(TimeTransports, RankWithoutSharedMemory_NobodyTimesAnything) {
  for (const TransportTimes& times : TimedWith({17 * kMiB, 0})) {
    EXPECT_TRUE(times.all_gather.empty());
  }
}

}  // namespace
}  // namespace muster::parallel
