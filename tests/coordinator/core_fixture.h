// What tests of the core share.
#ifndef MUSTER_TESTS_COORDINATOR_CORE_FIXTURE_H_
#define MUSTER_TESTS_COORDINATOR_CORE_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core.h"
#include "coordinator/core/decision_replay.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/state_log.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {

// A core, its store, and the daemon of one worker "w" with two slots, which reports what the test
// says.
class CoreTest : public ::testing::Test {
 protected:
  CoreTest() { Restart(); }
  // Whatever a test does, its plans can be made again from the log.
  ~CoreTest() override {
    DecisionReplay decisions;
    if (!Replay(*store_, nullptr, 0, &decisions).ok()) return;  // it has damaged the store
    for (const DecisionDifference& difference : decisions.report().differences) {
      ADD_FAILURE() << "entry " << difference.entry << ": job " << difference.job << " "
                    << difference.then << "; by a plan made again: " << difference.now;
    }
  }

  void Restart() {
    CoreOutput output;
    auto core = Core::Recover(config_, *store_, Rng(7), now_, &output);
    ASSERT_OK(core.status());
    core_ = std::move(*core);
    Take(std::move(output));
  }

  // `check`: the invariants too, which looks at every job.
  void Take(CoreOutput output, bool check = true) {
    ASSERT_OK(store_->Write({output.batch}));
    if (check) {
      EXPECT_THAT(core_->CheckInvariants(), ::testing::IsEmpty());
    }
    actions_ = std::move(output.actions);
  }
  void Handle(const CoreEvent& event) { Take(core_->Handle(event, now_)); }
  // Lets time pass; the timer fires as often as the core wants it. `actions_` has those of the last
  // time.
  void Wait(absl::Duration time) {
    const absl::Time until = now_ + time;
    do {
      now_ = std::min(until, now_ + kTurnIntervalMax);
      Handle(TimerFired{});
    } while (now_ < until);
  }
  // The coordinator's process is stopped for a time; then its timer fires.
  void Pause(absl::Duration time) {
    now_ += time;
    Handle(TimerFired{});
  }

  template <typename Action>
  std::vector<Action> Actions() const {
    std::vector<Action> out;
    for (const CoreAction& action : actions_) {
      if (const auto* match = std::get_if<Action>(&action)) out.push_back(*match);
    }
    return out;
  }
  std::optional<v1::Desired> LastDesired() const {
    std::optional<v1::Desired> out;
    for (const SendAction& send : Actions<SendAction>()) {
      if (send.message.has_desired()) out = send.message.desired();
    }
    return out;
  }

  static v1::JobSpec Spec(int ranks = 2) {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.set_queue("default");
    spec.set_priority(50);
    spec.mutable_engine()->mutable_training()->set_steps(100);
    spec.mutable_resources()->set_device(v1::DEVICE_KIND_CPU);
    spec.mutable_resources()->set_ranks(ranks);
    spec.mutable_checkpoint()->set_every_steps(10);
    spec.mutable_restart()->set_max_failures(1);
    spec.mutable_restart()->mutable_backoff()->mutable_initial()->set_seconds(1);
    spec.mutable_restart()->mutable_backoff()->mutable_max()->set_seconds(60);
    return spec;
  }
  v1::Job Submit(const std::string& request = "r", int ranks = 2) {
    Handle(SubmitEvent{CallId(1), Spec(ranks), request});
    const auto replies = Actions<ReplyAction>();
    EXPECT_EQ(replies.size(), 1u);
    EXPECT_OK(replies[0].status);
    return replies[0].job;
  }
  // The first message of a daemon, in a session of its own.
  SessionOpened HelloOf(const std::string& worker, int slots) {
    SessionOpened hello;
    hello.session = SessionId(++last_session_);
    hello.incarnation = Incarnation(1);
    hello.hello.set_worker(worker);
    for (int slot = 0; slot < slots; ++slot) {
      v1::Device& device = *hello.hello.add_devices();
      device.set_name(absl::StrCat("cpu:", slot));
      device.set_kind(v1::DEVICE_KIND_CPU);
    }
    return hello;
  }
  // Opens a session of "w".
  void Hello(uint64_t incarnation = 1, const v1::Observed& observed = {}) {
    SessionOpened hello = HelloOf("w", 2);
    session_ = hello.session;
    hello.incarnation = Incarnation(incarnation);
    incarnation_ = incarnation;
    *hello.hello.mutable_observed() = observed;
    Handle(hello);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  void Send(v1::FromWorker message) {
    message.set_incarnation(incarnation_);
    Handle(SessionMessage{session_, message});
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  // A report of all ranks of the job in `state`, those in `exits` with their causes as EXITED.
  static v1::Observed Ranks(const v1::Job& job, v1::RankState state,
                            const std::map<int, v1::Cause>& exits = {}) {
    v1::Observed observed;
    v1::ObservedAttempt& attempt = *observed.add_attempts();
    attempt.set_job_id(job.id());
    attempt.set_epoch(job.epoch());
    for (int i = 0; i < job.spec().resources().ranks(); ++i) {
      v1::ObservedRank& rank = *attempt.add_ranks();
      rank.set_rank(i);
      rank.set_state(state);
      if (const auto exit = exits.find(i); exit != exits.end()) {
        if (state < v1::RANK_STATE_EXITED) rank.set_state(v1::RANK_STATE_EXITED);
        rank.mutable_exit()->set_cause(exit->second);
      }
    }
    return observed;
  }
  void Observe(v1::Observed observed) {
    observed.set_applied_revision(revision_);
    v1::FromWorker message;
    *message.mutable_observed() = std::move(observed);
    Send(std::move(message));
  }
  v1::Job Job() const { return core_->GetJob("job").value(); }
  v1::WaitReason WaitOf(const std::string& job) const { return core_->GetJob(job)->waiting(); }
  // Brings a job to RUNNING.
  v1::Job Train(int ranks = 2) {
    Hello();
    Submit("r", ranks);
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
    EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
    return Job();
  }
  // Commits a checkpoint; returns the status code of the verdict, -1 when none came.
  int Commit(const v1::Job& job, int64_t step) {
    v1::FromWorker message;
    message.mutable_commit()->set_job_id(job.id());
    message.mutable_commit()->set_epoch(job.epoch());
    message.mutable_commit()->mutable_checkpoint()->set_step(step);
    Send(std::move(message));
    for (const SendAction& send : Actions<SendAction>()) {
      if (send.message.has_verdict()) return send.message.verdict().status_code();
    }
    return -1;
  }

  CoreConfig config_;
  std::unique_ptr<MemoryStore> store_ = MemoryStore::Make("test");
  std::unique_ptr<Core> core_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::vector<CoreAction> actions_;
  uint64_t last_session_ = 0;
  SessionId session_;  // of "w"
  uint64_t incarnation_ = 1;
  uint64_t revision_ = 0;  // of the newest Desired that "w" got
};

}  // namespace muster::coordinator

#endif  // MUSTER_TESTS_COORDINATOR_CORE_FIXTURE_H_
