// Which workers are avoided, since when, and until when.
#include "coordinator/core/reputation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/scheduler/placement.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::DoubleNear;
using ::testing::HasSubstr;

class ReputationTest : public CoreTest {
 protected:
  v1::Worker Worker(const std::string& name = "w") const {
    for (const v1::Worker& worker : core_->ListWorkers()) {
      if (worker.name() == name) return worker;
    }
    return {};
  }
  // An attempt of the job trains and ends so.
  void Fail(v1::Cause cause, int rank = 0) {
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
    events_.clear();
    Observe(Ranks(Job(), v1::RANK_STATE_RELEASED, {{rank, cause}}));
    for (const EventAppended& appended : Actions<EventAppended>()) {
      events_.push_back(appended.event.kind());
    }
    Wait(absl::Minutes(2));  // the back-off
  }
  absl::Status Forgive(const std::string& worker) {
    v1::ForgiveRequest request;
    request.add_workers(worker);
    Handle(FleetEvent{CallId(9), request, "client 1"});
    return Actions<ReplyAction>()[0].status;
  }
  void SubmitOften() {
    v1::JobSpec spec = Spec(2);
    spec.mutable_restart()->set_max_failures(100);
    Handle(SubmitEvent{CallId(1), spec, "r"});
  }

  std::vector<v1::EventKind> events_;
};

TEST_F(ReputationTest, ThreeFaultsOfDevices_LetAWorkerBeAvoided_ForAWhile) {
  Hello();
  SubmitOften();
  Fail(v1::CAUSE_DEVICE, 1);
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_SUSPECT);
  ASSERT_EQ(Worker().reputation().devices_size(), 1);
  EXPECT_EQ(Worker().reputation().devices(0).device(), "cpu:1");
  EXPECT_THAT(events_, ::testing::Contains(v1::EVENT_KIND_WORKER_FAULT));
  Fail(v1::CAUSE_DEVICE);
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_SUSPECT);
  Fail(v1::CAUSE_DEVICE);
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_AVOIDED);
  EXPECT_THAT(events_, ::testing::Contains(v1::EVENT_KIND_WORKER_AVOIDED));
  EXPECT_EQ(Worker().reputation().latest_size(), 3);
  Observe({});  // it is heard again, and nothing else holds the job
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  Restart();
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_AVOIDED);
  // log2(3 / 2) of 7 days.
  Pause(absl::Hours(100));
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_SUSPECT);
  Pause(absl::Hours(24 * 14));
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_UNSPECIFIED);
}

TEST_F(ReputationTest, WhatIsTheJobsOwn_IsNoFault) {
  Hello();
  SubmitOften();
  for (const v1::Cause cause : {v1::CAUSE_CRASH, v1::CAUSE_OUT_OF_MEMORY, v1::CAUSE_UNKNOWN}) {
    Fail(cause);
  }
  EXPECT_FALSE(Worker().has_reputation());
}

TEST_F(ReputationTest, PreparationThatIsRefused_CountsOnce_AgainItIsTheJob) {
  Hello();
  SubmitOften();
  for (int i = 0; i < 3; ++i) {
    v1::Observed observed = Ranks(Job(), v1::RANK_STATE_RELEASED);
    observed.mutable_attempts(0)->set_refusal("no space");
    Observe(observed);
    Wait(absl::Minutes(2));
  }
  EXPECT_THAT(Worker().reputation().faults(), DoubleNear(1, 0.01));
  EXPECT_EQ(Worker().reputation().latest(0).cause(), v1::CAUSE_LAUNCH);
}

TEST_F(ReputationTest, WorkerThatIsLostWithRanks_HasAFault) {
  Train();
  now_ += absl::Milliseconds(1);
  Wait(config_.lost_after + absl::Seconds(5));
  Wait(config_.partition_hold);
  ASSERT_EQ(Worker().state(), v1::WORKER_STATE_LOST);
  EXPECT_EQ(Worker().reputation().latest(0).cause(), v1::CAUSE_WORKER_LOST);
}

TEST_F(ReputationTest, Forgiven_IsAsNew_AndAnUnknownNameIsRefused) {
  Hello();
  SubmitOften();
  Fail(v1::CAUSE_DEVICE);
  EXPECT_THAT(Forgive("nobody").message(), HasSubstr("no worker has the name 'nobody'"));
  ASSERT_OK(Forgive("w"));
  EXPECT_FALSE(Worker().has_reputation());
  EXPECT_EQ(Actions<EventAppended>()[0].event.kind(), v1::EVENT_KIND_WORKER_FORGIVEN);
  Restart();
  EXPECT_FALSE(Worker().has_reputation());
}

TEST_F(ReputationTest, AnotherPolicy_HoldsForFaultsThatAreKnown) {
  Hello();
  SubmitOften();
  Fail(v1::CAUSE_DEVICE);
  v1::QueuePolicy policy;
  policy.mutable_reputation()->set_avoid_above(0.5);
  Handle(ApplyQueuesEvent{CallId(5), policy, {}});
  EXPECT_EQ(Worker().reputation().standing(), v1::WORKER_STANDING_AVOIDED);
}

// The workers that a gang gets, none where it does not fit.
std::set<std::string> Place(SlotIndex& slots, int ranks, int32_t share = spec::kWholeDevice) {
  WaitingJob job;
  job.id = JobId("job");
  job.ranks = ranks;
  job.share = share;
  SlotIndex::Trial trial(slots);
  std::set<std::string> workers;
  const bool fits = FitsNow(trial, job);
  const auto placements = PlaceGang(trial, job);
  EXPECT_EQ(placements.has_value(), fits);
  if (!placements.has_value()) return workers;
  for (const v1::Placement& placement : *placements) workers.insert(placement.worker());
  return workers;
}

TEST(StandingTest, SuspectIsTakenWhereItCostsNoMore_AvoidedAsTheLastResort) {
  SlotIndex slots;
  for (const char* name : {"a", "b", "c"}) {
    WorkerView worker{.id = WorkerId(name), .ready = true};
    for (int i = 0; i < 2; ++i) worker.slots.push_back({.device = absl::StrCat("cpu:", i)});
    if (worker.id == WorkerId("a")) worker.standing = v1::WORKER_STANDING_AVOIDED;
    if (worker.id == WorkerId("b")) worker.standing = v1::WORKER_STANDING_SUSPECT;
    slots.Put(std::move(worker));
  }
  const auto place = [&slots](int ranks) { return Place(slots, ranks); };
  using Names = std::set<std::string>;
  EXPECT_EQ(place(2), Names({"c"}));
  EXPECT_EQ(place(3), Names({"b", "c"}));
  EXPECT_EQ(place(5), Names({"a", "b", "c"}));
  // One host costs less than two.
  slots.SetHolder(WorkerId("c"), "cpu:0", JobId("other"));
  EXPECT_EQ(place(2), Names({"b"}));
}

// The room that others leave on devices of a suspect counts no more than whole devices of others.
TEST(StandingTest, JobWithAShare_TakesSuspectAndAvoidedLikeAnyOther) {
  SlotIndex slots;
  for (const char* name : {"a", "b", "c"}) {
    WorkerView worker{.id = WorkerId(name), .ready = true};
    for (int i = 0; i < 2; ++i) worker.slots.push_back({.device = absl::StrCat("cpu:", i)});
    if (worker.id == WorkerId("a")) worker.standing = v1::WORKER_STANDING_AVOIDED;
    if (worker.id == WorkerId("b")) worker.standing = v1::WORKER_STANDING_SUSPECT;
    slots.Put(std::move(worker));
  }
  for (const char* name : {"a", "b"}) slots.SetShare(WorkerId(name), "cpu:0", JobId("other"), 300);
  const SlotIndex before = slots;
  const auto place = [&slots](int ranks) { return Place(slots, ranks, 700); };
  using Names = std::set<std::string>;
  EXPECT_EQ(place(1), Names({"c"}));
  EXPECT_EQ(place(2), Names({"c"}));
  EXPECT_EQ(place(3), Names({"b", "c"}));
  EXPECT_EQ(place(5), Names({"a", "b", "c"}));
  EXPECT_EQ(place(7), Names());
  EXPECT_EQ(slots, before);
}

TEST(StandingTest, Faults_CountHalfAfterTheHalfLife) {
  EXPECT_DOUBLE_EQ(reputation::Decayed(3, absl::Hours(24), absl::Hours(24)), 1.5);
  EXPECT_DOUBLE_EQ(reputation::Decayed(3, absl::ZeroDuration(), absl::Hours(24)), 3);
}

}  // namespace
}  // namespace muster::coordinator
