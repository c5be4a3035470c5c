#include "coordinator/core/slow_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A step in which the rank computes so long, and waits for the rest.
v1::StepTimes Step(int64_t step, double computing, double seconds) {
  v1::StepTimes times;
  times.set_step(step);
  times.set_step_seconds(seconds);
  times.set_gradients_seconds((seconds - computing) / 4);
  times.set_slowest_seconds((seconds - computing) * 3 / 4);
  return times;
}

class SlowRanksTest : public ::testing::Test {
 protected:
  // Ten steps, in which each rank computes so long, over a window; the gang is as slow as the
  // slowest and `longer`. Returns the ranks that have become slow.
  std::vector<int32_t> Window(const std::vector<double>& computing,
                              const std::vector<int32_t>& peers = {0, 0, 0, 0}, double longer = 0) {
    const double seconds = *std::max_element(computing.begin(), computing.end()) + longer;
    for (int i = 0; i < 10; ++i) {
      ++step_;
      for (size_t rank = 0; rank < computing.size(); ++rank) {
        slow_.Add(static_cast<int>(rank), Step(step_, computing[rank], seconds), now_);
      }
      now_ += SlowRanks::kWindow / 10;
    }
    EXPECT_TRUE(slow_.Due(now_));
    std::vector<int32_t> ranks;
    for (const SlowRank& slow : slow_.Judge(peers, now_)) ranks.push_back(slow.rank);
    EXPECT_FALSE(slow_.Due(now_));
    return ranks;
  }

  SlowRanks slow_{4};
  absl::Time now_ = absl::FromUnixSeconds(5000);
  int64_t step_ = 0;
};

TEST_F(SlowRanksTest, BeforeTheFirstReport_NothingIsDue) {
  EXPECT_FALSE(slow_.Due(now_ + absl::Hours(10)));
}

TEST_F(SlowRanksTest, OneThatComputesLongerForHalfAnHour_IsSlow_OnceUntilItRecovers) {
  const std::vector<double> slow = {1, 1, 1.3, 1};
  EXPECT_THAT(Window(slow), IsEmpty());
  EXPECT_THAT(Window(slow), IsEmpty());
  EXPECT_THAT(Window(slow), ElementsAre(2));
  EXPECT_THAT(Window(slow), IsEmpty());
  EXPECT_THAT(Window({1, 1, 1, 1}), IsEmpty());
  Window(slow);
  Window({1, 1, 1, 1});  // an interruption
  EXPECT_THAT(Window(slow), IsEmpty());
  Window(slow);
  EXPECT_THAT(Window(slow), ElementsAre(2));
}

TEST_F(SlowRanksTest, LittleLonger_OrWhereNobodyWaits_IsNot) {
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Window({1, 1, 1.15, 1}), IsEmpty());
  // Only the slow rank's peers matter, and they are a small part of a gang that computes.
  SlowRanks many(60);
  const std::vector<int32_t> alike(60, 0);
  for (int window = 0; window < 4; ++window) {
    for (int i = 0; i < 10; ++i) {
      for (int rank = 0; rank < 60; ++rank)
        many.Add(rank, Step(++step_, rank == 0 ? 1.3 : 1, rank == 0 ? 1.3 : 1.01), now_);
    }
    now_ += SlowRanks::kWindow;
    EXPECT_THAT(many.Judge(alike, now_), IsEmpty());
  }
}

TEST_F(SlowRanksTest, OfTwoPeers_TheSlowerTakesHalfAsLongAgain) {
  const std::vector<int32_t> peers = {0, 0, 2, 2};
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Window({1, 1, 1, 1.4}, peers), IsEmpty());
  Window({1, 1, 1, 1.6}, peers);
  Window({1, 1, 1, 1.6}, peers);
  EXPECT_THAT(Window({1, 1, 1, 1.6}, peers), ElementsAre(3));
}

TEST_F(SlowRanksTest, OtherWork_IsNotCompared) {
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Window({1, 1, 3, 3}, {0, 0, 2, 2}), IsEmpty());
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Window({1, 1, 1, 3}, {0, 0, 0, 3}), IsEmpty());
}

TEST_F(SlowRanksTest, TimesThatMakeNoSense_AndStepsThatAreKnown_AreLeftOut) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int i = 0; i < 10; ++i) {
    slow_.Add(0, Step(1 + i, nan, 1), now_);
    slow_.Add(1, Step(1 + i, -1, 1), now_);
    slow_.Add(2, Step(1, 5, 5), now_);  // again and again
    slow_.Add(3, Step(1 + i, 1, 1), now_);
  }
  now_ += SlowRanks::kWindow;
  EXPECT_THAT(slow_.Judge({0, 0, 0, 0}, now_), IsEmpty());
}

TEST(PeersTest, DifferInDataAndContextAlone) {
  v1::JobSpec spec;
  v1::ParallelSpec& parallel = *spec.mutable_engine()->mutable_parallel();
  parallel.set_tensor(2);
  parallel.set_data(2);
  parallel.set_pipeline(2);
  const std::vector<std::string> alike(8, "H200");
  EXPECT_THAT(PeersOf(spec, alike), ElementsAre(0, 1, 0, 1, 4, 5, 4, 5));
  for (const auto axis :
       {v1::MESH_AXIS_DATA, v1::MESH_AXIS_TENSOR, v1::MESH_AXIS_CONTEXT, v1::MESH_AXIS_PIPELINE}) {
    parallel.add_order(axis);
  }
  EXPECT_THAT(PeersOf(spec, alike), ElementsAre(0, 0, 2, 2, 4, 4, 6, 6));
  std::vector<std::string> mixed = alike;
  mixed[1] = "H100";
  EXPECT_THAT(PeersOf(spec, mixed), ElementsAre(0, 1, 2, 2, 4, 4, 6, 6));
  EXPECT_THAT(PeersOf(spec, {"", "", ""}), ElementsAre(0, 1, 2));  // the degrees make 8
  EXPECT_THAT(PeersOf({}, {"", ""}), ElementsAre(0, 1));
}

// A job of three data-parallel ranks, each on a worker of its own.
class SlowWorkerTest : public CoreTest {
 protected:
  void Join(const std::string& name) {
    SessionOpened hello = HelloOf(name, 1);
    sessions_[name] = hello.session;
    Handle(hello);
  }
  void Say(const std::string& worker, v1::RankState state, double computing = 0) {
    const v1::Job job = Job();
    v1::FromWorker message;
    message.set_incarnation(1);
    v1::ObservedAttempt& attempt = *message.mutable_observed()->add_attempts();
    attempt.set_job_id(job.id());
    attempt.set_epoch(job.epoch());
    for (const v1::RankStatus& status : job.ranks()) {
      if (status.worker() != worker) continue;
      v1::ObservedRank& rank = *attempt.add_ranks();
      rank.set_rank(status.rank());
      rank.set_state(state);
      if (computing == 0) continue;
      rank.mutable_progress()->set_step(step_);
      *rank.mutable_progress()->mutable_times() = Step(step_, computing, 2);
    }
    Handle(SessionMessage{sessions_[worker], message});
  }
  // For a time the ranks train, and the one on `slow` computes longer.
  void Train(const std::string& slow, absl::Duration time) {
    for (const absl::Time until = now_ + time; now_ < until; now_ += absl::Minutes(1)) {
      ++step_;
      for (const auto& [worker, session] : sessions_) {
        Say(worker, v1::RANK_STATE_TRAINING, worker == slow ? 2 : 1);
      }
    }
  }
  void Start() {
    for (const v1::RankState state : {v1::RANK_STATE_PREPARED, v1::RANK_STATE_TRAINING}) {
      for (const auto& [worker, session] : sessions_) Say(worker, state);
    }
    ASSERT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  }
  v1::Reputation Of(const std::string& name) const {
    for (const v1::Worker& worker : core_->ListWorkers()) {
      if (worker.name() == name) return worker.reputation();
    }
    return {};
  }
  std::string WorkerOf(int rank) const { return Job().ranks(rank).worker(); }

  std::map<std::string, SessionId> sessions_;
  int64_t step_ = 0;
};

TEST_F(SlowWorkerTest, WorkerOfASlowRank_HasOneFaultOfTheAttempt) {
  for (const char* name : {"a", "b", "c"}) Join(name);
  v1::JobSpec spec = Spec(3);
  spec.mutable_engine()->mutable_parallel()->set_data(3);
  spec.mutable_engine()->mutable_training()->set_steps(100000);
  Handle(SubmitEvent{CallId(1), spec, "r"});
  Start();
  const std::string slow = WorkerOf(1);
  Train(slow, absl::Minutes(25));
  EXPECT_FALSE(Of(slow).latest_size() > 0);
  Train(slow, absl::Minutes(95));
  ASSERT_EQ(Of(slow).latest_size(), 1);
  EXPECT_EQ(Of(slow).standing(), v1::WORKER_STANDING_SUSPECT);
  const v1::WorkerFault fault = Of(slow).latest(0);
  EXPECT_EQ(fault.rank(), 1);
  EXPECT_EQ(fault.slowdown(), 2);
  EXPECT_EQ(fault.cause(), v1::CAUSE_UNSPECIFIED);
  EXPECT_EQ(fault.device(), "cpu:0");
  EXPECT_EQ(Of(WorkerOf(0)).latest_size(), 0);
  // A restart of the coordinator forgets what it has measured, but not the fault.
  Restart();
  EXPECT_EQ(Of(slow).latest_size(), 1);
}

TEST_F(SlowWorkerTest, RankThatIsSlowOnAnotherWorkerToo_IsTheJobs) {
  for (const char* name : {"a", "b", "c", "d"}) Join(name);
  v1::JobSpec spec = Spec(3);
  spec.mutable_engine()->mutable_parallel()->set_data(3);
  spec.mutable_engine()->mutable_training()->set_steps(100000);
  Handle(SubmitEvent{CallId(1), spec, "r"});
  Start();
  const std::string first = WorkerOf(1);
  Train(first, absl::Minutes(35));
  ASSERT_EQ(Of(first).latest_size(), 1);
  Handle(ChangeJobEvent{CallId(2), "job", ChangeJobEvent::Change::kRequeue});
  for (const auto& [worker, session] : sessions_) Say(worker, v1::RANK_STATE_RELEASED);
  Wait(absl::Minutes(2));
  Start();
  const std::string second = WorkerOf(1);
  ASSERT_NE(second, first) << "a suspect worker was taken though another was free";
  Train(second, absl::Minutes(65));
  EXPECT_EQ(Of(second).latest_size(), 0);
}

}  // namespace
}  // namespace muster::coordinator
