// Plans of the scheduler, made again from the log of changes.
#include "coordinator/core/decision_replay.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/core/schema.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

class DecisionReplayTest : public CoreTest {
 protected:
  void SubmitNamed(const std::string& name, int ranks, int32_t priority = 50) {
    v1::JobSpec spec = Spec(ranks);
    spec.set_name(name);
    spec.set_priority(priority);
    Handle(SubmitEvent{CallId(2), spec, name});
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  // A job trains, stops for another one of larger priority, and that starts.
  void Preempt() {
    const v1::Job victim = Train();
    SubmitNamed("urgent", 2, 90);
    Observe(Ranks(victim, v1::RANK_STATE_RELEASED,
                  {{0, v1::CAUSE_PREEMPTED}, {1, v1::CAUSE_PREEMPTED}}));
    ASSERT_EQ(core_->GetJob("urgent")->state(), v1::JOB_STATE_PLACING);
  }
  static DecisionReport ReportOf(Store& store, Store* base = nullptr) {
    DecisionReplay decisions;
    EXPECT_OK(Replay(store, base, 0, &decisions).status());
    return decisions.report();
  }
  // A copy of the store whose log has been changed.
  std::unique_ptr<MemoryStore> Tamper(const std::function<void(v1::LogEntry&)>& change) {
    std::unique_ptr<MemoryStore> copy = store_->Copy();
    Batch rows;
    EXPECT_OK(
        copy->Scan(Table::kLog, "", "", [&](const std::string& key, const std::string& value) {
          v1::LogEntry entry;
          EXPECT_TRUE(entry.ParseFromString(value));
          change(entry);
          rows.Put(Table::kLog, key, schema::Serialize(entry));
          return true;
        }));
    EXPECT_OK(copy->Write({rows}));
    return copy;
  }
};

TEST_F(DecisionReplayTest, PlansMadeAgain_DecideTheSame) {
  Preempt();
  const DecisionReport report = ReportOf(*store_);
  EXPECT_EQ(report.plans, 3);  // a start, a preemption, another start
  EXPECT_EQ(report.different, 0);
  EXPECT_THAT(report.not_comparable, IsEmpty());
}

TEST_F(DecisionReplayTest, OtherDecision_IsNamedWithBoth) {
  Preempt();
  const std::string victim = Job().id();
  uint64_t entry_of_plan = 0;
  const auto changed = Tamper([&](v1::LogEntry& entry) {
    for (v1::PlanRecord& plan : *entry.mutable_plans()) {
      for (v1::PlanDecision& decision : *plan.mutable_decisions()) {
        if (decision.kind() != v1::PLAN_DECISION_KIND_PREEMPT) continue;
        entry_of_plan = entry.index();
        decision.clear_stopped();
      }
    }
  });
  const DecisionReport report = ReportOf(*changed);
  EXPECT_EQ(report.plans, 3);
  EXPECT_EQ(report.different, 1);
  ASSERT_THAT(report.differences, SizeIs(1));
  EXPECT_EQ(report.differences[0].entry, entry_of_plan);
  EXPECT_EQ(report.differences[0].job, core_->GetJob("urgent")->id());
  EXPECT_EQ(report.differences[0].then, "gets w/cpu:0, w/cpu:1 kept");
  EXPECT_EQ(report.differences[0].now,
            "gets w/cpu:0, w/cpu:1 kept, for which these stop: " + victim);
}

TEST_F(DecisionReplayTest, StartThatDidNotHappenThen_IsADifference) {
  Hello();
  Submit("r", 1);
  SubmitNamed("other", 1);
  const auto changed = Tamper([](v1::LogEntry& entry) {
    for (v1::PlanRecord& plan : *entry.mutable_plans()) plan.clear_decisions();
  });
  const DecisionReport report = ReportOf(*changed);
  EXPECT_EQ(report.different, 2);
  ASSERT_THAT(report.differences, SizeIs(2));
  EXPECT_EQ(report.differences[0].then, "nothing");
  EXPECT_THAT(report.differences[0].now, HasSubstr("starts on w/cpu:"));
}

TEST_F(DecisionReplayTest, PlansOfAnOlderVersion_AreNotComparable) {
  Preempt();
  const auto older = Tamper([](v1::LogEntry& entry) {
    entry.clear_plans();
    entry.clear_queue_usage();
    entry.clear_conditions();
  });
  const DecisionReport report = ReportOf(*older);
  EXPECT_EQ(report.plans, 0);
  EXPECT_THAT(report.not_comparable, ElementsAre(Pair(HasSubstr("kept no record"), 2)));
}

TEST_F(DecisionReplayTest, PlansBeforeTheConditionsAreKnown_AreNotComparable) {
  Preempt();
  const auto changed = Tamper([](v1::LogEntry& entry) { entry.clear_conditions(); });
  const DecisionReport report = ReportOf(*changed);
  EXPECT_EQ(report.plans, 0);
  EXPECT_THAT(report.not_comparable, ElementsAre(Pair(HasSubstr("begins behind"), 3)));
}

TEST_F(DecisionReplayTest, LogOfAnEarlierCopy_GoesOn) {
  Train();
  const std::unique_ptr<MemoryStore> earlier = store_->Copy();
  SubmitNamed("urgent", 2, 90);
  Observe(
      Ranks(Job(), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_PREEMPTED}, {1, v1::CAUSE_PREEMPTED}}));
  const DecisionReport report = ReportOf(*store_, earlier.get());
  EXPECT_EQ(report.plans, 2);
  EXPECT_EQ(report.different, 0);
  EXPECT_THAT(report.not_comparable, IsEmpty());
}

TEST_F(DecisionReplayTest, WorkerThatWasNotConnected_TakesNoRankAgain) {
  const SessionOpened other = HelloOf("a", 2);
  Handle(other);
  Hello();
  Handle(SessionClosed{other.session});
  Submit("r", 1);
  ASSERT_EQ(Job().ranks(0).worker(), "w");
  bool named = false;
  Tamper([&](v1::LogEntry& entry) {
    for (const v1::PlanRecord& plan : entry.plans()) {
      named = true;
      EXPECT_THAT(plan.away(), ElementsAre("a"));
    }
  });
  EXPECT_TRUE(named);
  EXPECT_EQ(ReportOf(*store_).plans, 1);
  EXPECT_EQ(ReportOf(*store_).different, 0);
  // It would have taken the rank.
  const auto connected = Tamper([](v1::LogEntry& entry) {
    for (v1::PlanRecord& plan : *entry.mutable_plans()) plan.clear_away();
  });
  const DecisionReport report = ReportOf(*connected);
  ASSERT_THAT(report.differences, SizeIs(1));
  EXPECT_THAT(report.differences[0].then, HasSubstr("starts on w/"));
  EXPECT_THAT(report.differences[0].now, HasSubstr("starts on a/"));
}

TEST_F(DecisionReplayTest, TurnThatGoesOnBehindAPlan_IsNotComparable) {
  Hello();
  now_ += config_.unreachable_after;  // silence of "w" is due in the turn of the submission
  Submit("r", 1);
  const DecisionReport report = ReportOf(*store_);
  EXPECT_EQ(report.plans, 0);
  EXPECT_THAT(report.not_comparable, ElementsAre(Pair(HasSubstr("went on"), 1)));
}

// Job "job" waits for three slots and holds back the others of its queue, when the clock is set
// back to a time before the end of its back-off and the coordinator starts again.
TEST_F(DecisionReplayTest, BackOffCutShortAfterTheClockWasSetBack_IsKnownToThePlanMadeAgain) {
  SessionOpened hello = HelloOf("w", 3);
  session_ = hello.session;
  Handle(hello);
  revision_ = LastDesired()->revision();
  Submit("r", 3);
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_CRASH}}));
  ASSERT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  SubmitNamed("long", 1, 90);
  ASSERT_EQ(core_->GetJob("long")->state(), v1::JOB_STATE_PLACING);
  Wait(absl::Seconds(2));
  ASSERT_EQ(WaitOf("job").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  now_ -= absl::Hours(1);
  Restart();
  hello.session = session_ = SessionId(++last_session_);
  *hello.hello.mutable_observed() = Ranks(core_->GetJob("long").value(), v1::RANK_STATE_PREPARED);
  Handle(hello);
  ASSERT_EQ(WaitOf("job").code(), v1::WAIT_CODE_BACK_OFF);
  for (int i = 0; i < 13; ++i) {
    now_ += absl::Seconds(5);
    Observe(Ranks(core_->GetJob("long").value(), v1::RANK_STATE_TRAINING));
  }
  ASSERT_EQ(WaitOf("job").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  SubmitNamed("small", 1, 40);
  SubmitNamed("urgent", 1, 95);
  ASSERT_EQ(core_->GetJob("urgent")->state(), v1::JOB_STATE_PLACING);
  ASSERT_EQ(WaitOf("small").code(), v1::WAIT_CODE_BEHIND);
  const DecisionReport report = ReportOf(*store_);
  EXPECT_EQ(report.plans, 3);  // the starts of "job", "long" and "urgent"
  EXPECT_EQ(report.different, 0);
}

TEST_F(DecisionReplayTest, RowsThatContradictEachOther_AreNotComparableAndDoNotEndTheReplay) {
  Preempt();
  const auto changed = Tamper([](v1::LogEntry& entry) {
    for (v1::RowChange& change : *entry.mutable_changes()) {
      if (change.table() != Name(Table::kAttempts) || !change.has_value()) continue;
      v1::AttemptRow attempt;
      ASSERT_TRUE(attempt.ParseFromString(change.value()));
      for (v1::Placement& placement : *attempt.mutable_placements()) placement.set_worker("nobody");
      change.set_value(schema::Serialize(attempt));
    }
  });
  const DecisionReport report = ReportOf(*changed);
  EXPECT_THAT(report.not_comparable, ElementsAre(Pair(HasSubstr("contradict"), 1)));
}

}  // namespace
}  // namespace muster::coordinator
