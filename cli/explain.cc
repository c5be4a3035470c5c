#include "cli/explain.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "parallel/mesh/mesh.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

using Rows = std::vector<std::vector<std::string>>;

std::string Count(int64_t n, absl::string_view noun) {
  return absl::StrCat(n, " ", noun, n == 1 ? "" : "s");
}

std::string Slots(int64_t n, v1::DeviceKind kind) {
  return Count(n, spec::EnumName(kind) + " slot");
}

// What the ranks of the job need: "4 cpu slots", "0.5 of each of 2 cuda slots".
std::string Wanted(int64_t n, const v1::WaitReason& reason) {
  if (reason.share() == 0) return Slots(n, reason.device());
  return n == 1 ? absl::StrCat(reason.share(), " of a ", spec::EnumName(reason.device()), " slot")
                : absl::StrCat(reason.share(), " of each of ", Slots(n, reason.device()));
}

// "2 tensor groups of 4 cpu slots, each on one worker".
std::string Groups(const v1::WaitReason& reason) {
  return absl::StrCat(Count(reason.ranks() / std::max(1, reason.group()), "tensor group"), " of ",
                      Wanted(reason.group(), reason), ", each on one worker");
}

std::string ReservedText(const v1::WaitReason& reason) {
  std::string text;
  if (reason.slots_reserved() > 0) {
    absl::StrAppend(&text, "; ", reason.slots_reserved(), " more are reserved for other jobs");
  }
  if (reason.slots_spare() > 0 && reason.code() != v1::WAIT_CODE_SPARES) {
    absl::StrAppend(&text, "; ", reason.slots_spare(), " more are spares");
  }
  return text;
}

std::string SharedText(const v1::WaitReason& reason) {
  if (reason.slots_shared() == 0) return "";
  return absl::StrCat("; jobs share ", reason.slots_shared(), " of the others",
                      reason.share() == 0 ? "" : " and leave too little of them");
}

// "1.5": devices, shared ones by their shares.
double UsedDevices(const v1::WaitReason& reason) {
  return reason.used_devices() > 0 ? reason.used_devices() : static_cast<double>(reason.used());
}

std::string AwayText(const v1::StartChange& change) {
  std::vector<std::string> named;
  for (const v1::AwayWorker& worker : change.workers_return()) {
    std::string why = "is away";
    if (worker.reason() == v1::AWAY_REASON_NOT_CONNECTED) why = "is not connected";
    if (worker.reason() == v1::AWAY_REASON_NOT_HEARD) why = "is not heard";
    if (worker.reason() == v1::AWAY_REASON_ENDS_ATTEMPT)
      why = "still ends " + worker.ends_attempt();
    if (worker.reason() == v1::AWAY_REASON_CORDONED) why = "is cordoned";
    if (worker.reason() == v1::AWAY_REASON_DRAINED) why = "is drained";
    named.push_back(absl::StrCat(worker.worker(), " (", Count(worker.slots(), "slot"), ") ", why));
  }
  if (change.workers_return_unnamed() > 0) {
    named.push_back(absl::StrCat("and ", change.workers_return_unnamed(), " more"));
  }
  return absl::StrJoin(named, ", ");
}

// Workers are connected, and could take ranks of the job if their daemons knew shared devices.
bool NeedsUpgrades(const v1::StartChange& change) {
  return change.workers_return_size() > 0 &&
         change.workers_return(0).reason() == v1::AWAY_REASON_UNSPECIFIED;
}
// "w1 (2 slots), w2 (1 slot)".
std::string UpgradesText(const v1::StartChange& change) {
  std::vector<std::string> named;
  for (const v1::AwayWorker& worker : change.workers_return()) {
    named.push_back(absl::StrCat(worker.worker(), " (", Count(worker.slots(), "slot"), ")"));
  }
  if (change.workers_return_unnamed() > 0) {
    named.push_back(absl::StrCat("and ", change.workers_return_unnamed(), " more"));
  }
  return absl::StrJoin(named, ", ");
}

// "2026-11-24 10:05:03, in 12m0s".
std::string WhenText(const google::protobuf::Timestamp& time, absl::Time now) {
  const absl::Duration in = std::max(absl::ZeroDuration(), FromProto(time) - now);
  return absl::StrCat(LocalTime(time), ", in ", ShortDuration(in));
}

std::string LevelText(v1::TopologyLevel level) {
  return absl::StrReplaceAll(spec::EnumName(level), {{"_", " "}});
}

// "12 ranks inside one rack"; "segments of 8 ranks, each inside one rack".
std::string InsideText(const v1::WaitReason& reason) {
  const std::string level = LevelText(reason.level());
  return reason.segment() == reason.ranks()
             ? absl::StrCat(Wanted(reason.ranks(), reason), " inside one ", level)
             : absl::StrCat(Count(reason.ranks() / std::max(1, reason.segment()), "run"), " of ",
                            Wanted(reason.segment(), reason), ", each inside one ", level);
}

std::string LargestText(const v1::WaitReason& reason) {
  if (reason.domain().empty()) {
    return reason.level() == v1::TOPOLOGY_LEVEL_HOST
               ? absl::StrCat("the largest worker holds ", reason.domain_slots())
               : absl::StrCat("no worker says in which ", LevelText(reason.level()), " it is");
  }
  return absl::StrCat(LevelText(reason.level()), " ", reason.domain(), " holds most, ",
                      reason.domain_slots());
}

std::string JobsEndText(const v1::StartChange& change) {
  std::vector<std::string> jobs;
  for (const v1::JobSlots& job : change.jobs_end()) {
    jobs.push_back(absl::StrCat("job ", job.job_name(), " (", Count(job.slots(), "slot"), ")"));
  }
  return absl::StrCat(absl::StrJoin(jobs, " and "), jobs.size() == 1 ? " ends" : " end");
}

// Of a job that gets the slots first which the change leaves: ", after job big, which ...".
std::string FirstText(const v1::WaitReason& reason) {
  return absl::StrCat(", after job ", reason.blocker().job_name(), ", which goes first and needs ",
                      Slots(reason.blocker().ranks(), reason.blocker().device()));
}

// What lets a job start which those that are not spares can never hold.
std::string BesideSparesText(const v1::StartChange& change) {
  std::vector<std::string> ways;
  if (change.spares_lowered_by() > 0) {
    ways.push_back(
        absl::StrCat("lower the spares of the queue policy by ", change.spares_lowered_by()));
  }
  ways.push_back(absl::StrCat("add ", Count(change.slots_added(), "slot")));
  if (change.ranks_at_most() > 0) {
    ways.push_back(absl::StrCat("lower resources.ranks to ", change.ranks_at_most()));
  }
  return absl::StrJoin(ways, ", or ");
}

// When it starts, if that is known or cannot be.
std::string EstimateText(const v1::WaitReason& reason, absl::Time now) {
  if (reason.has_estimated_start()) return WhenText(reason.estimated_start(), now);
  switch (reason.code()) {
    case v1::WAIT_CODE_NO_WORKERS:
    case v1::WAIT_CODE_CLUSTER_TOO_SMALL:
    case v1::WAIT_CODE_GROUPS_TOO_LARGE:
    case v1::WAIT_CODE_DOMAINS_TOO_SMALL:
      return "never, as the cluster is";
    case v1::WAIT_CODE_NO_QUEUE:
    case v1::WAIT_CODE_QUOTA_TOO_SMALL:
      return "never, as the queues are";
    case v1::WAIT_CODE_QUEUE_JOBS:
      return reason.limit() == 0 ? "never, as the queues are" : "not known";
    case v1::WAIT_CODE_SPARES:
      return reason.lasting() ? "never, as the spares are" : "not known";
    case v1::WAIT_CODE_HELD:
      return "not before it is released";
    default:
      return "not known";
  }
}

// Why a job waits, as rows of name and value.
Rows ReasonRows(const v1::WaitReason& reason, absl::Time now) {
  Rows rows = {{"waits:", WhyText(reason)}};
  const std::string change = ChangeText(reason);
  if (!change.empty()) rows.push_back({"change:", change});
  if (!reason.queue().empty()) {
    rows.push_back(
        {"queue:", absl::StrCat(reason.queue(), ", behind ", Count(reason.ahead(), "other job"))});
  }
  if (reason.has_set_aside()) {
    rows.push_back({"set aside:", SetAsideText(reason.set_aside(), reason.device())});
  }
  rows.push_back({"estimate:", EstimateText(reason, now)});
  return rows;
}

// One row per worker, in order of its lowest rank.
Rows WorkerRows(const v1::ExplainResponse& outlook) {
  std::map<std::string, std::pair<std::vector<int>, std::vector<std::string>>> by_worker;
  std::vector<std::string> order;
  for (const v1::Placement& placement : outlook.placements()) {
    auto& [ranks, devices] = by_worker[placement.worker()];
    if (ranks.empty()) order.push_back(placement.worker());
    ranks.push_back(placement.rank());
    devices.push_back(placement.device());
  }
  Rows rows = {{"WORKER", "RANKS", "DEVICES"}};
  for (const std::string& worker : order) {
    const auto& [ranks, devices] = by_worker[worker];
    rows.push_back({worker, parallel::RanksText(ranks), absl::StrJoin(devices, " ")});
  }
  return rows;
}

// "w1, w2": workers of the current or last attempt, by rank.
std::string WorkersText(const v1::Job& job) {
  std::vector<std::string> workers;
  for (const v1::RankStatus& rank : job.ranks()) {
    if (std::count(workers.begin(), workers.end(), rank.worker()) == 0) {
      workers.push_back(rank.worker());
    }
  }
  return absl::StrJoin(workers, ", ");
}

// Of a job that does not wait and has not ended.
std::string StateText(const v1::Job& job) {
  return absl::StrCat("it waits for nothing: attempt ", job.attempts(), ", step ", StepText(job),
                      ", ranks on ", WorkersText(job));
}

// Of a job that has ended: when and how, and where its last attempt ran.
Rows EndRows(const v1::Job& job) {
  Rows rows;
  if (job.has_ended()) rows.push_back({"ended:", LocalTime(job.ended())});
  if (!job.message().empty()) rows.push_back({"why:", job.message()});
  if (job.attempts() == 0) {
    rows.push_back({"last ran:", "never: it ended before its first attempt"});
    return rows;
  }
  std::string last = absl::StrCat("attempt ", job.attempts());
  if (const std::string step = StepText(job); step != "-") {  // a command may tell none
    absl::StrAppend(&last, ", to step ", step);
  }
  if (job.ranks_size() > 0) absl::StrAppend(&last, ", ranks on ", WorkersText(job));
  rows.push_back({"last ran:", std::move(last)});
  return rows;
}

}  // namespace

std::string DeadlineText(const v1::DeadlineOutlook& outlook, absl::Time now) {
  const absl::Time deadline = FromProto(outlook.deadline());
  std::string text = LocalTime(outlook.deadline());
  if (deadline > now) absl::StrAppend(&text, ", in ", ShortDuration(deadline - now));
  if (!outlook.has_expected_end()) {
    return text + "; how long it runs is not known yet, so that it may miss it";
  }
  const absl::Duration late = FromProto(outlook.expected_end()) - deadline;
  std::string sentence = "it is expected to end ";
  if (outlook.by_time_limit()) sentence = "if it runs for its whole time_limit, it ends ";
  if (!outlook.start_known()) {
    sentence = outlook.by_time_limit()
                   ? "started now and run for its whole time_limit, it would end "
                   : "started now, it would end ";
  }
  return absl::StrCat(text, late > absl::ZeroDuration() ? "; at risk: " : "; ", sentence,
                      ShortDuration(absl::AbsDuration(late)),
                      late > absl::ZeroDuration() ? " after it" : " before it");
}

std::string CostText(const v1::PlacementCost& cost) {
  const std::string where = cost.level() == v1::TOPOLOGY_LEVEL_HOST
                                ? absl::StrCat("worker ", cost.domain())
                            : cost.level() == v1::TOPOLOGY_LEVEL_CLUSTER
                                ? std::string("no domain narrower than the cluster")
                                : absl::StrCat(LevelText(cost.level()), " ", cost.domain());
  return absl::StrCat("all ranks in ", where, "; cost ", ShortNumber(cost.total()),
                      cost.traffic_known() ? " (bytes a rank sends in a step x distance)"
                                           : " (weights of axes x distance: traffic not known)");
}

Rows CostRows(const v1::PlacementCost& cost) {
  Rows rows = {
      {"AXIS", "RANKS", cost.traffic_known() ? "BYTES" : "WEIGHT", "DISTANCE", "FARTHEST", "COST"}};
  for (const v1::AxisCost& axis : cost.axes()) {
    rows.push_back({spec::EnumName(axis.axis()), absl::StrCat(axis.degree()),
                    ShortNumber(axis.bytes()), absl::StrFormat("%.2f", axis.distance()),
                    axis.farthest() == v1::TOPOLOGY_LEVEL_HOST
                        ? "one worker"
                        : absl::StrCat("across a ", LevelText(axis.farthest())),
                    ShortNumber(axis.cost())});
  }
  return rows;
}

std::string WhyText(const v1::WaitReason& reason) {
  const std::string wanted = Wanted(reason.ranks(), reason);
  switch (reason.code()) {
    case v1::WAIT_CODE_NO_WORKERS:
      return absl::StrCat("needs ", wanted, ", but no worker has joined; start muster-worker");
    case v1::WAIT_CODE_CLUSTER_TOO_SMALL:
      return absl::StrCat("no worker set could ever hold ", wanted, ": the cluster has ",
                          reason.slots_total(),
                          NeedsUpgrades(reason.change()) ? " that can be shared" : "");
    case v1::WAIT_CODE_GROUPS_TOO_LARGE:
      return absl::StrCat("no worker set could ever hold ", Groups(reason),
                          ": the cluster can hold ", reason.groups_total());
    case v1::WAIT_CODE_SLOTS_TAKEN:
      return absl::StrCat("needs ", reason.group() > 1 ? Groups(reason) : wanted, ", ",
                          reason.slots_free(), reason.slots_free() == 1 ? " is" : " are",
                          " free of ", reason.slots_total(), SharedText(reason),
                          ReservedText(reason));
    case v1::WAIT_CODE_SPARES:
      if (reason.lasting()) {
        return absl::StrCat("needs ", reason.group() > 1 ? Groups(reason) : wanted, ", of ",
                            reason.slots_total(), " that there are; ", reason.slots_spare(),
                            " of these are kept free for jobs that recover from a fault, which "
                            "leaves too few even once nothing runs");
      }
      return absl::StrCat("needs ", reason.group() > 1 ? Groups(reason) : wanted, ", ",
                          reason.slots_free(), reason.slots_free() == 1 ? " is" : " are",
                          " free of ", reason.slots_total(), "; ", reason.slots_spare(),
                          " more are kept free for jobs that recover from a fault",
                          SharedText(reason), ReservedText(reason));
    case v1::WAIT_CODE_SLOTS_SCATTERED: {
      std::vector<std::string> free;
      for (const v1::WorkerSlots& worker : reason.free()) {
        free.push_back(absl::StrCat(worker.worker(), " ", worker.slots()));
      }
      return absl::StrCat("needs ", Groups(reason), "; free are ", absl::StrJoin(free, ", "));
    }
    case v1::WAIT_CODE_BEHIND:
      return absl::StrCat("waits behind job ", reason.blocker().job_name(), " (priority ",
                          reason.blocker().priority(), ", needs ",
                          Slots(reason.blocker().ranks(), reason.blocker().device()), ") in queue ",
                          reason.queue());
    case v1::WAIT_CODE_BEHIND_MANY:
      return absl::StrCat("more than ", reason.behind_more_than(), " jobs go before it in queue ",
                          reason.queue());
    case v1::WAIT_CODE_BACK_OFF:
      return absl::StrCat(
          "backs off after a failure; tries again at ",
          absl::FormatTime("%H:%M:%E1S UTC", FromProto(reason.until()), absl::UTCTimeZone()));
    case v1::WAIT_CODE_RELEASING:
      return "its last attempt is being ended; it waits for the proof that its devices are free";
    case v1::WAIT_CODE_HELD:
      return absl::StrCat("held by ", reason.held_by(), " since ", LocalTime(reason.held_since()));
    case v1::WAIT_CODE_SLOTS_KEPT: {
      std::vector<std::string> jobs;
      for (const v1::JobSlots& job : reason.stopping()) {
        jobs.push_back(absl::StrCat("job ", job.job_name(), " (", Count(job.slots(), "slot"), ")"));
      }
      if (jobs.empty()) return absl::StrCat(wanted, " are kept for it; it starts with them");
      return absl::StrCat(wanted, " are kept for it; it starts when ", absl::StrJoin(jobs, " and "),
                          jobs.size() == 1 ? " has" : " have", " stopped");
    }
    case v1::WAIT_CODE_DOMAINS_FULL:
      return absl::StrCat("needs ", InsideText(reason), "; ", reason.slots_free(),
                          " are free in all, but ", LargestText(reason), ReservedText(reason));
    case v1::WAIT_CODE_DOMAINS_TOO_SMALL:
      return absl::StrCat("needs ", InsideText(reason),
                          ", which the cluster never has: ", LargestText(reason));
    case v1::WAIT_CODE_AFTER: {
      std::vector<std::string> jobs;
      for (const v1::Dependency& job : reason.after()) {
        jobs.push_back(absl::StrCat(job.array() ? "array " : "job ", job.job_name(), " (",
                                    job.job_id(), ") has ", spec::EnumName(job.condition())));
      }
      return absl::StrCat("starts after ", absl::StrJoin(jobs, " and "));
    }
    case v1::WAIT_CODE_ARRAY:
      return absl::StrCat("at most ", Count(reason.limit(), "task"),
                          " of its array may run at a time (max_running); others go first");
    case v1::WAIT_CODE_QUEUE_QUOTA:
      return absl::StrCat("needs ", wanted, ", and queue ", reason.limiting_queue(), " uses ",
                          UsedDevices(reason), " of the ", reason.limit(), " that it may");
    case v1::WAIT_CODE_QUEUE_JOBS:
      if (reason.limit() == 0) {
        return absl::StrCat("no job of queue ", reason.limiting_queue(), " may run");
      }
      return absl::StrCat(Count(reason.used(), "job"), " of queue ", reason.limiting_queue(),
                          reason.used() == 1 ? " runs" : " run", ", as many as may");
    case v1::WAIT_CODE_TENANT_LIMIT:
      return absl::StrCat("needs ", wanted, ", and ",
                          reason.tenant().empty() ? "jobs without the label tenant"
                                                  : absl::StrCat("tenant ", reason.tenant()),
                          " use ", UsedDevices(reason), " of the ", reason.limit(),
                          " that one tenant may in queue ", reason.limiting_queue());
    case v1::WAIT_CODE_RESERVED:
      return absl::StrCat(
          "enough slots are free, but job ", reason.blocker().job_name(), " has waited longer and ",
          reason.has_reserved_start()
              ? absl::StrCat("gets them at ", LocalTime(reason.reserved_start()),
                             "; this job is not known to end before")
              : std::string("nobody knows when it can start; no job takes devices before it"));
    case v1::WAIT_CODE_NO_QUEUE:
      return absl::StrCat("queue ", reason.queue(),
                          " is gone, or has queues below it: `muster queue` lists the queues");
    case v1::WAIT_CODE_QUOTA_TOO_SMALL:
      return absl::StrCat("needs ", wanted, ", and queue ", reason.limiting_queue(),
                          " may never use more than ", reason.limit());
    default:
      return absl::StrCat("waits for a reason that this program does not know (",
                          static_cast<int>(reason.code()), "); is it older than the coordinator?");
  }
}

std::string ChangeText(const v1::WaitReason& reason) {
  const v1::StartChange& change = reason.change();
  if (NeedsUpgrades(change) && reason.code() != v1::WAIT_CODE_SLOTS_TAKEN) {
    return absl::StrCat("upgrade the daemons that cannot share devices: ", UpgradesText(change),
                        "; or remove resources.share");
  }
  switch (reason.code()) {
    case v1::WAIT_CODE_CLUSTER_TOO_SMALL: {
      std::string text = absl::StrCat("add ", Count(change.slots_added(), "slot"));
      if (change.ranks_at_most() > 0) {
        absl::StrAppend(&text, " or lower resources.ranks to ", change.ranks_at_most());
      } else {
        absl::StrAppend(&text, " of kind ", spec::EnumName(reason.device()),
                        " or change resources.device");
      }
      if (reason.device() == v1::DEVICE_KIND_CUDA) {
        absl::StrAppend(&text,
                        ". `muster get workers` and the logs of daemons say why a GPU is "
                        "not offered");
      }
      return text;
    }
    case v1::WAIT_CODE_SPARES:
      if (reason.lasting()) return BesideSparesText(change);
      return change.jobs_end().empty()
                 ? "lower the spares of the queue policy, or the job's resources.ranks"
                 : absl::StrCat("starts when ", JobsEndText(change));
    case v1::WAIT_CODE_GROUPS_TOO_LARGE:
      return absl::StrCat("add workers with ", Count(change.worker_with_slots(), "slot"),
                          " or lower engine.parallel.tensor");
    case v1::WAIT_CODE_SLOTS_TAKEN: {
      std::string text;
      if (!change.jobs_end().empty()) text = absl::StrCat("starts when ", JobsEndText(change));
      if (NeedsUpgrades(change)) {
        text = "starts when the daemons that cannot share devices are upgraded: " +
               UpgradesText(change);
      } else if (!change.workers_return().empty()) {
        absl::StrAppend(&text, text.empty() ? "starts when " : " and when ",
                        "workers that are away return: ", AwayText(change));
      }
      if (change.slots_released()) text = "starts when the slots of ended attempts are released";
      if (reason.has_blocker()) {
        text = text.empty() ? absl::StrCat("starts", FirstText(reason).substr(1))
                            : text + FirstText(reason);
      }
      return text;
    }
    case v1::WAIT_CODE_DOMAINS_FULL:
    case v1::WAIT_CODE_DOMAINS_TOO_SMALL: {
      std::vector<std::string> ways;
      if (!change.jobs_end().empty()) {
        ways.push_back(absl::StrCat("starts when ", JobsEndText(change),
                                    reason.has_blocker() ? FirstText(reason) : ""));
      }
      if (change.level_at_least() != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
        ways.push_back(
            absl::StrCat("with placement.required: ", spec::EnumName(change.level_at_least())));
      }
      if (change.ranks_at_most() > 0) {
        ways.push_back(absl::StrCat("with at most ", Count(change.ranks_at_most(), "rank")));
      }
      return ways.empty() ? "add workers to one of these domains" : absl::StrJoin(ways, ", or ");
    }
    case v1::WAIT_CODE_SLOTS_SCATTERED:
      return "starts when jobs on one of them end";
    case v1::WAIT_CODE_BEHIND:
      return absl::StrCat("starts before it with a priority above ", change.priority_above());
    case v1::WAIT_CODE_BEHIND_MANY:
      return "a higher priority moves it up";
    case v1::WAIT_CODE_QUEUE_JOBS:
      if (reason.limit() == 0) return "raise the queue's running_jobs_max";
      [[fallthrough]];
    case v1::WAIT_CODE_QUEUE_QUOTA:
    case v1::WAIT_CODE_TENANT_LIMIT:
      return "starts when jobs there end";
    case v1::WAIT_CODE_RESERVED:
      return "a time limit that ends before would let it start";
    case v1::WAIT_CODE_NO_QUEUE:
      return "define the queue again, or submit the job to another one";
    case v1::WAIT_CODE_QUOTA_TOO_SMALL:
      return "raise the queue's guaranteed, borrowing_limit or tenant_limit, or lower "
             "resources.ranks";
    case v1::WAIT_CODE_HELD:
      return "`muster resume` lets it wait in its queue again";
    default:
      return "";
  }
}

std::string SetAsideText(const v1::SetAside& set_aside, v1::DeviceKind device) {
  constexpr int kNamedMax = 8;
  std::vector<std::string> workers;
  for (const v1::WorkerSlots& worker : set_aside.workers()) {
    if (workers.size() == kNamedMax) {
      workers.push_back(absl::StrCat("and ", set_aside.workers_size() - kNamedMax, " more"));
      break;
    }
    workers.push_back(worker.worker());
  }
  return absl::StrCat("starts about ", LocalTime(set_aside.starts_at()), " on ",
                      absl::StrJoin(workers, ", "), " (", Slots(set_aside.slots(), device),
                      " set aside)");
}

std::string WaitText(const v1::WaitReason& reason) {
  std::string text = WhyText(reason);
  if (const std::string change = ChangeText(reason); !change.empty()) {
    absl::StrAppend(&text, "; ", change);
  }
  if (reason.has_set_aside()) {
    absl::StrAppend(&text, "; ", SetAsideText(reason.set_aside(), reason.device()));
  }
  return text;
}

namespace {

void WriteArray(const v1::ArrayOutlook& array, absl::Time now, Terminal& terminal) {
  Rows rows = {{"array:", absl::StrCat(array.array(), " (", array.array_id(), ")")},
               {"tasks:", absl::StrCat(array.tasks(), ": ", array.ended(), " ended, ",
                                       array.running(), " run, ", array.waiting(), " wait")}};
  if (!array.next_task().empty() && !array.has_next()) {
    rows.push_back({"next:", absl::StrCat(array.next_task(), " starts now")});
  } else if (!array.next_task().empty()) {
    rows.push_back({"next:", array.next_task()});
    const Rows reason = ReasonRows(array.next(), now);
    rows.insert(rows.end(), reason.begin(), reason.end());
  }
  terminal.out << Table(rows);
  if (array.reasons().empty()) return;
  rows = {{"TASKS", "FIRST", "REASON"}};
  for (const v1::ArrayWait& wait : array.reasons()) {
    rows.push_back({absl::StrCat(wait.tasks()), wait.first_task(), WaitText(wait.reason())});
  }
  terminal.out << "\n" << Table(rows);
}

}  // namespace

absl::Status Explain(CoordinatorClient& client, const std::string& job, Format format,
                     Terminal& terminal) {
  v1::ExplainRequest request;
  request.set_name(job);
  ASSIGN_OR_RETURN(const v1::ExplainResponse explained, client.Explain(request));
  if (format != Format::kTable) {
    Print(ToJson(explained), format, terminal.out);
    return absl::OkStatus();
  }
  if (explained.has_array()) {
    WriteArray(explained.array(), absl::Now(), terminal);
    return absl::OkStatus();
  }
  Rows rows = {{"job:", absl::StrCat(explained.job().name(), " (", explained.job().id(), ")")},
               {"state:", Coloured(spec::EnumName(explained.job().state()), terminal)}};
  if (explained.has_waiting()) {
    const Rows reason = ReasonRows(explained.waiting(), absl::Now());
    rows.insert(rows.end(), reason.begin(), reason.end());
  } else if (IsFinal(explained.job().state())) {
    const Rows end = EndRows(explained.job());
    rows.insert(rows.end(), end.begin(), end.end());
  } else {
    rows.push_back({"waits:", StateText(explained.job())});
    if (explained.job().has_placement_cost()) {
      rows.push_back({"placement:", CostText(explained.job().placement_cost())});
    }
  }
  if (explained.has_deadline()) {
    rows.push_back({"deadline:", DeadlineText(explained.deadline(), absl::Now())});
  }
  terminal.out << Table(rows);
  return absl::OkStatus();
}

void WriteOutlook(const v1::ExplainResponse& outlook, absl::Time now, Terminal& terminal) {
  if (outlook.has_waiting()) {
    Rows rows = ReasonRows(outlook.waiting(), now);
    if (outlook.has_deadline()) {
      rows.push_back({"deadline:", DeadlineText(outlook.deadline(), now)});
    }
    terminal.out << "Submitted now, it would wait.\n" << Table(rows);
    return;
  }
  terminal.out << "Submitted now, it would start at once.\n" << Table(WorkerRows(outlook));
  if (outlook.job().has_placement_cost()) {
    terminal.out << "\n"
                 << CostText(outlook.job().placement_cost()) << "\n"
                 << Table(CostRows(outlook.job().placement_cost()));
  }
  if (outlook.has_deadline()) {
    terminal.out << "\ndeadline: " << DeadlineText(outlook.deadline(), now) << "\n";
  }
}

}  // namespace muster::cli
