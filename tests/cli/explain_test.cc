#include "cli/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/time/clock.h"
#include "muster/v1/job_service.pb.h"

namespace muster::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::WaitReason Reason(v1::WaitCode code) {
  v1::WaitReason reason;
  reason.set_code(code);
  reason.set_queue("default");
  reason.set_ranks(4);
  reason.set_device(v1::DEVICE_KIND_CPU);
  reason.set_group(1);
  reason.set_slots_free(2);
  reason.set_slots_total(8);
  return reason;
}

TEST(WaitText, SlotsTaken_NamesTheJobsAndWorkersToWaitFor) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_SLOTS_TAKEN);
  v1::JobSlots& job = *reason.mutable_change()->add_jobs_end();
  job.set_job_name("gpt");
  job.set_slots(1);
  EXPECT_EQ(WaitText(reason),
            "needs 4 cpu slots, 2 are free of 8; starts when job gpt (1 slot) ends");
  *reason.mutable_change()->add_jobs_end() = job;
  v1::AwayWorker& away = *reason.mutable_change()->add_workers_return();
  away.set_worker("w1");
  away.set_slots(2);
  away.set_reason(v1::AWAY_REASON_ENDS_ATTEMPT);
  away.set_ends_attempt("job llama-abcde epoch 3");
  reason.mutable_change()->set_workers_return_unnamed(5);
  EXPECT_EQ(ChangeText(reason),
            "starts when job gpt (1 slot) and job gpt (1 slot) end and when workers that are away "
            "return: w1 (2 slots) still ends job llama-abcde epoch 3, and 5 more");
  reason.clear_change();
  reason.mutable_change()->set_slots_released(true);
  EXPECT_EQ(ChangeText(reason), "starts when the slots of ended attempts are released");
  reason.mutable_blocker()->set_job_name("bert");
  reason.mutable_blocker()->set_ranks(8);
  reason.mutable_blocker()->set_device(v1::DEVICE_KIND_CPU);
  EXPECT_EQ(
      ChangeText(reason),
      "starts when the slots of ended attempts are released, after job bert, which goes first "
      "and needs 8 cpu slots");
  reason.clear_change();
  EXPECT_EQ(ChangeText(reason), "starts after job bert, which goes first and needs 8 cpu slots");
}

TEST(WaitText, JobWithAShare_NamesTheDaemonsToUpgrade) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_SLOTS_TAKEN);
  reason.set_ranks(1);
  reason.set_share(0.5);
  v1::AwayWorker& older = *reason.mutable_change()->add_workers_return();
  older.set_worker("w1");
  older.set_slots(2);
  EXPECT_EQ(ChangeText(reason),
            "starts when the daemons that cannot share devices are upgraded: w1 (2 slots)");
  reason.set_code(v1::WAIT_CODE_CLUSTER_TOO_SMALL);
  reason.set_slots_total(0);
  reason.mutable_change()->set_workers_return_unnamed(3);
  EXPECT_EQ(WaitText(reason),
            "no worker set could ever hold 0.5 of a cpu slot: the cluster has 0 that can be "
            "shared; upgrade the daemons that cannot share devices: w1 (2 slots), and 3 more; or "
            "remove resources.share");
}

TEST(Explain, JobThatCannotStartAsThingsAre_HasNoEstimateThatMayCome) {
  const auto estimate = [](v1::WaitCode code) {
    v1::ExplainResponse outlook;
    *outlook.mutable_waiting() = Reason(code);
    std::ostringstream out, err;
    Terminal terminal{out, err};
    WriteOutlook(outlook, absl::Now(), terminal);
    const std::string text = out.str();
    const size_t at = text.find("estimate:");
    return std::string(absl::StripAsciiWhitespace(text.substr(at + 9)));
  };
  EXPECT_EQ(estimate(v1::WAIT_CODE_SLOTS_TAKEN), "not known");
  EXPECT_EQ(estimate(v1::WAIT_CODE_CLUSTER_TOO_SMALL), "never, as the cluster is");
  EXPECT_EQ(estimate(v1::WAIT_CODE_DOMAINS_TOO_SMALL), "never, as the cluster is");
  EXPECT_EQ(estimate(v1::WAIT_CODE_QUOTA_TOO_SMALL), "never, as the queues are");
  EXPECT_EQ(estimate(v1::WAIT_CODE_HELD), "not before it is released");
}

TEST(WaitText, SharedDevices_AreNamedByTheirShares) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_SLOTS_TAKEN);
  reason.set_slots_shared(3);
  EXPECT_EQ(WhyText(reason), "needs 4 cpu slots, 2 are free of 8; jobs share 3 of the others");
  reason.set_share(0.5);
  EXPECT_EQ(
      WhyText(reason),
      "needs 0.5 of each of 4 cpu slots, 2 are free of 8; jobs share 3 of the others and leave "
      "too little of them");
  reason = Reason(v1::WAIT_CODE_QUEUE_QUOTA);
  reason.set_ranks(1);
  reason.set_share(0.25);
  reason.set_limiting_queue("research");
  reason.set_limit(2);
  reason.set_used(2);
  reason.set_used_devices(1.8);
  EXPECT_EQ(WhyText(reason),
            "needs 0.25 of a cpu slot, and queue research uses 1.8 of the 2 that it may");
}

TEST(WaitText, QueueThatMayRunNoJob_SaysWhichFieldToRaise) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_QUEUE_JOBS);
  reason.set_limiting_queue("research");
  reason.set_limit(2);
  reason.set_used(2);
  EXPECT_EQ(WaitText(reason),
            "2 jobs of queue research run, as many as may; starts when jobs there end");
  reason.set_limit(0);
  reason.set_used(0);
  EXPECT_EQ(WaitText(reason),
            "no job of queue research may run; raise the queue's running_jobs_max");
}

TEST(WaitText, ClusterTooSmall_SaysWhatToAddOrLower) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_CLUSTER_TOO_SMALL);
  reason.mutable_change()->set_slots_added(60);
  reason.mutable_change()->set_ranks_at_most(4);
  EXPECT_EQ(WaitText(reason),
            "no worker set could ever hold 4 cpu slots: the cluster has 8; add 60 slots or lower "
            "resources.ranks to 4");
  reason.set_device(v1::DEVICE_KIND_CUDA);
  reason.mutable_change()->clear_ranks_at_most();
  EXPECT_THAT(ChangeText(reason), HasSubstr("add 60 slots of kind cuda"));
  EXPECT_THAT(ChangeText(reason), HasSubstr("`muster get workers`"));
}

TEST(WaitText, OutsideItsDomains_SaysWhichHoldsMostAndWhatWouldHelp) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_DOMAINS_FULL);
  reason.set_level(v1::TOPOLOGY_LEVEL_RACK);
  reason.set_segment(4);
  reason.set_slots_free(6);
  reason.set_domain("r7");
  reason.set_domain_slots(3);
  reason.set_slots_reserved(2);
  v1::JobSlots& job = *reason.mutable_change()->add_jobs_end();
  job.set_job_name("gpt");
  job.set_slots(1);
  reason.mutable_change()->set_level_at_least(v1::TOPOLOGY_LEVEL_BLOCK);
  EXPECT_EQ(
      WaitText(reason),
      "needs 4 cpu slots inside one rack; 6 are free in all, but rack r7 holds most, 3; 2 more "
      "are reserved for other jobs; starts when job gpt (1 slot) ends, or with "
      "placement.required: block");
  reason.set_code(v1::WAIT_CODE_DOMAINS_TOO_SMALL);
  reason.set_segment(2);
  reason.clear_domain();
  reason.clear_change();
  EXPECT_EQ(WaitText(reason),
            "needs 2 runs of 2 cpu slots, each inside one rack, which the cluster never has: no "
            "worker says in which rack it is; add workers to one of these domains");
}

TEST(CostText, SaysWhereAllRanksAreAndWhatTheAxesCost) {
  v1::PlacementCost cost;
  cost.set_level(v1::TOPOLOGY_LEVEL_RACK);
  cost.set_domain("r7");
  cost.set_total(1800);
  v1::AxisCost& axis = *cost.add_axes();
  axis.set_axis(v1::MESH_AXIS_DATA);
  axis.set_degree(4);
  axis.set_bytes(400);
  axis.set_distance(4.5);
  axis.set_farthest(v1::TOPOLOGY_LEVEL_RACK);
  axis.set_cost(1800);
  EXPECT_THAT(CostText(cost), HasSubstr("all ranks in rack r7; cost 1.8k (weights of axes"));
  EXPECT_EQ(CostRows(cost)[1],
            (std::vector<std::string>{"data", "4", "400", "4.50", "across a rack", "1.8k"}));
}

TEST(WaitText, TensorGroups_AreCounted) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_SLOTS_SCATTERED);
  reason.set_group(2);
  for (const char* name : {"w0", "w1"}) {
    reason.add_free()->set_worker(name);
    reason.mutable_free()->rbegin()->set_slots(1);
  }
  EXPECT_EQ(WhyText(reason),
            "needs 2 tensor groups of 2 cpu slots, each on one worker; free are w0 1, w1 1");
  reason.set_code(v1::WAIT_CODE_GROUPS_TOO_LARGE);
  reason.set_groups_total(1);
  reason.mutable_change()->set_worker_with_slots(2);
  EXPECT_EQ(WaitText(reason),
            "no worker set could ever hold 2 tensor groups of 2 cpu slots, each on one worker: the "
            "cluster can hold 1; add workers with 2 slots or lower engine.parallel.tensor");
}

TEST(WaitText, JobsInFront_AreNamedOrCounted) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_BEHIND);
  reason.mutable_blocker()->set_job_name("big");
  reason.mutable_blocker()->set_priority(50);
  reason.mutable_blocker()->set_ranks(64);
  reason.mutable_blocker()->set_device(v1::DEVICE_KIND_CPU);
  reason.mutable_change()->set_priority_above(50);
  EXPECT_EQ(
      WaitText(reason),
      "waits behind job big (priority 50, needs 64 cpu slots) in queue default; starts before "
      "it with a priority above 50");
  reason = Reason(v1::WAIT_CODE_BEHIND_MANY);
  reason.set_behind_more_than(32);
  EXPECT_THAT(WaitText(reason), HasSubstr("more than 32 jobs go before it in queue default"));
}

TEST(WaitText, OfEveryCode_SaysSomething) {
  for (int code = 1; code < v1::WaitCode_ARRAYSIZE; ++code) {
    if (!v1::WaitCode_IsValid(code)) continue;
    EXPECT_EQ(WhyText(Reason(static_cast<v1::WaitCode>(code))).find("does not know"),
              std::string::npos)
        << v1::WaitCode_Name(static_cast<v1::WaitCode>(code));
  }
  EXPECT_THAT(WhyText(Reason(static_cast<v1::WaitCode>(99))),
              HasSubstr("is it older than the coordinator?"));
}

TEST(Outlook, OfASpecThatStarts_ListsWorkersByTheirLowestRank) {
  v1::ExplainResponse outlook;
  const char* const workers[] = {"b", "a", "b"};
  for (int rank = 0; rank < 3; ++rank) {
    v1::Placement& placement = *outlook.add_placements();
    placement.set_rank(rank);
    placement.set_worker(workers[rank]);
    placement.set_device(rank == 2 ? "cpu:1" : "cpu:0");
  }
  std::ostringstream out, err;
  Terminal terminal{.out = out, .err = err};
  WriteOutlook(outlook, absl::UnixEpoch(), terminal);
  EXPECT_EQ(out.str(),
            "Submitted now, it would start at once.\n"
            "WORKER  RANKS  DEVICES\n"
            "b       0, 2   cpu:0 cpu:1\n"
            "a       1      cpu:0\n");
  outlook.Clear();
  *outlook.mutable_waiting() = Reason(v1::WAIT_CODE_SLOTS_TAKEN);
  outlook.mutable_waiting()->mutable_estimated_start()->set_seconds(90);
  out.str("");
  WriteOutlook(outlook, absl::UnixEpoch(), terminal);
  EXPECT_THAT(out.str(), HasSubstr("Submitted now, it would wait.\n"));
  EXPECT_THAT(out.str(), HasSubstr(", in 1m30s\n"));
}

TEST(DeadlineText, SaysByHowMuchItIsMetOrMissed) {
  v1::DeadlineOutlook outlook;
  outlook.mutable_deadline()->set_seconds(7200);
  const auto text = [&] { return DeadlineText(outlook, absl::UnixEpoch()); };
  EXPECT_THAT(text(), HasSubstr(", in 2h0m; how long it runs is not known yet"));
  outlook.mutable_expected_end()->set_seconds(9000);
  EXPECT_THAT(text(), HasSubstr("; at risk: started now, it would end 30m0s after it"));
  outlook.set_start_known(true);
  EXPECT_THAT(text(), HasSubstr("; at risk: it is expected to end 30m0s after it"));
  outlook.set_by_time_limit(true);
  outlook.mutable_expected_end()->set_seconds(3600);
  EXPECT_THAT(text(), HasSubstr("; if it runs for its whole time_limit, it ends 1h0m before it"));
}

TEST(WhyText, ASpareIsNoSlotOfANewJob) {
  v1::WaitReason reason;
  reason.set_code(v1::WAIT_CODE_SPARES);
  reason.set_ranks(8);
  reason.set_group(1);
  reason.set_device(v1::DEVICE_KIND_CUDA);
  reason.set_slots_free(4);
  reason.set_slots_total(64);
  reason.set_slots_spare(16);
  EXPECT_EQ(
      WhyText(reason),
      "needs 8 cuda slots, 4 are free of 64; 16 more are kept free for jobs that recover from "
      "a fault");
  reason.set_code(v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(WhyText(reason), "needs 8 cuda slots, 4 are free of 64; 16 more are spares");
}

TEST(WhyText, OfAJobThatSparesNeverLeaveRoomFor_SaysSoAndWhatWould) {
  v1::WaitReason reason;
  reason.set_code(v1::WAIT_CODE_SPARES);
  reason.set_ranks(8);
  reason.set_group(1);
  reason.set_device(v1::DEVICE_KIND_CUDA);
  reason.set_slots_total(8);
  reason.set_slots_spare(2);
  reason.set_lasting(true);
  reason.mutable_change()->set_spares_lowered_by(2);
  reason.mutable_change()->set_slots_added(2);
  reason.mutable_change()->set_ranks_at_most(6);
  EXPECT_EQ(WaitText(reason),
            "needs 8 cuda slots, of 8 that there are; 2 of these are kept free for jobs that "
            "recover from a fault, which leaves too few even once nothing runs; lower the spares "
            "of the queue policy by 2, or add 2 slots, or lower resources.ranks to 6");
  v1::ExplainResponse outlook;
  *outlook.mutable_waiting() = reason;
  std::ostringstream out, err;
  Terminal terminal{.out = out, .err = err};
  WriteOutlook(outlook, absl::UnixEpoch(), terminal);
  EXPECT_THAT(out.str(), HasSubstr("never, as the spares are"));
}

TEST(WaitText, SaysWhichWorkersAreSetAsideAndFromWhen) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_SLOTS_TAKEN);
  reason.set_device(v1::DEVICE_KIND_CUDA);
  EXPECT_THAT(WaitText(reason), Not(HasSubstr("set aside")));
  v1::SetAside& set_aside = *reason.mutable_set_aside();
  for (const char* worker : {"w3", "w7"}) {
    set_aside.add_workers()->set_worker(worker);
    set_aside.mutable_workers()->rbegin()->set_slots(4);
  }
  set_aside.set_slots(8);
  set_aside.mutable_starts_at()->set_seconds(1);
  EXPECT_THAT(WaitText(reason), HasSubstr(" on w3, w7 (8 cuda slots set aside)"));
  for (int i = 0; i < 10; ++i) set_aside.add_workers()->set_worker("more");
  EXPECT_THAT(WaitText(reason), HasSubstr(", more, and 4 more (8 cuda"));
}

TEST(ChangeText, WhereDomainsAreFull_NamesTheJobsThatOpenOneAndTheJobInFront) {
  v1::WaitReason reason = Reason(v1::WAIT_CODE_DOMAINS_FULL);
  reason.clear_change();
  v1::JobSlots& ends = *reason.mutable_change()->add_jobs_end();
  ends.set_job_name("small");
  ends.set_slots(4);
  reason.mutable_blocker()->set_job_name("big");
  reason.mutable_blocker()->set_ranks(16);
  reason.mutable_blocker()->set_device(v1::DEVICE_KIND_CPU);
  EXPECT_THAT(ChangeText(reason),
              HasSubstr("starts when job small (4 slots) ends, after job big, which goes first and "
                        "needs 16 cpu slots"));
}

}  // namespace
}  // namespace muster::cli
