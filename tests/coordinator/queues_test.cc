#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/scheduler.h"
#include "proto/time.h"
#include "tests/support/sanitized.h"
#include "tests/support/scheduled_jobs.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

v1::QueueSpec& AddQueue(v1::QueuePolicy& policy, const std::string& name,
                        const std::string& parent = "", int64_t guaranteed = 0) {
  v1::QueueSpec& queue = *policy.add_queues();
  queue.set_name(name);
  queue.set_parent(parent);
  if (guaranteed > 0) (*queue.mutable_guaranteed())["cpu"] = guaranteed;
  return queue;
}

// A cluster whose jobs end when their time is over.
class QueuesTest : public ::testing::Test {
 protected:
  void Define(const v1::QueuePolicy& policy) {
    absl::StatusOr<QueueTree> made = QueueTree::Make(policy);
    ASSERT_OK(made.status());
    tree_ = *std::move(made);
    use_ = QueueUse(tree_);
  }
  void AddWorker(int slots) {
    WorkerView worker;
    worker.id = WorkerId(absl::StrCat("w", workers_++));
    worker.ready = true;
    for (int i = 0; i < slots; ++i) {
      SlotView slot;
      slot.device = absl::StrCat("cpu:", i);
      worker.slots.push_back(slot);
    }
    slots_.Put(worker);
  }
  WaitingJob Job(const std::string& queue, int ranks,
                 absl::Duration runtime = absl::InfiniteDuration(), int32_t priority = 50) {
    WaitingJob job;
    job.submit_sequence = ++sequence_;
    job.id = JobId(absl::StrCat("job-", job.submit_sequence));
    job.name = job.id.value();
    job.queue = queue;
    job.ranks = ranks;
    job.priority = priority;
    job.runtime = runtime;
    job.queued_at = now_;
    return job;
  }
  const WaitingJob& Wait(WaitingJob job) {
    const JobId id = job.id;
    queue_.Add(std::move(job));
    return *queue_.Find(id);
  }
  Snapshot Cluster() { return {slots_, running_, kept_, tree_, use_, history_}; }
  Schedule Plan() {
    const SlotIndex before = slots_;
    Schedule plan = coordinator::Plan(Cluster(), queue_, policy_, now_);
    EXPECT_EQ(slots_, before) << "a plan leaves the slots as they were";
    return plan;
  }
  void Begin(const Start& start) {
    const WaitingJob job = *queue_.Find(start.job);
    RunningJob running = testing::RunningGang(job, now_);
    if (job.runtime != absl::InfiniteDuration()) running.ends_at = now_ + job.runtime;
    running_.Put(job.id, running);
    Accrue(job.queue);
    if (start.in_turn) history_.TookTurn(job.queue, now_);
    use_.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, 1);
    for (const v1::Placement& placement : start.placements) {
      slots_.SetHolder(WorkerId(placement.worker()), placement.device(), job.id);
    }
    queue_.Remove(job.id);
    started_[job.id] = now_;
  }
  void End(const JobId& id) {
    const RunningJob job = *running_.Find(id);
    Accrue(job.queue);
    use_.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, -1);
    for (const WorkerId& worker : std::set<WorkerId>(slots_.WorkersOf(id))) {
      const WorkerView view = *slots_.Find(worker);
      for (const SlotView& slot : view.slots) {
        if (slot.held_by == id) slots_.SetHolder(worker, slot.device, JobId());
      }
    }
    running_.Remove(id);
  }
  void Accrue(const std::string& queue) {
    for (const int above : tree_.Path(tree_.Find(queue))) {
      history_.Accrue(tree_, use_, above, now_);
    }
  }
  // Plans and starts until nothing starts; returns how many did.
  int StartAll() {
    const Schedule plan = Plan();
    int started = 0;
    for (const Decision& decision : plan.decisions) {
      if (const Start* start = std::get_if<Start>(&decision)) {
        Begin(*start);
        ++started;
      }
    }
    return started;
  }
  // To the next end of a job; false when there is none.
  bool Step() {
    if (running_.by_end().empty()) return false;
    now_ = std::max(now_, running_.by_end().begin()->first);
    while (!running_.by_end().empty() && running_.by_end().begin()->first <= now_) {
      const JobId id = running_.by_end().begin()->second;
      End(id);
    }
    return true;
  }
  v1::WaitReason ReasonOf(const Schedule& plan, const JobId& id) {
    for (const Explanation& explanation : plan.explanations) {
      if (explanation.job == id) return explanation.reason();
    }
    return {};
  }
  int64_t Used(const std::string& queue) const {
    return DevicesOf(use_.at(tree_.Find(queue)).thousandths[v1::DEVICE_KIND_CPU]);
  }
  std::vector<JobId> Stopped(const Schedule& plan) {
    std::vector<JobId> stopped;
    for (const Decision& decision : plan.decisions) {
      if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        stopped.insert(stopped.end(), preempt->eviction.stopped.begin(),
                       preempt->eviction.stopped.end());
      }
    }
    return stopped;
  }
  // Of jobs that are resized: how many slots they go on with.
  std::map<JobId, size_t> SlotsAfterResize(const Schedule& plan) {
    std::map<JobId, size_t> slots;
    for (const Decision& decision : plan.decisions) {
      if (const auto* resize = std::get_if<Resize>(&decision)) {
        slots[resize->resized.job] = resize->resized.slots.size();
      }
    }
    return slots;
  }

  absl::Time now_ = kNow;
  QueueTree tree_;
  QueueUse use_{tree_};
  QueueHistory history_;
  SlotIndex slots_;
  RunningJobs running_;
  KeptSlots kept_;
  WaitingQueue queue_;
  SchedulePolicy policy_;
  std::map<JobId, absl::Time> started_;
  int workers_ = 0;
  uint64_t sequence_ = 0;
};

// ---- policies

std::string Refusal(const v1::QueuePolicy& policy) {
  const absl::StatusOr<QueueTree> made = QueueTree::Make(policy);
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(made.status().message());
}

TEST(QueueTree, NoPolicy_IsTheQueueDefault) {
  const QueueTree tree = *QueueTree::Make({});
  EXPECT_OK(tree.CheckJob("default", v1::DEVICE_KIND_CUDA, 1'000'000));
  const absl::Status unknown = tree.CheckJob("research", v1::DEVICE_KIND_CPU, 1);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("queue: there is no queue 'research'"));
}

TEST(QueueTree, PoliciesThatCannotBe_AreRefusedWithFieldAndFix) {
  v1::QueuePolicy cycle;
  AddQueue(cycle, "a", "b");
  AddQueue(cycle, "b", "a");
  EXPECT_THAT(Refusal(cycle), HasSubstr("queues[0].parent: queue 'a' is below 'b'"));
  v1::QueuePolicy orphan;
  AddQueue(orphan, "a", "nowhere");
  EXPECT_THAT(Refusal(orphan), HasSubstr("queues[0].parent: there is no queue 'nowhere'"));
  v1::QueuePolicy twice;
  AddQueue(twice, "a");
  AddQueue(twice, "a");
  EXPECT_THAT(Refusal(twice), HasSubstr("queues[1].name: there are two queues 'a'"));
  v1::QueuePolicy too_much;
  AddQueue(too_much, "team", "", 8);
  AddQueue(too_much, "a", "team", 6);
  AddQueue(too_much, "b", "team", 6);
  EXPECT_THAT(Refusal(too_much), HasSubstr("queues[0].guaranteed.cpu: the queues below 'team' are "
                                           "guaranteed 12 together, more than its own 8"));
  v1::QueuePolicy strange;
  (*AddQueue(strange, "a").mutable_guaranteed())["gpu"] = 1;
  AddQueue(strange, "b").set_weight(-1);
  AddQueue(strange, "B c");
  (*AddQueue(strange, "d").mutable_borrowing_limit())["cpu"] = -5;
  strange.mutable_half_life()->set_seconds(1);
  const std::string why = Refusal(strange);
  EXPECT_THAT(why, HasSubstr("queues[0].guaranteed: there are no devices of kind 'gpu'"));
  EXPECT_THAT(why, HasSubstr("queues[1].weight: -1 is out of range"));
  EXPECT_THAT(why, HasSubstr("queues[2].name: 'B c' is not a queue name"));
  EXPECT_THAT(why, HasSubstr("queues[3].borrowing_limit.cpu: -5 is out of range"));
  EXPECT_THAT(why, HasSubstr("half_life: 1s is out of range"));
}

TEST(QueueTree, JobThatCouldNeverRun_IsRefused) {
  v1::QueuePolicy policy;
  (*AddQueue(policy, "team", "", 4).mutable_borrowing_limit())["cpu"] = 2;
  (*AddQueue(policy, "a", "team").mutable_tenant_limit())["cpu"] = 3;
  const QueueTree tree = *QueueTree::Make(policy);
  EXPECT_OK(tree.CheckJob("a", v1::DEVICE_KIND_CPU, 3));
  EXPECT_THAT(
      std::string(tree.CheckJob("a", v1::DEVICE_KIND_CPU, 7).message()),
      HasSubstr("resources.ranks: 7 cpu devices are more than queue 'team' may ever use, 6"));
  EXPECT_THAT(std::string(tree.CheckJob("a", v1::DEVICE_KIND_CPU, 4).message()),
              HasSubstr("more than one tenant may use of queue 'a', 3"));
  EXPECT_THAT(std::string(tree.CheckJob("team", v1::DEVICE_KIND_CPU, 1).message()),
              HasSubstr("has queues below it"));
}

// ---- order

TEST_F(QueuesTest, Weights_ShareWhatIsNotGuaranteed) {
  v1::QueuePolicy policy;
  AddQueue(policy, "two").set_weight(2);
  AddQueue(policy, "one");
  Define(policy);
  for (int i = 0; i < 9; ++i) AddWorker(1);
  for (int i = 0; i < 20; ++i) {
    Wait(Job("one", 1, absl::InfiniteDuration(), 900));  // a priority counts in its queue alone
    Wait(Job("two", 1));
  }
  EXPECT_EQ(StartAll(), 9);
  EXPECT_EQ(Used("two"), 6);
  EXPECT_EQ(Used("one"), 3);
}

TEST_F(QueuesTest, QueueWithinItsGuarantee_GoesBeforeOneThatBorrows) {
  v1::QueuePolicy policy;
  AddQueue(policy, "owner", "", 4);
  AddQueue(policy, "other");
  Define(policy);
  AddWorker(4);
  for (int i = 0; i < 8; ++i) Wait(Job("other", 1));
  for (int i = 0; i < 3; ++i) Wait(Job("owner", 1));
  StartAll();
  EXPECT_EQ(Used("owner"), 3);
  EXPECT_EQ(Used("other"), 1);
}

TEST_F(QueuesTest, PastUse_CountsAndFades) {
  v1::QueuePolicy policy;
  AddQueue(policy, "heavy");
  AddQueue(policy, "light");
  policy.mutable_half_life()->set_seconds(3600);
  Define(policy);
  AddWorker(1);
  Wait(Job("heavy", 1, absl::Hours(2)));
  StartAll();
  now_ += absl::Hours(2);
  End(JobId("job-1"));
  const double before =
      history_.Average(tree_, use_, tree_.Find("heavy"), v1::DEVICE_KIND_CPU, now_);
  EXPECT_NEAR(before, 0.75, 1e-9);  // two half-lives of full use
  const WaitingJob& heavy = Wait(Job("heavy", 1));
  const JobId light = Wait(Job("light", 1)).id;
  const Schedule plan = Plan();
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(std::get<Start>(plan.decisions[0]).job, light) << "not " << heavy.id;
  now_ += absl::Hours(1);
  EXPECT_NEAR(history_.Average(tree_, use_, tree_.Find("heavy"), v1::DEVICE_KIND_CPU, now_),
              before / 2, 1e-9);
}

// ---- limits

TEST_F(QueuesTest, Limits_AreKeptAndNamed) {
  v1::QueuePolicy policy;
  (*AddQueue(policy, "quota", "", 1).mutable_borrowing_limit())["cpu"] = 2;
  AddQueue(policy, "jobs").set_running_jobs_max(1);
  (*AddQueue(policy, "tenants").mutable_tenant_limit())["cpu"] = 1;
  Define(policy);
  AddWorker(20);
  for (int i = 0; i < 4; ++i) Wait(Job("quota", 1));
  for (int i = 0; i < 2; ++i) Wait(Job("jobs", 1));
  std::vector<JobId> tenants;
  for (const char* tenant : {"ann", "ann", "bob"}) {
    WaitingJob job = Job("tenants", 1);
    job.tenant = tenant;
    tenants.push_back(Wait(job).id);
  }
  const Schedule plan = Plan();
  EXPECT_EQ(StartAll(), 3 + 1 + 2);
  EXPECT_EQ(Used("quota"), 3);
  const v1::WaitReason quota = ReasonOf(plan, JobId("job-4"));
  EXPECT_EQ(quota.code(), v1::WAIT_CODE_QUEUE_QUOTA);
  EXPECT_EQ(quota.limiting_queue(), "quota");
  EXPECT_EQ(quota.limit(), 3);
  EXPECT_EQ(quota.used(), 3);
  EXPECT_EQ(ReasonOf(plan, JobId("job-6")).code(), v1::WAIT_CODE_QUEUE_JOBS);
  EXPECT_EQ(ReasonOf(plan, tenants[1]).code(), v1::WAIT_CODE_TENANT_LIMIT);
  EXPECT_EQ(ReasonOf(plan, tenants[1]).tenant(), "ann");
}

TEST_F(QueuesTest, LimitOfAQueueAbove_HoldsForAllBelowIt) {
  v1::QueuePolicy policy;
  (*AddQueue(policy, "team", "", 0).mutable_borrowing_limit())["cpu"] = 3;
  AddQueue(policy, "a", "team");
  AddQueue(policy, "b", "team");
  Define(policy);
  AddWorker(8);
  for (int i = 0; i < 4; ++i) {
    Wait(Job("a", 1));
    Wait(Job("b", 1));
  }
  StartAll();
  EXPECT_EQ(Used("team"), 3);
  EXPECT_EQ(Used("a"), 2);
  EXPECT_EQ(Used("b"), 1);
}

TEST_F(QueuesTest, QueueThatIsGone_HoldsItsJobsAndNoOthers) {
  AddWorker(2);
  const JobId lost = Wait(Job("gone", 1)).id;
  Wait(Job("default", 1));
  const Schedule plan = Plan();
  EXPECT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(ReasonOf(plan, lost).code(), v1::WAIT_CODE_NO_QUEUE);
}

// ---- reclaim

TEST_F(QueuesTest, BorrowedDevices_AreGivenBackWhateverThePriority) {
  v1::QueuePolicy policy;
  AddQueue(policy, "owner", "", 4);
  AddQueue(policy, "borrower", "", 2);
  Define(policy);
  AddWorker(6);
  for (int i = 0; i < 6; ++i) Wait(Job("borrower", 1, absl::InfiniteDuration(), 900));
  EXPECT_EQ(StartAll(), 6);
  Wait(Job("owner", 3, absl::InfiniteDuration(), 1));
  EXPECT_EQ(Stopped(Plan()).size(), 3u);
}

TEST_F(QueuesTest, NoMoreThanTheGuarantee_IsReclaimed) {
  v1::QueuePolicy policy;
  AddQueue(policy, "owner", "", 2);
  AddQueue(policy, "other", "", 4);
  Define(policy);
  AddWorker(6);
  for (int i = 0; i < 4; ++i) Wait(Job("other", 1));
  for (int i = 0; i < 2; ++i) Wait(Job("owner", 1));
  EXPECT_EQ(StartAll(), 6);
  Wait(Job("owner", 1));
  EXPECT_TRUE(Stopped(Plan()).empty()) << "it has all that is guaranteed to it";
}

TEST_F(QueuesTest, BorrowedDevices_AreGivenBackByShrinkingBeforeAnyJobIsStopped) {
  v1::QueuePolicy policy;
  AddQueue(policy, "owner", "", 4);
  AddQueue(policy, "borrower", "", 2);
  Define(policy);
  AddWorker(6);
  Wait(Job("borrower", 2));
  const WaitingJob elastic = Wait(Job("borrower", 4, absl::InfiniteDuration(), 900));
  EXPECT_EQ(StartAll(), 2);
  RunningJob running = *running_.Find(elastic.id);
  auto sizes = std::make_shared<Elasticity>();
  sizes->gang = elastic;
  sizes->gang.ranks = 1;
  sizes->gang.sizes = {1, 2, 3, 4};
  sizes->grow_after = absl::Hours(1);
  running.elastic = std::move(sizes);
  running_.Put(elastic.id, running);
  now_ += absl::Hours(1);

  const JobId owned = Wait(Job("owner", 2, absl::InfiniteDuration(), 1)).id;
  Schedule plan = Plan();
  EXPECT_TRUE(Stopped(plan).empty());
  EXPECT_EQ(SlotsAfterResize(plan), (std::map<JobId, size_t>{{elastic.id, 2}}));
  queue_.Remove(owned);
  // Its smallest size leaves one too few; of the other job no more is taken than is wanted.
  Wait(Job("owner", 4, absl::InfiniteDuration(), 1));
  plan = Plan();
  EXPECT_EQ(Stopped(plan).size(), 1u);
  EXPECT_EQ(SlotsAfterResize(plan), (std::map<JobId, size_t>{{elastic.id, 2}}));
}

// ---- jobs that start before one that does not fit

TEST_F(QueuesTest, JobThatEndsInTime_StartsBeforeOneThatDoesNotFit) {
  AddWorker(4);
  Wait(Job("default", 2, absl::Seconds(100)));
  StartAll();
  const JobId head = Wait(Job("default", 4)).id;
  const JobId longer = Wait(Job("default", 1, absl::Seconds(101))).id;
  const JobId unknown = Wait(Job("default", 1)).id;
  const JobId shorter = Wait(Job("default", 1, absl::Seconds(100))).id;
  const Schedule plan = Plan();
  ASSERT_EQ(plan.decisions.size(), 2u);
  EXPECT_EQ(std::get<Start>(plan.decisions[0]).job, shorter);
  const Reserve& reserve = std::get<Reserve>(plan.decisions[1]);
  EXPECT_EQ(reserve.job, head);
  EXPECT_THAT(reserve.slots,
              ::testing::ElementsAre(Slot{WorkerId("w0"), "cpu:0"}, Slot{WorkerId("w0"), "cpu:1"},
                                     Slot{WorkerId("w0"), "cpu:2"}, Slot{WorkerId("w0"), "cpu:3"}));
  EXPECT_EQ(reserve.starts_at, kNow + absl::Seconds(100));
  const v1::SetAside set_aside = AsMessage(reserve);
  ASSERT_EQ(set_aside.workers_size(), 1);
  EXPECT_EQ(set_aside.workers(0).slots(), 4);
  EXPECT_EQ(coordinator::Explain(Cluster(), queue_, policy_, now_, head)
                .reason.set_aside()
                .SerializeAsString(),
            set_aside.SerializeAsString());
  EXPECT_EQ(ReasonOf(plan, head).code(), v1::WAIT_CODE_SLOTS_TAKEN);
  for (const JobId& id : {longer, unknown}) {
    EXPECT_EQ(ReasonOf(plan, id).code(), v1::WAIT_CODE_BEHIND);
    EXPECT_EQ(FromProto(ReasonOf(plan, id).reserved_start()), kNow + absl::Seconds(100));
  }
}

TEST_F(QueuesTest, JobOnOtherSlots_StartsHoweverLongItRuns) {
  AddWorker(2);
  AddWorker(3);
  Wait(Job("default", 2, absl::Seconds(100)));  // all of w0
  StartAll();
  Wait(Job("default", 4));  // w0 and two of w1
  Wait(Job("default", 1));  // the slot that is left
  Wait(Job("default", 1));
  EXPECT_EQ(StartAll(), 1);
}

TEST_F(QueuesTest, NothingIsSetAside_WhereNobodyKnowsTheEnd) {
  AddWorker(2);
  Wait(Job("default", 2));
  StartAll();
  Wait(Job("default", 2));
  EXPECT_THAT(Plan().decisions, ::testing::IsEmpty());
}

TEST_F(QueuesTest, SlotsAreSetAsideForTheFirstOfFewQueues) {
  v1::QueuePolicy policy;
  for (int i = 0; i < 6; ++i) AddQueue(policy, absl::StrCat("q", i));
  Define(policy);
  AddWorker(4);
  Wait(Job("q0", 4, absl::Seconds(100)));
  StartAll();
  for (int i = 0; i < 6; ++i) {
    Wait(Job(absl::StrCat("q", i), 2));
    Wait(Job(absl::StrCat("q", i), 2));
  }
  std::set<std::string> queues;
  for (const Decision& decision : Plan().decisions) {
    const Reserve& reserve = std::get<Reserve>(decision);
    EXPECT_FALSE(ChangesState(decision));
    EXPECT_EQ(reserve.slots.size(), 2u);
    EXPECT_TRUE(queues.insert(queue_.Find(reserve.job)->queue).second);
  }
  EXPECT_EQ(queues.size(), static_cast<size_t>(policy_.reservations_max));
}

TEST_F(QueuesTest, WhileNoEndIsKnown_TheOwnQueueWaitsAndOthersOnlyForAWhile) {
  v1::QueuePolicy policy;
  AddQueue(policy, "a");
  AddQueue(policy, "b");
  policy.mutable_passed_over_max()->set_seconds(600);
  Define(policy);
  AddWorker(4);
  Wait(Job("b", 2));
  StartAll();
  Wait(Job("a", 4));
  Wait(Job("a", 1, absl::Seconds(1)));
  const JobId other = Wait(Job("b", 1)).id;
  const Schedule soon = Plan();
  ASSERT_EQ(soon.decisions.size(), 1u);
  EXPECT_EQ(std::get<Start>(soon.decisions[0]).job, other);
  now_ += absl::Seconds(600);
  const Schedule late = Plan();
  EXPECT_TRUE(late.decisions.empty());
  EXPECT_EQ(ReasonOf(late, other).code(), v1::WAIT_CODE_RESERVED);
  EXPECT_EQ(ReasonOf(late, other).blocker().job_name(), "job-2");
}

// The bound of docs/queues.md for the first job of a queue whose share is larger than that of
// others for ever: turn_after, and the time that the jobs that run then take.
TEST_F(QueuesTest, EndlessStreamOfOtherQueues_DelaysAGangByTurnAfterAtMost) {
  const auto wait_of = [this](absl::Duration turn_after) {
    v1::QueuePolicy policy;
    AddQueue(policy, "big").set_weight(1);
    AddQueue(policy, "small").set_weight(1e6);
    policy.mutable_turn_after()->set_seconds(absl::ToInt64Seconds(turn_after));
    Define(policy);
    slots_ = SlotIndex();
    running_ = RunningJobs();
    queue_ = WaitingQueue();
    history_ = QueueHistory();
    AddWorker(4);
    const JobId past = Wait(Job("big", 4)).id;
    StartAll();
    now_ += absl::Hours(1);
    End(past);
    const JobId gang = Wait(Job("big", 4)).id;
    const absl::Time queued = now_;
    Rng rng(testing::TestSeed());
    std::map<JobId, absl::Time> ends;  // which nobody knows
    while (queue_.Contains(gang) && now_ < queued + absl::Hours(6)) {
      while (queue_.size() < 5) Wait(Job("small", 1));
      StartAll();
      for (const auto& [id, running] : running_.all()) {
        ends.emplace(id, now_ + absl::Seconds(10 + static_cast<int64_t>(rng.Below(290))));
      }
      now_ += absl::Seconds(1);
      std::erase_if(ends, [this](const auto& end) {
        if (end.second > now_ || !running_.Contains(end.first)) return false;
        End(end.first);
        return true;
      });
    }
    return now_ - queued;
  };
  EXPECT_GE(wait_of(absl::Hours(24)), absl::Hours(6)) << "else this test says nothing";
  EXPECT_LE(wait_of(absl::Hours(1)), absl::Hours(1) + absl::Seconds(302));
}

// The bound of docs/queues.md: a job starts no later than it would if nobody had come behind it.
TEST_F(QueuesTest, RandomJobs_NobodyIsDelayedByThoseBehind) {
  Rng rng(testing::TestSeed());
  int before_their_turn = 0;
  for (int round = 0; round < testing::Cases(300); ++round) {
    slots_ = SlotIndex();
    running_ = RunningJobs();
    queue_ = WaitingQueue();
    use_ = QueueUse(tree_);
    started_.clear();
    workers_ = 0;
    const int workers = 1 + static_cast<int>(rng.Below(3));
    int total = 0;
    for (int i = 0; i < workers; ++i) {
      const int count = 1 + static_cast<int>(rng.Below(5));
      total += count;
      AddWorker(count);
    }
    std::vector<JobId> order;
    const auto add = [&] {
      order.push_back(Wait(Job("default", 1 + static_cast<int>(rng.Below(total)),
                               absl::Seconds(1 + static_cast<int64_t>(rng.Below(100)))))
                          .id);
    };
    for (int i = 0; i < 6; ++i) add();
    std::map<JobId, absl::Time> promised;
    do {
      if (rng.Below(2) == 0 && order.size() < 20) add();
      StartAll();
      const Schedule plan = Plan();
      // Of the first that waits: when it is to start. It may only become earlier.
      for (const JobId& id : order) {
        if (!queue_.Contains(id)) continue;
        const Forecast forecast = Explain(Cluster(), queue_, policy_, now_, id);
        ASSERT_TRUE(forecast.reason.has_estimated_start());
        const absl::Time at = FromProto(forecast.reason.estimated_start());
        const auto [known, first] = promised.emplace(id, at);
        ASSERT_LE(at, known->second) << "round " << round << ": " << id << " was delayed";
        break;
      }
    } while (Step());
    ASSERT_EQ(queue_.size(), 0u) << "round " << round;
    for (const auto& [id, at] : promised) ASSERT_LE(started_[id], at) << "round " << round;
    for (size_t i = 1; i < order.size(); ++i) {
      before_their_turn += started_[order[i]] < started_[order[i - 1]];
    }
  }
  EXPECT_GT(before_their_turn, testing::Cases(100));
}

// On random trees nothing ever exceeds a limit, and what is guaranteed is got.
TEST_F(QueuesTest, RandomTrees_LimitsHoldExactly) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < testing::Cases(300); ++round) {
    v1::QueuePolicy policy;
    const int count = 1 + static_cast<int>(rng.Below(6));
    for (int i = 0; i < count; ++i) {
      v1::QueueSpec& queue =
          AddQueue(policy, absl::StrCat("q", i),
                   i > 0 && rng.Below(2) == 0 ? absl::StrCat("q", rng.Below(i)) : "");
      if (rng.Below(2) == 0) {
        (*queue.mutable_borrowing_limit())["cpu"] = static_cast<int64_t>(rng.Below(8));
      }
      if (rng.Below(3) == 0) queue.set_running_jobs_max(static_cast<int32_t>(rng.Below(4)));
      if (rng.Below(3) == 0) {
        (*queue.mutable_tenant_limit())["cpu"] = static_cast<int64_t>(rng.Below(5));
      }
    }
    Define(policy);
    slots_ = SlotIndex();
    running_ = RunningJobs();
    queue_ = WaitingQueue();
    workers_ = 0;
    for (int i = 0; i < 4; ++i) AddWorker(1 + static_cast<int>(rng.Below(5)));
    for (int step = 0; step < 8; ++step) {
      for (int i = 0; i < 4; ++i) {
        WaitingJob job =
            Job(absl::StrCat("q", rng.Below(count)), 1 + static_cast<int>(rng.Below(4)),
                absl::Seconds(1 + static_cast<int64_t>(rng.Below(50))));
        job.tenant = absl::StrCat("t", rng.Below(2));
        Wait(job);
      }
      StartAll();
      for (size_t q = 0; q < tree_.queues().size(); ++q) {
        const QueueTree::Queue& queue = tree_.queues()[q];
        const QueueUse::Of& used = use_.at(static_cast<int>(q));
        if (queue.limit[v1::DEVICE_KIND_CPU].has_value()) {
          ASSERT_LE(used.thousandths[v1::DEVICE_KIND_CPU],
                    *queue.limit[v1::DEVICE_KIND_CPU] * kWholeDevice);
        }
        if (queue.running_jobs_max.has_value()) {
          ASSERT_LE(used.jobs, *queue.running_jobs_max);
        }
        if (queue.tenant_limit[v1::DEVICE_KIND_CPU].has_value()) {
          for (const auto& [tenant, thousandths] : used.tenants) {
            ASSERT_LE(thousandths[v1::DEVICE_KIND_CPU],
                      *queue.tenant_limit[v1::DEVICE_KIND_CPU] * kWholeDevice);
          }
        }
      }
      if (rng.Below(2) == 0) Step();
    }
  }
}

}  // namespace
}  // namespace muster::coordinator
