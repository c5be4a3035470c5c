#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core/attempt_machine.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/job_machine.h"
#include "coordinator/core/schema.h"
#include "proto/job_state.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(JobMachine, EveryStateAndEvent_HaveAtMostOneTransitionAndNoneFromFinalStates) {
  std::map<std::pair<int, int>, int> rows;
  for (const JobTransition& row : kJobTransitions) ++rows[{row.from, static_cast<int>(row.event)}];
  size_t legal = 0;
  for (size_t state = 0; state < kJobStateCount; ++state) {
    for (size_t event = 0; event < kJobEventCount; ++event) {
      const auto from = static_cast<v1::JobState>(state);
      const v1::JobState to = Next(from, static_cast<JobEvent>(event));
      const auto row = rows.find({static_cast<int>(state), static_cast<int>(event)});
      EXPECT_EQ(to != v1::JOB_STATE_UNSPECIFIED, row != rows.end());
      if (row != rows.end()) {
        EXPECT_EQ(row->second, 1) << state << " " << event;
        EXPECT_NE(to, from);
        EXPECT_FALSE(IsFinal(from)) << state;
        ++legal;
      }
    }
  }
  EXPECT_EQ(legal, kJobTransitions.size());
}

TEST(AttemptMachine, EveryStateAndEvent_MoveForwardUnlessRanksAreReplacedAndStopWhereLive) {
  size_t legal = 0;
  for (size_t state = 0; state < kAttemptStateCount; ++state) {
    const auto from = static_cast<v1::AttemptState>(state);
    for (size_t event = 0; event < kAttemptEventCount; ++event) {
      const v1::AttemptState to = Next(from, static_cast<AttemptEvent>(event));
      if (to == v1::ATTEMPT_STATE_UNSPECIFIED) continue;
      const bool back = static_cast<AttemptEvent>(event) == AttemptEvent::kReplace;
      EXPECT_EQ(to < from, back) << state << " " << event;
      EXPECT_NE(to, from);
      ++legal;
    }
    EXPECT_EQ(Next(from, AttemptEvent::kStop) == v1::ATTEMPT_STATE_STOPPING, PropertiesOf(from).up);
  }
  EXPECT_EQ(legal, kAttemptTransitions.size());
}

TEST(BackoffBefore, EachRestart_DoublesUpToTheLimit) {
  v1::BackoffSpec spec;
  spec.mutable_initial()->set_nanos(500'000'000);
  spec.mutable_max()->set_seconds(30);
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_CRASH, 1), absl::Milliseconds(500));
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_CRASH, 3), absl::Seconds(2));
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_CRASH, 900), absl::Seconds(30));
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_PREEMPTED, 3), absl::ZeroDuration());
}

TEST(Schema, KeysOfNumbers_SortAsTheNumbersAndDecode) {
  EXPECT_LT(schema::EventKey(255), schema::EventKey(256));
  ASSERT_OK_AND_ASSIGN(
      const schema::KeyValueKey key,
      schema::DecodeKeyValueKey(schema::Encode({JobId("a-bcdfg"), Epoch(7), "k"})));
  EXPECT_EQ(key.job, JobId("a-bcdfg"));
  EXPECT_EQ(key.epoch, Epoch(7));
  EXPECT_EQ(key.key, "k");
  EXPECT_THAT(schema::DecodeKeyValueKey("short"), StatusIs(absl::StatusCode::kDataLoss));
}

TEST_F(CoreTest, Submit_SameRequestAgain_ReturnsTheFirstJobAlsoAfterARestart) {
  const v1::Job first = Submit("r");
  Restart();
  Handle(SubmitEvent{CallId(2), Spec(), "r"});
  ASSERT_EQ(Actions<ReplyAction>().size(), 1u);
  EXPECT_TRUE(Actions<ReplyAction>()[0].existed);
  EXPECT_EQ(Actions<ReplyAction>()[0].job.id(), first.id());
}

TEST_F(CoreTest, Submit_NameOfALiveJob_IsRefused) {
  Submit("r");
  Handle(SubmitEvent{CallId(2), Spec(), "other"});
  EXPECT_THAT(Actions<ReplyAction>()[0].status, StatusIs(absl::StatusCode::kAlreadyExists));
}

// What an event costs is counted in job rows written and jobs published.
TEST_F(CoreTest, Submit_ToAFullCluster_ChangesNoOtherJob) {
  Train();
  int changed = 0;
  for (int i = 0; i < 1000; ++i) {
    v1::JobSpec spec = Spec();
    spec.set_name(absl::StrCat("waiting-", i));
    const CoreOutput output =
        core_->Handle(SubmitEvent{CallId(1), spec, absl::StrCat("w", i)}, now_);
    for (const Batch::Change& change : output.batch.changes) {
      changed += change.table == Table::kStates ? 1 : 0;
    }
    for (const CoreAction& action : output.actions) {
      if (const auto* reply = std::get_if<ReplyAction>(&action)) {
        ASSERT_OK(reply->status);
        EXPECT_TRUE(reply->job.has_waiting());
      }
      changed += std::holds_alternative<JobChanged>(action) ? 1 : 0;
    }
  }
  EXPECT_EQ(changed, 2 * 1000);
  EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
  EXPECT_EQ(WaitOf("waiting-0").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(WaitOf("waiting-0").slots_total(), 2);
  EXPECT_EQ(WaitOf("waiting-1").blocker().job_name(), "waiting-0");
  EXPECT_EQ(WaitOf("waiting-999").behind_more_than(), 32);
}

TEST_F(CoreTest, HeadOfALongQueueStarts_OnlyJobsNearTheFrontChange) {
  const v1::Job job = Train();
  for (int i = 0; i < 1000; ++i) {
    v1::JobSpec spec = Spec();
    spec.set_name(absl::StrCat("waiting-", i));
    spec.mutable_preemption()->mutable_min_runtime()->set_seconds(3600);  // is not stopped below
    Take(core_->Handle(SubmitEvent{CallId(1), spec, ""}, now_));
  }
  const std::map<int, v1::Cause> done = {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}};
  Observe(Ranks(job, v1::RANK_STATE_RELEASED, done));
  EXPECT_EQ(core_->GetJob("waiting-0")->state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(WaitOf("waiting-1").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_LE(Actions<JobChanged>().size(), 40u);
  // A job far back leaves: no other job changes.
  Handle(CancelEvent{CallId(2), "waiting-500"});
  EXPECT_EQ(Actions<JobChanged>().size(), 1u);
  // A job of higher priority comes: the last of the explained jobs is beyond the horizon now.
  v1::JobSpec urgent = Spec();
  urgent.set_name("urgent");
  urgent.set_priority(99);
  Handle(SubmitEvent{CallId(3), urgent, ""});
  EXPECT_EQ(WaitOf("urgent").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(WaitOf("waiting-32").blocker().job_name(), "urgent");
  EXPECT_EQ(WaitOf("waiting-33").code(), v1::WAIT_CODE_BEHIND_MANY);
  Restart();
  EXPECT_EQ(WaitOf("waiting-32").blocker().job_name(), "urgent");
  EXPECT_EQ(WaitOf("waiting-999").code(), v1::WAIT_CODE_BEHIND_MANY);
}

TEST_F(CoreTest, Explain_PlaysTheRunningJobAhead) {
  const v1::Job job = Train();
  v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING);
  for (v1::ObservedRank& rank : *observed.mutable_attempts(0)->mutable_ranks()) {
    rank.mutable_progress()->set_step(40);
    rank.mutable_progress()->set_step_seconds(2);
  }
  now_ += absl::Seconds(2);
  Observe(observed);
  v1::JobSpec spec = Spec();
  spec.set_name("next");
  Handle(SubmitEvent{CallId(1), spec, ""});
  const absl::StatusOr<Explained> waits = core_->Explain("next", now_);
  ASSERT_OK(waits.status());
  ASSERT_TRUE(waits->waiting.has_value());
  EXPECT_EQ(waits->waiting->code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(waits->waiting->change().jobs_end(0).job_name(), "job");
  EXPECT_EQ(FromProto(waits->waiting->estimated_start()), now_ + absl::Seconds(120))
      << "60 steps of 2 s";
  const absl::StatusOr<Explained> runs = core_->Explain("job", now_);
  ASSERT_OK(runs.status());
  EXPECT_FALSE(runs->waiting.has_value());
  EXPECT_THAT(core_->Explain("nobody", now_).status(), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(CoreTest, Explain_OfASpec_ChangesNothing) {
  Hello();
  const absl::StatusOr<Explained> fits = core_->Explain(Spec(), now_);
  ASSERT_OK(fits.status());
  ASSERT_EQ(fits->placements.size(), 2u);
  EXPECT_EQ(fits->placements[1].worker(), "w");
  EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
  Train();
  const absl::StatusOr<Explained> waits = core_->Explain(Spec(), now_);
  ASSERT_OK(waits.status());
  EXPECT_TRUE(waits->placements.empty());
  EXPECT_EQ(waits->waiting->code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(waits->waiting->ahead(), 0);
  EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
}

TEST_F(CoreTest, ClockSetBack_DoesNotProlongABackOff) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_CRASH}, {1, v1::CAUSE_CRASH}}));
  ASSERT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  now_ -= absl::Hours(2);
  Restart();
  Hello(2);
  ASSERT_EQ(Job().epoch(), 1u);
  Wait(absl::Seconds(1));  // the length of the first back-off; the longest one of the spec is 60 s
  EXPECT_EQ(Job().epoch(), 2u);
}

TEST_F(CoreTest, Placement_IsMeasuredFromAllocationUntilEveryDaemonHasAccepted) {
  Submit();
  now_ += absl::Seconds(3);  // time in the queue does not count
  Hello();
  now_ += absl::Milliseconds(250);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  ASSERT_EQ(Actions<Measured>().size(), 1u);
  EXPECT_EQ(Actions<Measured>()[0].what, Measured::What::kPlacement);
  EXPECT_DOUBLE_EQ(Actions<Measured>()[0].seconds, 0.25);
}

TEST_F(CoreTest, RanksOfAGangOnTwoWorkers_AreToldHowManyShareTheirWorker) {
  Hello();
  Handle(HelloOf("v", 1));
  Submit("r", 3);
  std::map<int, std::pair<int, int>> told;  // local rank and local ranks, by rank
  for (const SendAction& send : Actions<SendAction>()) {
    for (const v1::DesiredAttempt& attempt : send.message.desired().attempts()) {
      for (const v1::RankAssignment& rank : attempt.ranks()) {
        EXPECT_EQ(rank.world_size(), 3);
        EXPECT_EQ(rank.local_ranks(), attempt.ranks_size());
        told[rank.rank()] = {rank.local_rank(), rank.local_ranks()};
      }
    }
  }
  ASSERT_EQ(told.size(), 3u);
  std::vector<std::pair<int, int>> local;
  for (const auto& [rank, of] : told) local.push_back(of);
  std::sort(local.begin(), local.end());
  EXPECT_EQ(local, (std::vector<std::pair<int, int>>{{0, 1}, {0, 2}, {1, 2}}));
}

TEST_F(CoreTest, GangAcrossHosts_GetsAddressesThatOthersReach) {
  const auto join = [this](const char* worker, const char* boot_id, const char* address,
                           const char* outside) {
    SessionOpened hello = HelloOf(worker, 1);
    session_ = hello.session;
    hello.hello.set_host(absl::StrCat("host-", worker));
    hello.hello.set_boot_id(boot_id);
    hello.hello.set_address(address);
    hello.hello.set_outside_address(outside);
    Handle(hello);
  };
  join("a", "x", "127.0.0.1", "10.0.0.1");  // on the coordinator's host
  Submit("one", 1);
  EXPECT_EQ(Job().ranks(0).address(), "127.0.0.1") << "no other host has to reach it";
  Handle(CancelEvent{CallId(2), Job().id()});
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
  join("b", "y", "10.0.0.2", "");
  join("c", "x", "127.0.0.1", "10.0.0.1");  // another daemon on the host of a
  Submit("three", 3);
  const v1::Job job = Job();
  ASSERT_EQ(job.ranks_size(), 3);
  std::map<std::string, std::string> address;
  for (const v1::RankStatus& rank : job.ranks()) {
    address[rank.worker()] = rank.address();
    EXPECT_EQ(rank.host(), absl::StrCat("host-", rank.worker()));
  }
  EXPECT_EQ(address, (std::map<std::string, std::string>{
                         {"a", "10.0.0.1"}, {"b", "10.0.0.2"}, {"c", "10.0.0.1"}}));
  const std::optional<v1::Desired> desired = LastDesired();
  ASSERT_TRUE(desired.has_value());
  for (const v1::RankAssignment& rank : desired->attempts(0).ranks()) {
    EXPECT_EQ(rank.address(), job.ranks(rank.rank()).address());
  }
}

TEST_F(CoreTest, HelloWithADeviceOfAKindThatIsNotKnown_IsRefused) {
  SessionOpened hello = HelloOf("w", 0);
  v1::Device& device = *hello.hello.add_devices();
  device.set_name("cpu:2");
  device.set_kind(static_cast<v1::DeviceKind>(5));
  Handle(hello);
  ASSERT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_THAT(Actions<CloseAction>()[0].status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is of a kind, 5")));
}

TEST_F(CoreTest, HelloWithAnAddressThatNobodyCanDial_IsRefused) {
  for (const char* address : {"worker-1", "0.0.0.0", "::", "10.0.0.1:20000"}) {
    SessionOpened hello = HelloOf("w", 0);
    hello.hello.set_address(address);
    Handle(hello);
    ASSERT_EQ(Actions<CloseAction>().size(), 1u) << address;
    EXPECT_THAT(Actions<CloseAction>()[0].status,
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no numeric IP address")));
  }
}

TEST_F(CoreTest, Hello_OfAnOlderIncarnation_IsFenced) {
  Hello(5);
  Hello(4);
  ASSERT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_THAT(Actions<CloseAction>()[0].status, StatusIs(absl::StatusCode::kAborted));
}

TEST_F(CoreTest, GetOfAKey_IsAnsweredByItsPutOrByTheEndOfTheEpoch) {
  const v1::Job job = Train();
  const auto get = [&](uint64_t request, const std::string& key) {
    v1::FromWorker message;
    message.mutable_get()->set_request(request);
    message.mutable_get()->set_job_id(job.id());
    message.mutable_get()->set_epoch(1);
    message.mutable_get()->set_key(key);
    Send(std::move(message));
  };
  get(1, "id");
  EXPECT_THAT(Actions<SendAction>(), IsEmpty());
  v1::FromWorker put;
  put.mutable_put()->set_request(2);
  put.mutable_put()->set_job_id(job.id());
  put.mutable_put()->set_epoch(1);
  put.mutable_put()->set_key("id");
  put.mutable_put()->set_value("v");
  Send(put);
  ASSERT_EQ(Actions<SendAction>().size(), 2u);
  EXPECT_EQ(Actions<SendAction>()[1].message.value().value(), "v");
  get(3, "other");
  Handle(CancelEvent{CallId(3), "job"});
  ASSERT_FALSE(Actions<SendAction>().empty());
  EXPECT_EQ(Actions<SendAction>()[0].message.value().status_code(),
            static_cast<int>(absl::StatusCode::kAborted));
}

TEST_F(CoreTest, HeartbeatThatChangesNothing_WritesNothing) {
  const v1::Job job = Train();
  now_ += absl::Milliseconds(500);
  const CoreOutput output = core_->Handle(
      SessionMessage{session_,
                     [&] {
                       v1::FromWorker message;
                       message.set_incarnation(incarnation_);
                       *message.mutable_observed() = Ranks(job, v1::RANK_STATE_TRAINING);
                       message.mutable_observed()->set_applied_revision(revision_);
                       return message;
                     }()},
      now_);
  EXPECT_TRUE(output.batch.empty());
}

// Of five devices, one is below no PCIe switch, and every other one of the rest below each of two.
TEST_F(CoreTest, RanksOfAJob_AreBelowOnePcieSwitch) {
  SessionOpened hello = HelloOf("w", 5);
  for (int slot = 0; slot < 5; ++slot) {
    hello.hello.mutable_devices(slot)->set_pcie_switch(slot == 0 ? "" : slot % 2 == 0 ? "a" : "b");
  }
  Handle(hello);
  v1::JobSpec first = Spec(1);
  first.set_name("first");
  Handle(SubmitEvent{CallId(1), first, "first"});
  EXPECT_EQ(core_->GetJob("first")->ranks(0).device(), "cpu:0");
  Submit();
  ASSERT_EQ(Job().ranks_size(), 2);
  EXPECT_EQ(Job().ranks(0).device(), "cpu:2");
  EXPECT_EQ(Job().ranks(1).device(), "cpu:4");
}

}  // namespace
}  // namespace muster::coordinator
