// How many workers of a group are wanted.
#include "coordinator/wanted_workers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

const WorkerGroup kGroup{"muster-worker-gpu", v1::DEVICE_KIND_CUDA, 8, 4};

v1::Worker Worker(const std::string& name, int devices, const std::vector<std::string>& jobs = {}) {
  v1::Worker worker;
  worker.set_name(name);
  worker.set_state(v1::WORKER_STATE_READY);
  for (int i = 0; i < devices; ++i) worker.add_devices()->set_kind(v1::DEVICE_KIND_CUDA);
  for (const std::string& job : jobs) worker.add_jobs(job);
  return worker;
}

JobView Job(int ranks, v1::JobState state, v1::WaitCode code = v1::WAIT_CODE_UNSPECIFIED,
            const std::vector<std::string>& on = {}, int tensor = 1,
            v1::DeviceKind device = v1::DEVICE_KIND_CUDA) {
  JobView view;
  v1::Job spec, now, placed;
  spec.mutable_spec()->mutable_resources()->set_ranks(ranks);
  spec.mutable_spec()->mutable_resources()->set_device(device);
  spec.mutable_spec()->mutable_engine()->mutable_parallel()->set_tensor(tensor);
  now.set_state(state);
  if (code != v1::WAIT_CODE_UNSPECIFIED) now.mutable_waiting()->set_code(code);
  for (const std::string& worker : on) {
    v1::RankStatus& rank = *placed.add_ranks();
    rank.set_worker(worker);
    rank.set_state(v1::RANK_STATE_TRAINING);
  }
  view[JobPart::kSpec] = std::make_shared<v1::Job>(spec);
  view[JobPart::kState] = std::make_shared<v1::Job>(now);
  view[JobPart::kRanks] = std::make_shared<v1::Job>(placed);
  return view;
}

TEST(WantedWorkers, JobsThatShareDevices_CountByTheirShares) {
  const auto sharing = [](int ranks, double share) {
    JobView job = Job(ranks, v1::JOB_STATE_QUEUED, v1::WAIT_CODE_SLOTS_TAKEN);
    v1::Job spec = *job[JobPart::kSpec];
    spec.mutable_spec()->mutable_resources()->set_share(share);
    job[JobPart::kSpec] = std::make_shared<v1::Job>(spec);
    return job;
  };
  const std::vector<v1::Worker> none;
  EXPECT_EQ(WantedWorkers(kGroup, {sharing(8, 0.5), sharing(8, 0.5)}, none), 1);
  EXPECT_EQ(WantedWorkers(kGroup, {sharing(9, 0.1)}, none), 2) << "each rank has a device";
  EXPECT_EQ(WantedWorkers(kGroup, {sharing(8, 0.6), sharing(8, 0.6)}, none), 2);
  EXPECT_EQ(WantedWorkers(kGroup, std::vector<JobView>(24, sharing(1, 0.333)), none), 1);
}

TEST(WantedWorkers, GangsThatWaitForDevicesCount_OthersDoNot) {
  const auto queued = [](int ranks, v1::WaitCode code) {
    return Job(ranks, v1::JOB_STATE_QUEUED, code);
  };
  EXPECT_EQ(WantedWorkers(kGroup, {}, {}), 0);
  EXPECT_EQ(WantedWorkers(kGroup, {queued(9, v1::WAIT_CODE_NO_WORKERS)}, {}), 2);
  EXPECT_EQ(
      WantedWorkers(kGroup, {queued(9, v1::WAIT_CODE_SLOTS_TAKEN), queued(7, v1::WAIT_CODE_BEHIND)},
                    {}),
      2);
  for (const v1::WaitCode code :
       {v1::WAIT_CODE_AFTER, v1::WAIT_CODE_HELD, v1::WAIT_CODE_QUEUE_QUOTA,
        v1::WAIT_CODE_QUEUE_JOBS, v1::WAIT_CODE_TENANT_LIMIT, v1::WAIT_CODE_NO_QUEUE,
        v1::WAIT_CODE_QUOTA_TOO_SMALL}) {
    EXPECT_EQ(WantedWorkers(kGroup, {queued(8, code)}, {}), 0) << code;
  }
  EXPECT_EQ(WantedWorkers(kGroup, {Job(8, v1::JOB_STATE_HELD), Job(8, v1::JOB_STATE_STOPPING)}, {}),
            0);
  EXPECT_EQ(
      WantedWorkers(
          kGroup,
          {Job(8, v1::JOB_STATE_QUEUED, v1::WAIT_CODE_NO_WORKERS, {}, 1, v1::DEVICE_KIND_CPU)}, {}),
      0);
}

TEST(WantedWorkers, AnElasticJob_WantsItsSmallestSizeAndThenWhatItHasOrWasAskedFor) {
  const auto elastic = [](v1::JobState state, int has, int asked) {
    JobView view = Job(32, state, v1::WAIT_CODE_UNSPECIFIED,
                       std::vector<std::string>(static_cast<size_t>(has), "elsewhere"));
    v1::Job spec = *view[JobPart::kSpec], now = *view[JobPart::kState];
    for (const int size : {8, 16, 32}) spec.add_sizes(size);
    now.set_ranks_wanted(asked);
    view[JobPart::kSpec] = std::make_shared<v1::Job>(spec);
    view[JobPart::kState] = std::make_shared<v1::Job>(now);
    return view;
  };
  EXPECT_EQ(WantedWorkers(kGroup, {elastic(v1::JOB_STATE_QUEUED, 0, 0)}, {}), 1);
  // What it had before it went back to the queue does not count.
  EXPECT_EQ(WantedWorkers(kGroup, {elastic(v1::JOB_STATE_QUEUED, 16, 0)}, {}), 1);
  EXPECT_EQ(WantedWorkers(kGroup, {elastic(v1::JOB_STATE_RUNNING, 16, 0)}, {}), 2);
  EXPECT_EQ(WantedWorkers(kGroup, {elastic(v1::JOB_STATE_RUNNING, 16, 32)}, {}), 4);
}

TEST(WantedWorkers, AGangThatCanNeverFit_IsNoReasonToScale) {
  EXPECT_EQ(WantedWorkers(kGroup, {Job(32, v1::JOB_STATE_QUEUED)}, {}), 4);
  EXPECT_EQ(WantedWorkers(kGroup, {Job(33, v1::JOB_STATE_QUEUED)}, {}), 0);
  // Those that fit are served up to what may be.
  EXPECT_EQ(
      WantedWorkers(kGroup, {Job(32, v1::JOB_STATE_QUEUED), Job(16, v1::JOB_STATE_QUEUED)}, {}), 4);
}

TEST(WantedWorkers, TensorGroupsAreWhole) {
  // Two groups of three fit on a worker of eight.
  EXPECT_EQ(
      WantedWorkers(kGroup, {Job(12, v1::JOB_STATE_QUEUED, v1::WAIT_CODE_SLOTS_TAKEN, {}, 3)}, {}),
      2);
  EXPECT_EQ(
      WantedWorkers(kGroup, {Job(15, v1::JOB_STATE_QUEUED, v1::WAIT_CODE_SLOTS_TAKEN, {}, 3)}, {}),
      3);
}

TEST(WantedWorkers, DevicesOfOtherWorkersServeFirst) {
  const std::vector<v1::Worker> workers = {Worker("bare-metal", 4),
                                           Worker("muster-worker-gpu-other", 4)};
  EXPECT_EQ(WantedWorkers(kGroup, {Job(8, v1::JOB_STATE_QUEUED)}, workers), 0);
  EXPECT_EQ(WantedWorkers(kGroup, {Job(9, v1::JOB_STATE_QUEUED)}, workers), 1);
  std::vector<v1::Worker> away = workers;
  away[0].mutable_cordon()->set_reason("maintenance");
  away[1].set_state(v1::WORKER_STATE_LOST);
  EXPECT_EQ(WantedWorkers(kGroup, {Job(8, v1::JOB_STATE_QUEUED)}, away), 1);
}

TEST(WantedWorkers, ABusyWorkerIsNeverScaledAway) {
  // One rank, on the last of three.
  EXPECT_EQ(
      WantedWorkers(
          kGroup,
          {Job(1, v1::JOB_STATE_RUNNING, v1::WAIT_CODE_UNSPECIFIED, {"muster-worker-gpu-2"})}, {}),
      3);
  EXPECT_EQ(WantedWorkers(kGroup, {}, {Worker("muster-worker-gpu-1", 8, {"job"})}), 2);
  // Whatever else there is, and also above maxWorkers, which somebody has made smaller.
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 300; ++round) {
    std::vector<JobView> jobs;
    int last = 0;
    for (uint64_t i = rng.Below(6); i > 0; --i) {
      const int ordinal = static_cast<int>(rng.Below(7));
      const bool holds = rng.Below(2) == 0;
      if (holds) last = std::max(last, ordinal + 1);
      jobs.push_back(Job(1 + static_cast<int>(rng.Below(40)),
                         holds ? v1::JOB_STATE_RUNNING : v1::JOB_STATE_QUEUED,
                         v1::WAIT_CODE_SLOTS_TAKEN,
                         holds ? std::vector<std::string>{absl::StrCat(kGroup.name, "-", ordinal)}
                               : std::vector<std::string>{}));
    }
    const int wanted = WantedWorkers(kGroup, jobs, {});
    EXPECT_GE(wanted, last);
    EXPECT_LE(wanted, std::max(last, kGroup.workers_max));
  }
}

TEST(WantedWorkers, MetadataIsCheckedByName) {
  std::map<std::string, std::string> metadata = {{"workers", "muster-worker-gpu"},
                                                 {"device", "cuda"},
                                                 {"devicesPerWorker", "8"},
                                                 {"maxWorkers", "4"},
                                                 {"scalerAddress", "muster:7600"}};
  const auto group = ParseWorkerGroup(metadata);
  ASSERT_OK(group);
  EXPECT_EQ(group->name, kGroup.name);
  EXPECT_EQ(group->devices, 8);
  EXPECT_EQ(group->workers_max, 4);
  for (const auto& [key, value] : std::map<std::string, std::string>{
           {"workers", ""}, {"device", "tpu"}, {"devicesPerWorker", "0"}, {"maxWorkers", "many"}}) {
    std::map<std::string, std::string> wrong = metadata;
    wrong[key] = value;
    EXPECT_THAT(ParseWorkerGroup(wrong),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(key)));
  }
}

}  // namespace
}  // namespace muster::coordinator
