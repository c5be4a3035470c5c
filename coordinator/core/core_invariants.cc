// What holds between turns of all parts together; each part checks its own.
#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core_impl.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"

namespace muster::coordinator {
namespace {

void CheckArrays(const JobTable& jobs, std::vector<std::string>& broken) {
  for (const auto& [id, array] : jobs.arrays().all()) {
    const auto claim = [&, &id = id](bool holds, absl::string_view what) {
      if (!holds) broken.push_back(absl::StrCat("array ", id, ": ", what));
    };
    claim(array.max_running == 0 || array.admitted.size() <= static_cast<size_t>(array.max_running),
          "more tasks than max_running run or wait for devices");
    claim(array.waiting.empty() || array.admitted.size() == static_cast<size_t>(array.max_running),
          "tasks wait for their turn, though fewer than max_running run");
    for (const JobId& task : array.live) {
      const JobEntry* job = jobs.Find(task);
      claim(job != nullptr && job->live(), "a task is live that has ended");
      if (job == nullptr) continue;
      claim(array.admitted.contains(task) == (job->has_attempt() || job->state.has_queued()),
            "a task is admitted if and only if it has entered its queue or runs");
    }
  }
}

}  // namespace

void CoreImpl::CheckJob(const JobEntry& entry, std::vector<std::string>& broken) const {
  const v1::StateRow& job = entry.state;
  const auto claim = [&](bool holds, absl::string_view what) {
    if (!holds) broken.push_back(absl::StrCat("job ", entry.fixed.id(), ": ", what));
  };
  const bool attempt = entry.has_attempt();
  const v1::AttemptState state = job.attempt_state();
  const bool depends = !job.after().empty();
  claim(scheduling_.Waits(entry.id()) ==
            (entry.live() && !attempt && !depends && job.state() != v1::JOB_STATE_HELD &&
             !jobs_.arrays().Waits(entry)),
        "must wait if and only if it is live without an attempt, not held, no dependency is left, "
        "and its array lets it");
  claim(!depends || job.state() == v1::JOB_STATE_QUEUED || job.state() == v1::JOB_STATE_HELD,
        "has dependencies and is neither queued nor held");
  for (const v1::Dependency& dependency : job.after()) {
    if (dependency.array()) {
      const Array* array = jobs_.arrays().FindId(dependency.job_id());
      claim(array != nullptr && !array->live.empty(), "waits for an array that has ended");
      continue;
    }
    const JobEntry* other = jobs_.Find(JobId(dependency.job_id()));
    claim(other != nullptr && other->live(), "waits for the end of a job that has ended");
  }
  claim(job.has_running_since() == (entry.up() && state != v1::ATTEMPT_STATE_ALLOCATED),
        "its running time must count if and only if its ranks may run");
  claim(scheduling_.Runs(entry.id()) == attempt,
        "must be running if and only if it has an attempt");
  switch (job.state()) {
    case v1::JOB_STATE_QUEUED:
      claim(!attempt, "queued with a live attempt");
      break;
    case v1::JOB_STATE_PLACING:
      claim(attempt && state == v1::ATTEMPT_STATE_ALLOCATED, "placing without an allocation");
      break;
    case v1::JOB_STATE_STARTING:
      claim(attempt && state == v1::ATTEMPT_STATE_BOOTSTRAPPING, "starting, not bootstrapping");
      break;
    case v1::JOB_STATE_RUNNING:
      claim(attempt && (state == v1::ATTEMPT_STATE_TRAINING ||
                        (state == v1::ATTEMPT_STATE_STOPPING &&
                         entry.state.stop_cause() == v1::CAUSE_COMPLETED)),
            "running without a training attempt");
      break;
    case v1::JOB_STATE_RECOVERING:
      claim(!attempt || state == v1::ATTEMPT_STATE_STOPPING, "recovering with a live attempt");
      break;
    case v1::JOB_STATE_HELD:
      claim(!attempt && !job.held_by().empty(), "held with a live attempt, or by nobody");
      break;
    case v1::JOB_STATE_RESIZING:
      claim(attempt && state == v1::ATTEMPT_STATE_STOPPING && job.stop_cause() == v1::CAUSE_RESIZED,
            "resizing without an attempt that stops for that");
      break;
    case v1::JOB_STATE_PREEMPTING:
      claim(attempt && state == v1::ATTEMPT_STATE_STOPPING &&
                job.stop_cause() != v1::CAUSE_UNSPECIFIED,
            "preempting without an attempt that stops");
      break;
    case v1::JOB_STATE_STOPPING:
      claim(attempt && state == v1::ATTEMPT_STATE_STOPPING, "stopping without an attempt");
      break;
    case v1::JOB_STATE_SUCCEEDED:
    case v1::JOB_STATE_FAILED:
    case v1::JOB_STATE_CANCELLED:
      claim(!attempt, "ended with a live attempt");
      break;
    default:
      claim(false, absl::StrCat("state ", spec::EnumName(job.state())));
  }
  if (!attempt) return;
  const v1::AttemptRow& live = entry.attempt;
  claim(live.epoch() == job.epoch(), "attempt of another epoch");
  claim(std::binary_search(entry.sizes().begin(), entry.sizes().end(), live.placements_size()),
        "a gang that is not whole, or of a size that it does not have");
  claim(entry.gang.size() == live.placements_size(), "rank map and placements differ");
  for (int rank = 0; rank < live.placements_size(); ++rank) {
    claim(live.placements(rank).rank() == rank, "ranks are not dense");
    const bool gone = IsGone(entry.gang.state(rank));
    const bool held = workers_.Holds(live.placements(rank), entry.id(), Epoch(live.epoch()));
    claim(held == (entry.up() || !gone),
          absl::StrCat(
              "rank ", rank,
              held ? " holds a slot that it released" : " has lost its slot without a release"));
  }
  attempts_.Check(entry, broken);
}

std::vector<std::string> CoreImpl::CheckInvariants(bool index) const {
  std::vector<std::string> broken;
  for (const auto& [id, job] : jobs_.entries()) CheckJob(job, broken);
  accounts_.Check(jobs_, workers_, broken);
  if (index && !scheduling_.SparesAreRight(accounts_.spare())) {
    broken.push_back("the account of spares differs from those that are kept free");
  }
  CheckArrays(jobs_, broken);
  if (!workers_.TallyIsRight()) broken.push_back("the tally of devices differs from the workers");
  kept_.Check(jobs_, broken);
  for (const std::string& what : scheduling_.CheckQueues()) broken.push_back(what);
  if (index && !workers_.SlotsAreRight()) {
    broken.push_back("the index of slots differs from the workers");
  }
  if (index) worker_life_.CheckIndex(broken);
  if (scheduling_.waiting() > jobs_.live_count()) broken.push_back("a job waits that is not live");
  for (const auto& [id, worker] : workers_.entries()) {
    for (const auto& [device, holders] : worker.held) {
      std::set<JobId> jobs;
      for (const SlotHolder& holder : holders) {
        const JobEntry* job = jobs_.Find(holder.job);
        if (job == nullptr || !job->has_attempt() || job->epoch() != holder.epoch) {
          broken.push_back(absl::StrCat("worker ", id.value(), " ", device, " is held by job ",
                                        holder.job.value(), " epoch ", holder.epoch.value(),
                                        ", which is not live"));
        } else if (holder.share != spec::ShareOf(job->spec()) || !jobs.insert(holder.job).second) {
          broken.push_back(absl::StrCat("worker ", id.value(), " ", device, " is held by job ",
                                        holder.job.value(), " with another share, or twice"));
        }
      }
      if (worker.HeldOf(device) > kWholeDevice) {
        broken.push_back(absl::StrCat("worker ", id.value(), " ", device,
                                      ": the shares of those that hold it are more than it"));
      }
    }
  }
  for (const auto& [job_id, epoch] : values_.Epochs()) {
    const JobEntry* job = jobs_.Find(job_id);
    if (job == nullptr || !job->up() || job->epoch() != epoch) {
      broken.push_back(absl::StrCat("job ", job_id.value(), ": bootstrap keys of epoch ",
                                    epoch.value(), " outlived it"));
    }
  }
  return broken;
}

}  // namespace muster::coordinator
