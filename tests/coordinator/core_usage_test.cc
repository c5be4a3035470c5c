// What the time of devices is counted as, by class and cause.
#include "coordinator/core/device_account.h"
#include "coordinator/core/schema.h"
#include "proto/class_time.h"
#include "proto/spec/names.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class CoreUsageTest : public CoreTest {
 protected:
  using Seconds = std::map<std::string, double>;  // by "class" or "class cause"; zeros left out

  static void Add(v1::UsageClass usage_class, v1::Cause cause, double seconds, Seconds& sums) {
    if (seconds == 0) return;
    std::string key = spec::EnumName(usage_class);
    if (cause != v1::CAUSE_UNSPECIFIED) absl::StrAppend(&key, " ", spec::EnumName(cause));
    sums[key] += seconds;
  }
  // Of the job, as a reader of Job.usage sees it now.
  Seconds OfJob() const {
    Seconds sums;
    const v1::Usage usage = Job().usage();
    const double since = absl::ToDoubleSeconds(now_ - FromProto(usage.as_of()));
    for (const v1::ClassTime& time : usage.times()) {
      Add(time.usage_class(), time.cause(), time.device_seconds() + DevicesIn(time) * since, sums);
    }
    return sums;
  }
  // Of everything since the start of the cluster: rows of past periods, and the one that is not
  // over.
  Seconds OfAll() {
    Seconds sums;
    const auto add = [&sums](const v1::UsageRow& row) {
      for (const v1::AccountEntry& entry : row.entries()) {
        Add(entry.usage_class(), entry.cause(), static_cast<double>(entry.period_ms()) * 1e-3,
            sums);
      }
    };
    for (const v1::UsageRow& row : Rows()) add(row);
    for (const v1::UsageRow& row : core_->Usage(now_).rows) add(row);
    return sums;
  }
  std::vector<v1::UsageRow> Rows() {
    std::vector<v1::UsageRow> rows;
    EXPECT_OK(store_->Scan(Table::kUsage, "", schema::kFleetAccount,
                           [&](const std::string&, const std::string& value) {
                             EXPECT_TRUE(rows.emplace_back().ParseFromString(value));
                             return true;
                           }));
    return rows;
  }
  // A report of both ranks.
  void Report(int64_t step, const std::string& phase = "training") {
    v1::Observed observed = Ranks(Job(), v1::RANK_STATE_TRAINING);
    for (v1::ObservedRank& rank : *observed.mutable_attempts(0)->mutable_ranks()) {
      rank.mutable_progress()->set_step(step);
      rank.mutable_progress()->set_step_seconds(1);
      rank.mutable_progress()->set_phase(phase);
    }
    Observe(observed);
  }
  // The daemon reports what it did before, as long as it takes.
  void ReportFor(absl::Duration time, int64_t step) {
    for (absl::Duration gone; gone < time; gone += absl::Seconds(1)) {
      now_ += absl::Seconds(1);
      Report(step);
    }
  }
  void Pass(int seconds) { now_ += absl::Seconds(seconds); }
};

TEST_F(CoreUsageTest, FirstAttempt_GoesThroughTheClasses) {
  Hello();
  Pass(3);
  Submit();
  Pass(1);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Pass(2);
  Observe(Ranks(Job(), v1::RANK_STATE_RUNNING));
  Pass(4);
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  Report(0, "restoring");
  Pass(5);
  Report(0);
  Pass(10);
  Report(10, "saving");
  Pass(1);
  Report(10);
  Pass(7);
  EXPECT_THAT(OfJob(),
              UnorderedElementsAre(Pair("held", 2), Pair("launching", 4), Pair("initializing", 18),
                                   Pair("productive", 34), Pair("checkpoint_stall", 2)));
  EXPECT_DOUBLE_EQ(OfAll()["idle"], 6);
  Observe(
      Ranks(Job(), v1::RANK_STATE_EXITED, {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}}));
  Pass(1);
  Observe(
      Ranks(Job(), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}}));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_DOUBLE_EQ(OfJob()["held completed"], 2);
  EXPECT_NEAR(Job().usage().goodput(), 34.0 / 62, 1e-9);
  // What has ended costs nothing more.
  Pass(100);
  EXPECT_DOUBLE_EQ(OfJob()["held completed"], 2);
  ASSERT_EQ(Rows().size(), 1u);
  EXPECT_EQ(Rows()[0].job_name(), "job");
  EXPECT_EQ(Rows()[0].queue(), "default");
  EXPECT_EQ(Rows()[0].begin_ms(), 1'003'000);
  EXPECT_EQ(Rows()[0].end_ms(), 1'034'000);
}

TEST_F(CoreUsageTest, StepsBehindTheCheckpoint_AreReplayedOnceAndBlamedOnTheEnd) {
  const v1::Job first = Train();
  Report(1);
  EXPECT_EQ(Commit(first, 10), 0);
  Pass(20);
  Report(16);
  Observe(Ranks(first, v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_CRASH}, {1, v1::CAUSE_CRASH}}));
  Wait(absl::Seconds(5));
  ASSERT_EQ(Job().epoch(), 2u);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Pass(2);
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  Report(10);
  Pass(6);
  Report(16);
  Pass(3);
  EXPECT_DOUBLE_EQ(OfJob()["launching crash"], 4);
  EXPECT_DOUBLE_EQ(OfJob()["replayed crash"], 12);
  EXPECT_DOUBLE_EQ(OfJob()["productive"], 46);
}

TEST_F(CoreUsageTest, SilentGang_HasHungSinceItsLastStep) {
  Train();
  Report(1);
  ReportFor(absl::Seconds(20), 1);
  EXPECT_EQ(OfJob().count("hung hang"), 0u);
  ReportFor(absl::Seconds(20), 1);
  EXPECT_DOUBLE_EQ(OfJob()["hung hang"], 80);
  EXPECT_DOUBLE_EQ(OfJob()["productive"], 0);
  // It was only slow.
  Report(2);
  Pass(4);
  EXPECT_DOUBLE_EQ(OfJob()["hung hang"], 80);
  EXPECT_DOUBLE_EQ(OfJob()["productive"], 8);
  EXPECT_DOUBLE_EQ(OfAll()["hung hang"], 80);
}

TEST_F(CoreUsageTest, EndByHang_CountsSinceTheLastStep_HoweverShortTheLimit) {
  config_.progress_timeout = absl::Seconds(5);
  Restart();
  const v1::Job job = Train();
  Pass(2);
  Report(1);
  ReportFor(absl::Seconds(6), 1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  const double hung = OfJob()["hung hang"];
  EXPECT_DOUBLE_EQ(hung, 10);
  EXPECT_DOUBLE_EQ(OfJob()["productive"], 4);
  EXPECT_DOUBLE_EQ(OfJob()["held hang"], 2);
}

TEST_F(CoreUsageTest, TimeWithoutACoordinator_IsWhatTheDevicesDidBefore) {
  Train();
  Report(3);
  Pass(10);
  Report(4);
  Pass(90);
  Restart();
  // Nothing has been heard of the gang yet; it trains on.
  Pass(1);
  EXPECT_DOUBLE_EQ(OfJob()["productive"], 202);
  Hello(1, Ranks(Job(), v1::RANK_STATE_TRAINING));
  Report(90);
  Pass(1);
  EXPECT_THAT(OfJob(), ElementsAre(Pair("productive", 204)));
}

TEST_F(CoreUsageTest, LostWorker_IsAwayUntilItIsRemoved) {
  Hello();
  Pass(10);
  Wait(config_.lost_after + absl::Seconds(1));
  Pass(9);
  RemoveWorkerEvent remove;
  remove.worker = "w";
  Handle(remove);
  Pass(1000);
  Seconds all = OfAll();
  EXPECT_DOUBLE_EQ(all["idle"] + all["away worker_lost"], 2 * 50);
  EXPECT_GE(all["away worker_lost"], 2 * 36);
}

TEST_F(CoreUsageTest, CordonedWorker_IsAwayForMaintenance_ButForWhatJobsHoldThere) {
  Hello();
  Pass(10);
  v1::CordonRequest cordon;
  cordon.add_workers("w");
  Handle(FleetEvent{CallId(9), cordon, "client 1"});
  Pass(5);
  Observe(v1::Observed());  // it is heard from, so that it is not silent
  Pass(5);
  EXPECT_THAT(OfAll(), UnorderedElementsAre(Pair("idle", 20), Pair("away maintenance", 20)));
}

TEST_F(CoreUsageTest, UnusableDevice_IsAway) {
  SessionOpened hello = HelloOf("w", 3);
  hello.hello.mutable_devices(1)->set_unusable("Xid 79");
  Handle(hello);
  Pass(10);
  EXPECT_THAT(OfAll(), UnorderedElementsAre(Pair("idle", 20), Pair("away device", 10)));
}

TEST_F(CoreUsageTest, LongRun_HasARowForEachHour) {
  v1::JobSpec spec = Spec();
  (*spec.mutable_labels())["tenant"] = "vision";
  Hello();
  Handle(SubmitEvent{CallId(1), spec, "r"});
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  for (int step = 1; step <= 150; ++step) {
    Pass(60);
    Report(step);
  }
  std::vector<v1::UsageRow> rows = Rows();
  ASSERT_EQ(rows.size(), 2u);  // no device was free
  for (const v1::UsageRow& row : rows) {
    EXPECT_EQ(row.job_id(), Job().id());
    EXPECT_EQ(row.tenant(), "vision");
    EXPECT_EQ(row.end_ms() - row.begin_ms(), 3'600'000);
    ASSERT_EQ(row.entries_size(), 1);
    EXPECT_EQ(row.entries(0).period_ms(), 7'200'000);
  }
  EXPECT_EQ(rows[1].begin_ms(), rows[0].end_ms());
  EXPECT_THAT(OfAll(), ElementsAre(Pair("productive", 2 * 150 * 60)));
  EXPECT_THAT(OfJob(), ElementsAre(Pair("productive", 2 * 150 * 60)));
}

TEST_F(CoreUsageTest, SteadyTraining_WritesNoAccount) {
  Train();
  Report(1);
  const auto account = [this] {
    return store_->Get(Table::kUsage, schema::kFleetAccount).value().value_or("");
  };
  const std::string before = account();
  for (int step = 2; step <= 100; ++step) {
    Pass(1);
    Report(step);
  }
  EXPECT_EQ(account(), before);
}

TEST_F(CoreUsageTest, ClockThatWasSetBack_StandsStill) {
  Hello();
  Pass(100);
  Restart();
  now_ -= absl::Hours(2);
  Restart();
  Hello();
  Pass(10);
  Seconds all = OfAll();
  EXPECT_DOUBLE_EQ(all["idle"] + all["away worker_lost"], 220);
  EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
}

TEST(DeviceAccountTest, StoredAndReadBack_IsTheSame) {
  DeviceAccount account;
  account.SetDevices({{Use{v1::USAGE_CLASS_HELD, v1::CAUSE_CRASH}, 3000}});
  account.AddTimeUntil(1000, 5000);
  account.SetDevices({{Use{v1::USAGE_CLASS_PRODUCTIVE}, 2333}});
  DeviceAccount read(account.Stored());
  EXPECT_EQ(read.Total(1500), (DeviceTime{4166, 500}));
  EXPECT_EQ(read.devices(), account.devices());
  read.AddTimeUntil(1500, 5500);
  const v1::UsageRow row = read.TakePeriod(5500);
  EXPECT_EQ(row.begin_ms(), 4000);
  EXPECT_EQ(row.entries_size(), 2);
  EXPECT_FALSE(read.has_period());
  EXPECT_EQ(read.Total(1500), (DeviceTime{4166, 500}));
}

TEST(DeviceAccountTest, RowOfAVersionThatDidNotShareDevices_IsOfWholeOnes) {
  v1::Account stored;
  stored.set_clock_ms(1000);
  v1::AccountEntry& entry = *stored.add_entries();
  entry.set_usage_class(v1::USAGE_CLASS_PRODUCTIVE);
  entry.set_total_ms(500);
  entry.set_devices(2);
  const DeviceAccount account(stored);
  EXPECT_EQ(account.thousandths(), 2000);
  EXPECT_EQ(account.Total(2000), (DeviceTime{2500, 0}));
}

TEST(DeviceAccountTest, SharesOfADevice_AddUpExactly) {
  DeviceTime sum, third, rest;
  for (int step = 1; step <= 1000; ++step) {
    third.Add(333, step);
    rest.Add(667, step);
    sum.Add(1000, step);
  }
  third.Add(rest);
  EXPECT_EQ(third, sum);
  DeviceTime long_lived;
  const int64_t year_ms = int64_t{365} * 86'400'000;
  long_lived.Add(int64_t{100'000} * 1000, 10 * year_ms);  // no overflow
  EXPECT_EQ(long_lived, (DeviceTime{100'000 * 10 * year_ms, 0}));
}

}  // namespace
}  // namespace muster::coordinator
