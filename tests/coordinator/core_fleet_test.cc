// What operators ask of workers: cordon, drain, reserve.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class MaintenanceTest : public CoreTest {
 protected:
  absl::Status Ask(FleetEvent::Request request) {
    Handle(FleetEvent{CallId(9), std::move(request), "client 1"});
    const auto replies = Actions<ReplyAction>();
    EXPECT_EQ(replies.size(), 1u);
    workers_ = replies[0].workers;
    return replies[0].status;
  }
  absl::Status Cordon(const std::string& worker) {
    v1::CordonRequest request;
    request.add_workers(worker);
    request.set_reason("new fans");
    return Ask(request);
  }
  absl::Status Uncordon(const std::string& worker) {
    v1::UncordonRequest request;
    request.add_workers(worker);
    return Ask(request);
  }
  absl::Status Drain(const std::string& worker, absl::Duration timeout = absl::Minutes(10)) {
    v1::DrainRequest request;
    request.add_workers(worker);
    *request.mutable_timeout() = ToProto(timeout);
    return Ask(request);
  }
  v1::ReserveRequest Reservation(const std::string& worker, std::vector<std::string> devices,
                                 const std::string& label) const {
    v1::ReserveRequest request;
    request.mutable_reservation()->set_name("r");
    request.mutable_reservation()->set_label(label);
    *request.mutable_reservation()->mutable_until() = ToProto(now_ + absl::Hours(1));
    v1::ReservedDevices& one = *request.add_workers();
    one.set_worker(worker);
    *one.mutable_devices() = {devices.begin(), devices.end()};
    return request;
  }
  v1::Worker Worker(const std::string& name) const {
    for (const v1::Worker& worker : core_->ListWorkers()) {
      if (worker.name() == name) return worker;
    }
    return {};
  }
  std::vector<v1::EventKind> Kinds() const {
    std::vector<v1::EventKind> kinds;
    for (const EventAppended& appended : Actions<EventAppended>()) {
      if (appended.event.kind() >= v1::EVENT_KIND_WORKER_CORDONED) {
        kinds.push_back(appended.event.kind());
      }
    }
    return kinds;
  }

  std::vector<v1::Worker> workers_;
};

TEST_F(MaintenanceTest, CordonedWorker_GetsNoRanksUntilItIsUncordoned) {
  Hello();
  ASSERT_OK(Cordon("w"));
  EXPECT_THAT(Kinds(), ElementsAre(v1::EVENT_KIND_WORKER_CORDONED));
  ASSERT_EQ(workers_.size(), 1u);
  EXPECT_EQ(workers_[0].cordon().actor(), "client 1");
  EXPECT_EQ(workers_[0].slots_free(), 0);
  EXPECT_EQ(Submit().state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WaitOf("job").change().workers_return(0).reason(), v1::AWAY_REASON_CORDONED);
  Restart();
  Hello(2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_QUEUED) << "a cordon is durable";
  ASSERT_OK(Cordon("w"));
  EXPECT_THAT(Kinds(), IsEmpty()) << "repeated";
  ASSERT_OK(Uncordon("w"));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
}

TEST_F(MaintenanceTest, CordonedWorker_KeepsItsRanks) {
  const v1::Job job = Train();
  ASSERT_OK(Cordon("w"));
  Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_TRAINING);
}

TEST_F(MaintenanceTest, DrainedWorker_IsLeftAfterTheNextCheckpoint) {
  const v1::Job job = Train();
  ASSERT_OK(Drain("w"));
  EXPECT_THAT(Kinds(), ElementsAre(v1::EVENT_KIND_WORKER_DRAINING));
  Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_TRAINING);
  EXPECT_EQ(Commit(job, 10), 0) << "the commit is answered";
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_STOPPING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_THAT(Kinds(), ElementsAre(v1::EVENT_KIND_WORKER_DRAINED));
  const v1::Job waits = Job();
  EXPECT_EQ(waits.state(), v1::JOB_STATE_QUEUED) << "there is no back-off";
  ASSERT_EQ(waits.causes_size(), 1);
  EXPECT_EQ(waits.causes(0).cause(), v1::CAUSE_MAINTENANCE);
  EXPECT_FALSE(waits.causes(0).counted());
  EXPECT_EQ(waits.failures(), 0);
  EXPECT_THAT(waits.causes(0).message(), HasSubstr("step 10"));
  EXPECT_TRUE(Worker("w").cordon().drained());
  // It goes on elsewhere at once.
  Handle(HelloOf("other", 2));
  Wait(absl::Seconds(1));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().ranks(0).worker(), "other");
}

TEST_F(MaintenanceTest, JobThatNeedsNoOtherCheckpoint_FinishesOnTheDrainedWorker) {
  const v1::Job job = Train();
  ASSERT_OK(Drain("w"));
  Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Commit(job, 100), 0) << "its last step";
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_TRAINING);
}

TEST_F(MaintenanceTest, DrainTimeout_StopsWhatHasCommittedNothing) {
  const v1::Job job = Train();
  ASSERT_OK(Drain("w", absl::Seconds(5)));
  for (int i = 0; i < 4; ++i) {
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
    Wait(absl::Seconds(1));
  }
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_TRAINING);
  Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_STOPPING);
}

TEST_F(MaintenanceTest, DrainTimeout_OutlivesARestartOfTheCoordinator) {
  const v1::Job job = Train();
  ASSERT_OK(Drain("w", absl::Seconds(5)));
  Restart();
  Hello(2, Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_TRAINING);
  Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  Wait(absl::Seconds(6));
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_STOPPING);
}

TEST_F(MaintenanceTest, DrainOfTheOnlyWorkerBeforeTraining_StopsTheAttemptAtOnce) {
  Hello();
  Submit();
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  ASSERT_OK(Drain("w"));
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_STOPPING);
}

TEST_F(MaintenanceTest, UncordonedWhileItDrains_KeepsItsRanks) {
  const v1::Job job = Train();
  ASSERT_OK(Drain("w"));
  ASSERT_OK(Uncordon("w"));
  EXPECT_EQ(Commit(job, 10), 0);
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_TRAINING);
}

TEST_F(MaintenanceTest, IdleWorker_IsDrainedAtOnce) {
  Hello();
  ASSERT_OK(Drain("w"));
  EXPECT_THAT(Kinds(), ElementsAre(v1::EVENT_KIND_WORKER_DRAINING, v1::EVENT_KIND_WORKER_DRAINED));
}

TEST_F(MaintenanceTest, BadRequests_ChangeNothingAndSayWhy) {
  Hello();
  v1::CordonRequest two;
  two.add_workers("w");
  two.add_workers("x");
  const absl::Status unknown = Ask(two);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("'x'"));
  EXPECT_FALSE(Worker("w").has_cordon());
  EXPECT_EQ(Ask(v1::CordonRequest()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Drain("w", -absl::Seconds(1)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Drain("w", absl::Hours(10'000)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Ask(v1::UnreserveRequest()).code(), absl::StatusCode::kNotFound);
  v1::ReserveRequest request = Reservation("w", {"cpu:7"}, "team=vision");
  EXPECT_THAT(std::string(Ask(request).message()), HasSubstr("no device 'cpu:7'"));
  request = Reservation("w", {}, "team");
  EXPECT_THAT(std::string(Ask(request).message()), HasSubstr("NAME=VALUE"));
  request = Reservation("w", {}, "team=vision");
  *request.mutable_reservation()->mutable_until() = ToProto(now_);
  EXPECT_THAT(std::string(Ask(request).message()), HasSubstr("in the future"));
  request = Reservation("w", {}, "team=vision");
  request.mutable_reservation()->set_queue("default");
  EXPECT_THAT(std::string(Ask(request).message()), HasSubstr("queue, label: keep one"));
  request.mutable_reservation()->clear_label();
  request.mutable_reservation()->set_queue("visoin");
  EXPECT_THAT(std::string(Ask(request).message()), HasSubstr("there is no queue 'visoin'"));
  EXPECT_THAT(Worker("w").reservations(), IsEmpty());
}

TEST_F(MaintenanceTest, ReservedDevices_GoToItsJobsUntilItExpires) {
  Hello();
  ASSERT_OK(Ask(Reservation("w", {"cpu:0"}, "team=vision")));
  EXPECT_THAT(Kinds(), ElementsAre(v1::EVENT_KIND_DEVICES_RESERVED));
  EXPECT_EQ(Submit().state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WaitOf("job").slots_free(), 1);
  EXPECT_EQ(WaitOf("job").slots_reserved(), 1);
  v1::JobSpec vision = Spec(2);
  vision.set_name("vision");
  (*vision.mutable_labels())["team"] = "vision";
  vision.set_priority(60);
  Restart();
  Hello(2);
  Handle(SubmitEvent{CallId(2), vision, "v"});
  EXPECT_EQ(core_->GetJob("vision")->state(), v1::JOB_STATE_PLACING);
  Handle(CancelEvent{CallId(3), "vision"});
  Observe(Ranks(*core_->GetJob("vision"), v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_QUEUED);
  Wait(absl::Minutes(61));
  EXPECT_THAT(Worker("w").reservations(), IsEmpty());
  Hello(3);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
}

TEST_F(MaintenanceTest, DeviceOfAnotherReservation_IsRefused) {
  Hello();
  ASSERT_OK(Ask(Reservation("w", {"cpu:0"}, "team=vision")));
  v1::ReserveRequest other = Reservation("w", {}, "team=text");
  other.mutable_reservation()->set_name("other");
  const absl::Status refused = Ask(other);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("reserved by r"));
  ASSERT_OK(Ask(Reservation("w", {"cpu:1"}, "team=text"))) << "the same name replaces it";
  EXPECT_THAT(Worker("w").reservations(0).devices(), ElementsAre("cpu:1"));
  v1::UnreserveRequest end;
  end.set_name("r");
  ASSERT_OK(Ask(end));
  EXPECT_THAT(Worker("w").reservations(), IsEmpty());
}

TEST_F(MaintenanceTest, LabelsAndTopologyFile_SayWhereWorkersAre) {
  config_.topology.workers["filed"].names = {"a", "", "r7", ""};
  Restart();
  SessionOpened hello = HelloOf("labelled", 1);
  (*hello.hello.mutable_labels())["rack"] = "r1";
  (*hello.hello.mutable_labels())["team"] = "x";
  Handle(hello);
  ASSERT_EQ(Worker("labelled").domains_size(), 1);
  EXPECT_EQ(Worker("labelled").domains(0).name(), "r1");
  hello = HelloOf("filed", 1);
  (*hello.hello.mutable_labels())["rack"] = "r1";
  Handle(hello);
  ASSERT_EQ(Worker("filed").domains_size(), 2);
  EXPECT_EQ(Worker("filed").domains(0).level(), v1::TOPOLOGY_LEVEL_RACK);
  EXPECT_EQ(Worker("filed").domains(0).name(), "r7");
  EXPECT_EQ(Worker("filed").domains(1).name(), "a");
  hello = HelloOf("many", 1);
  for (int i = 0; i <= kWorkerLabelsMax; ++i) {
    (*hello.hello.mutable_labels())[absl::StrCat("l", i)] = "v";
  }
  Handle(hello);
  ASSERT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_EQ(Actions<CloseAction>()[0].status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(MaintenanceTest, LabelThatLooksLikeALevel_IsNamedWhenItsWorkerJoins) {
  const auto joined = [this](const std::string& worker, const std::string& label) {
    SessionOpened hello = HelloOf(worker, 1);
    (*hello.hello.mutable_labels())[label] = "r1";
    Handle(hello);
    return Actions<EventAppended>().at(0).event.message();
  };
  EXPECT_THAT(joined("a", "rak"), HasSubstr("label 'rak' is no level of the topology: if 'rack'"));
  EXPECT_THAT(joined("b", "nvlink_domain"), HasSubstr("--label nvlink-domain=r1"));
  EXPECT_THAT(joined("c", "rack"), Not(HasSubstr("level")));
  EXPECT_THAT(joined("d", "role"), Not(HasSubstr("level")));
}

TEST_F(MaintenanceTest, PlacementCost_IsPartOfTheJob) {
  Hello();
  const v1::Job job = Submit();
  EXPECT_EQ(job.placement_cost().level(), v1::TOPOLOGY_LEVEL_HOST);
  EXPECT_EQ(job.placement_cost().domain(), "w");
  Restart();
  EXPECT_EQ(Job().placement_cost().domain(), "w");
}

}  // namespace
}  // namespace muster::coordinator
