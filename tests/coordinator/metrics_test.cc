// What the published state becomes: metrics of jobs and of the queue, and targets for Prometheus.
#include "coordinator/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/loop.h"
#include "coordinator/published_state.h"
#include "coordinator/sampler.h"
#include "coordinator/targets.h"
#include "nlohmann/json.hpp"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;

// Keeps the values of counters and gauges, by "name{value,value}".
class RecordingRegistry : public metrics::Registry {
 public:
  struct Cell : metrics::Counter, metrics::Gauge, metrics::Histogram {
    void Increment(double by) override { value += by; }
    void Set(double to) override { value = to; }
    void Observe(double) override {}
    double value = 0;
  };

  metrics::Counter& GetCounter(const metrics::Family& family,
                               const std::vector<std::string>& labels) override {
    return At(family, labels);
  }
  metrics::Gauge& GetGauge(const metrics::Family& family,
                           const std::vector<std::string>& labels) override {
    return At(family, labels);
  }
  metrics::Histogram& GetHistogram(const metrics::Family& family,
                                   const std::vector<std::string>& labels) override {
    return At(family, labels);
  }
  void Remove(const metrics::Family& family, const std::vector<std::string>& labels) override {
    cells_.erase(Key(family, labels));
  }

  bool Has(const std::string& key) const { return cells_.contains(key); }
  double Value(const std::string& key) const {
    const auto found = cells_.find(key);
    return found == cells_.end() ? -1 : found->second->value;
  }

 private:
  static std::string Key(const metrics::Family& family, const std::vector<std::string>& labels) {
    return absl::StrCat(std::string(family.name), "{", absl::StrJoin(labels, ","), "}");
  }
  Cell& At(const metrics::Family& family, const std::vector<std::string>& labels) {
    auto& cell = cells_[Key(family, labels)];
    if (cell == nullptr) cell = std::make_unique<Cell>();
    return *cell;
  }

  std::map<std::string, std::unique_ptr<Cell>> cells_;
};

// Never runs what is posted: nobody watches.
class IdleLoop : public Loop {
 public:
  void Post(absl::AnyInvocable<void()>) override {}
  void PostAfter(absl::Duration, absl::AnyInvocable<void()>) override {}
  bool OnLoop() const override { return true; }
};

class MetricsTest : public ::testing::Test {
 protected:
  // A job of four ranks on CPU slots that has run one attempt.
  void Publish(const std::string& name, v1::JobState state, v1::AttemptState attempt,
               const std::string& phase = "") {
    v1::Job& job = jobs_[name];
    job.set_id(name + "-abcde");
    job.set_name(name);
    job.set_state(state);
    job.set_attempt_state(attempt);
    job.set_phase(phase);
    job.set_attempts(1);
    job.set_step_seconds(0.5);
    Publish(name);
  }
  void Publish(const std::string& name) {
    const v1::Job& job = jobs_[name];
    v1::Job spec, history, ranks, state = job;
    spec.mutable_spec()->mutable_resources()->set_ranks(4);
    spec.mutable_spec()->mutable_resources()->set_device(v1::DEVICE_KIND_CPU);
    spec.mutable_spec()->mutable_checkpoint()->set_every_steps(50);
    *history.mutable_causes() = job.causes();
    *history.mutable_checkpoints() = job.checkpoints();
    *ranks.mutable_ranks() = job.ranks();
    state.clear_causes();
    state.clear_checkpoints();
    state.clear_ranks();
    JobChanged change{JobId(job.id()), static_cast<uint64_t>(1 + name.size()), {}};
    change.changed[JobPart::kState] = std::make_shared<const v1::Job>(state);
    change.changed[JobPart::kSpec] = std::make_shared<const v1::Job>(spec);
    change.changed[JobPart::kHistory] = std::make_shared<const v1::Job>(history);
    change.changed[JobPart::kRanks] = std::make_shared<const v1::Job>(ranks);
    published_.PublishJob(change);
  }
  void EndAttempt(const std::string& name, uint64_t epoch, v1::Cause cause, int64_t step) {
    v1::AttemptEnd& end = *jobs_[name].add_causes();
    end.set_epoch(epoch);
    end.set_cause(cause);
    end.set_step(step);
  }

  SimulatedClock clock_{absl::FromUnixSeconds(1'000'000)};
  IdleLoop loop_;
  RecordingRegistry registry_;
  Metrics metrics_{registry_};
  PublishedState published_{loop_, metrics_};
  std::map<std::string, v1::Job> jobs_;
};

TEST_F(MetricsTest, RunningJob_HasItsStateItsSpecAndItsCheckpoint) {
  Publish("a", v1::JOB_STATE_RUNNING, v1::ATTEMPT_STATE_TRAINING, "training");
  EXPECT_EQ(registry_.Value("muster_job_state{a}"), 5);
  EXPECT_EQ(registry_.Value("muster_job_ranks{a}"), 4);
  EXPECT_EQ(registry_.Value("muster_job_checkpoint_every_steps{a}"), 50);
  EXPECT_EQ(registry_.Value("muster_job_last_checkpoint_timestamp_seconds{a}"), 0);
  v1::CheckpointRecord& saved = *jobs_["a"].add_checkpoints();
  saved.set_step(50);
  *saved.mutable_committed() = ToProto(absl::FromUnixSeconds(1'000'100));
  Publish("a");
  EXPECT_EQ(registry_.Value("muster_job_last_checkpoint_timestamp_seconds{a}"), 1'000'100);
}

TEST_F(MetricsTest, EarlyEnd_IsCountedByCause) {
  Publish("a", v1::JOB_STATE_RUNNING, v1::ATTEMPT_STATE_TRAINING, "training");
  jobs_["a"].set_last_committed_step(50);
  EndAttempt("a", 1, v1::CAUSE_CRASH, 70);
  Publish("a", v1::JOB_STATE_RECOVERING, v1::ATTEMPT_STATE_STOPPING);
  EXPECT_EQ(registry_.Value("muster_job_attempts_ended{a,crash}"), 1);
}

TEST_F(MetricsTest, Replacement_IsCountedByCause) {
  v1::Event event;
  event.set_kind(v1::EVENT_KIND_RANKS_REPLACED);
  event.set_cause(v1::CAUSE_MAINTENANCE);
  metrics_.EventPublished(event);
  EXPECT_EQ(registry_.Value("muster_coordinator_replacements_total{maintenance}"), 1);
}

TEST_F(MetricsTest, EndThatIsFinal_IsSeenUntilTheSeriesAreForgotten) {
  Publish("a", v1::JOB_STATE_RUNNING, v1::ATTEMPT_STATE_TRAINING, "training");
  EndAttempt("a", 1, v1::CAUSE_NUMERIC, 70);
  Publish("a", v1::JOB_STATE_FAILED, v1::ATTEMPT_STATE_RELEASED);
  EXPECT_EQ(registry_.Value("muster_job_attempts_ended{a,numeric}"), 1);
  EXPECT_EQ(registry_.Value("muster_job_state{a}"), 12);
  metrics_.ForgetJob("a");
  EXPECT_FALSE(registry_.Has("muster_job_attempts_ended{a,numeric}"));
  EXPECT_FALSE(registry_.Has("muster_job_state{a}"));
}

TEST_F(MetricsTest, Devices_AreCountedByTheStateOfDeviceAndWorker) {
  v1::Worker ready, lost;
  ready.set_state(v1::WORKER_STATE_READY);
  ready.add_devices()->set_kind(v1::DEVICE_KIND_CUDA);
  v1::Device& broken = *ready.add_devices();
  broken.set_kind(v1::DEVICE_KIND_CUDA);
  broken.set_unusable("Xid 79");
  lost.set_state(v1::WORKER_STATE_LOST);
  lost.add_devices()->set_kind(v1::DEVICE_KIND_CPU);
  metrics_.Workers({ready, lost});
  EXPECT_EQ(registry_.Value("muster_coordinator_devices{cuda,usable}"), 1);
  EXPECT_EQ(registry_.Value("muster_coordinator_devices{cuda,unusable}"), 1);
  EXPECT_EQ(registry_.Value("muster_coordinator_devices{cpu,lost}"), 1);
  EXPECT_EQ(registry_.Value("muster_coordinator_devices{cpu,usable}"), 0);
}

v1::Usage UsageOf(v1::UsageClass usage_class, double seconds, int64_t devices, absl::Time as_of) {
  v1::Usage usage;
  *usage.mutable_as_of() = ToProto(as_of);
  v1::ClassTime& time = *usage.add_times();
  time.set_usage_class(usage_class);
  time.set_device_seconds(seconds);
  time.set_devices(devices);
  return usage;
}

TEST(DeviceTimeCounter, GrowsWithTheDevices_AndNeverGoesBack) {
  const absl::Time start = absl::FromUnixSeconds(1000);
  const auto productive = v1::USAGE_CLASS_PRODUCTIVE;
  DeviceTimeCounter counter;
  DeviceTimeCounter::Growth growth;
  // What the job had spent when the coordinator started is not counted.
  counter.Add("a", "q", UsageOf(productive, 50, 4, start), start, /*begins=*/true, growth);
  EXPECT_TRUE(growth.empty());
  counter.Add("a", "q", UsageOf(productive, 50, 4, start), start + absl::Seconds(2), false, growth);
  EXPECT_DOUBLE_EQ((growth[{"q", productive}]), 8);
  // A job that is new counts whole.
  counter.Add("b", "q", UsageOf(productive, 3, 0, start), start, false, growth);
  EXPECT_DOUBLE_EQ((growth[{"q", productive}]), 11);
  // A second of what was taken for productive was not: it is made up for later.
  growth.clear();
  counter.Add("a", "q", UsageOf(productive, 54, 0, start), start, false, growth);
  EXPECT_TRUE(growth.empty());
  counter.Add("a", "q", UsageOf(productive, 60, 0, start), start, false, growth);
  EXPECT_DOUBLE_EQ((growth[{"q", productive}]), 2);
}

TEST(DeviceTimeCounter, JobThatIsGone_IsAskedForOnceMore) {
  DeviceTimeCounter counter;
  DeviceTimeCounter::Growth growth;
  const auto none = UsageOf(v1::USAGE_CLASS_HELD, 0, 0, absl::UnixEpoch());
  counter.Add("a", "q", none, absl::UnixEpoch(), false, growth);
  counter.Add("b", "q", none, absl::UnixEpoch(), false, growth);
  std::vector<std::string> gone;
  const auto last = [&](const std::string& id) {
    gone.push_back(id);
    counter.Add(id, "q", none, absl::UnixEpoch(), false, growth);
  };
  counter.Forget(last);
  EXPECT_TRUE(gone.empty());
  counter.Add("b", "q", none, absl::UnixEpoch(), false, growth);
  counter.Forget(last);
  counter.Forget(last);
  EXPECT_THAT(gone, ElementsAre("a", "b"));
}

TEST_F(MetricsTest, DeviceSeconds_HaveABoundedNumberOfQueues) {
  metrics_.DeviceSeconds(v1::USAGE_CLASS_PRODUCTIVE, "q", 2);
  EXPECT_EQ(registry_.Value("muster_device_seconds_total{productive,q}"), 2);
  EXPECT_EQ(registry_.Value("muster_device_seconds_total{replayed,q}"), 0);
  EXPECT_EQ(registry_.Value("muster_device_seconds_total{idle,}"), 0);
  for (int i = 0; i < 100; ++i) {
    metrics_.DeviceSeconds(v1::USAGE_CLASS_HELD, absl::StrCat("queue-", i), 1);
  }
  EXPECT_EQ(registry_.Value("muster_device_seconds_total{held,queue-10}"), 1);
  EXPECT_FALSE(registry_.Has("muster_device_seconds_total{held,queue-90}"));
  EXPECT_GT(registry_.Value("muster_device_seconds_total{held,other}"), 30);
}

TEST_F(MetricsTest, Targets_AreTheCoordinatorItsWorkersAndRunningRanks) {
  v1::Worker ready, lost;
  ready.set_name("w1");
  ready.set_state(v1::WORKER_STATE_READY);
  ready.set_metrics_address("10.0.0.1:9071");
  lost.set_name("w2");
  lost.set_state(v1::WORKER_STATE_LOST);
  lost.set_metrics_address("10.0.0.2:9071");
  published_.SetWorkers({ready, lost});
  Publish("a", v1::JOB_STATE_RUNNING, v1::ATTEMPT_STATE_TRAINING, "training");
  for (const auto state : {v1::RANK_STATE_TRAINING, v1::RANK_STATE_EXITED}) {
    v1::RankStatus& rank = *jobs_["a"].add_ranks();
    rank.set_rank(jobs_["a"].ranks_size() - 1);
    rank.set_worker("w1");
    rank.set_state(state);
    rank.set_metrics_address(absl::StrCat("10.0.0.1:", 20000 + rank.rank()));
  }
  Publish("a");
  const auto list = nlohmann::json::parse(TargetsJson(published_, "c1", "10.0.0.9:9070"));
  std::vector<std::string> found;
  for (const auto& target : list) {
    found.push_back(absl::StrCat(target["labels"]["component"].get<std::string>(), " ",
                                 target["targets"][0].get<std::string>()));
    EXPECT_EQ(target["labels"]["cluster"], "c1");
  }
  EXPECT_THAT(found, ElementsAre("coordinator 10.0.0.9:9070", "worker 10.0.0.1:9071",
                                 "rank 10.0.0.1:20000"));
  EXPECT_EQ(list[2]["labels"]["worker"], "w1");
  EXPECT_EQ(list[2]["labels"]["__meta_muster_job_name"], "a");
}

TEST_F(MetricsTest, UnfinishedJobs_AreThoseThatCanStillRun) {
  Publish("a", v1::JOB_STATE_QUEUED, v1::ATTEMPT_STATE_UNSPECIFIED);
  Publish("bb", v1::JOB_STATE_SUCCEEDED, v1::ATTEMPT_STATE_RELEASED);
  const std::vector<JobView> jobs = published_.UnfinishedJobs();
  ASSERT_EQ(jobs.size(), 1u);
  EXPECT_EQ(jobs[0][JobPart::kState]->name(), "a");
}

}  // namespace
}  // namespace muster::coordinator
