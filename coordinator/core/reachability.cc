#include "coordinator/core/reachability.h"

#include "absl/strings/str_cat.h"
#include "coordinator/core/limits.h"

namespace muster::coordinator {
namespace {

// More than half of the workers that are not lost.
bool MostAreSilent(const WorkerTable& workers) {
  return workers.Count(v1::WORKER_STATE_UNREACHABLE) > workers.Count(v1::WORKER_STATE_READY);
}

}  // namespace

void Reachability::Observe(const WorkerTable& workers, absl::Time now) {
  if (MostAreSilent(workers)) most_silent_at_ = now;
}

Reachability::Verdict Reachability::Judge(const WorkerEntry& worker, const WorkerTable& workers,
                                          const JobTable& jobs, absl::Time now) const {
  using Kind = Verdict::Kind;
  const absl::Duration silent = now - worker.last_heard;
  if (silent >= config_.lost_after) {
    std::string why = WhyKept(worker, workers, jobs, now);
    if (why.empty()) return {Kind::kLost, "", absl::InfiniteFuture()};
    return {Kind::kKept, std::move(why), now + kTurnIntervalMax};
  }
  if (silent < config_.unreachable_after) {
    return {Kind::kReachable, "", worker.last_heard + config_.unreachable_after};
  }
  return {Kind::kUnreachable, "", worker.last_heard + config_.lost_after};
}

std::string Reachability::WhyKept(const WorkerEntry& worker, const WorkerTable& workers,
                                  const JobTable& jobs, absl::Time now) const {
  if (now - worker.last_heard < config_.partition_hold) {
    if (MostAreSilent(workers)) {
      return absl::StrCat(workers.Count(v1::WORKER_STATE_UNREACHABLE),
                          " workers, most of all, are silent at once, as when a network fails");
    }
    // When the network is back, workers return one by one; each has as long as one that falls
    // silent.
    if (worker.last_heard < most_silent_at_ && now - most_silent_at_ < config_.lost_after) {
      return "it fell silent together with most workers, which return now";
    }
    if (std::string why = domains_.WhyKept(worker.id(), now, config_.lost_after); !why.empty()) {
      return why;
    }
  }
  for (const JobId& id : worker.Jobs()) {
    const JobEntry& job = *jobs.Find(id);
    if (job.Leaves(worker.row.name())) continue;
    if (job.up() && job.gang.advanced_at() > worker.last_heard + config_.unreachable_after &&
        now - job.gang.advanced_at() < config_.lost_after) {
      return absl::StrCat("job ", job.name(), " makes progress, which it could not without ",
                          "its ranks there");
    }
  }
  return "";
}

}  // namespace muster::coordinator
