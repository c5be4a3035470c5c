#include "coordinator/core/slot_keeper.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core/device_accounts.h"
#include "coordinator/core/planned_job.h"
#include "proto/spec/share.h"

namespace muster::coordinator {

void SlotKeeper::Keep(JobEntry& job, const std::vector<Slot>& slots) {
  const v1::JobSpec& spec = job.spec();
  Kept kept{spec.queue(), spec.priority(),    spec.resources().device(), TenantOf(spec),
            {},           spec::ShareOf(spec)};
  for (const Slot& slot : slots) {
    workers_.Keep(slot.worker, slot.device, job.id(), kept.share);
    v1::KeptSlot& stored = *job.state.add_kept();
    stored.set_worker(slot.worker.value());
    stored.set_device(slot.device);
    kept.slots.insert(slot);
  }
  scheduling_.Keep(job.id(), std::move(kept));
}

void SlotKeeper::Drop(JobEntry& job, Turn& turn) {
  if (job.state.kept().empty()) return;
  for (const v1::KeptSlot& slot : job.state.kept()) {
    workers_.DropKept(WorkerId(slot.worker()), slot.device(), job.id());
  }
  job.state.clear_kept();
  scheduling_.DropKept(job.id());
  turn.Persist(job.id());
  turn.Reschedule();
}

void SlotKeeper::Recover(const JobEntry& job) {
  if (job.state.kept().empty()) return;
  for (const v1::KeptSlot& slot : job.state.kept()) {
    workers_.Keep(WorkerId(slot.worker()), slot.device(), job.id(), spec::ShareOf(job.spec()));
  }
  scheduling_.Keep(job.id(), KeptFor(job));
}

void SlotKeeper::Check(const JobTable& all, std::vector<std::string>& broken) const {
  // By worker and device: the jobs for which it is kept, and what is kept of it in all.
  std::map<std::pair<std::string, std::string>, std::set<JobId>> stored;
  std::map<std::pair<std::string, std::string>, int64_t> sums;
  for (const auto& [id, job] : all.entries()) {
    const auto kept = scheduling_.kept().find(id);
    const size_t known = kept == scheduling_.kept().end() ? 0 : kept->second.slots.size();
    if (known != static_cast<size_t>(job.state.kept_size())) {
      broken.push_back(absl::StrCat("job ", id.value(), ": the scheduler keeps ", known,
                                    " slots for it, not ", job.state.kept_size()));
    }
    if (job.state.kept_size() > 0 && !scheduling_.Waits(id) &&
        job.state.state() != v1::JOB_STATE_RESIZING) {
      broken.push_back(absl::StrCat("job ", id.value(),
                                    ": slots are kept, but it neither waits nor is resized"));
    }
    if (!job.live() && !job.state.held_by().empty()) {
      broken.push_back(absl::StrCat("job ", id.value(), " has ended and is held"));
    }
    for (const v1::KeptSlot& slot : job.state.kept()) {
      const std::pair<std::string, std::string> place(slot.worker(), slot.device());
      const bool first = stored[place].insert(id).second;
      if (!first || (sums[place] += spec::ShareOf(job.spec())) > kWholeDevice) {
        broken.push_back(
            absl::StrCat("slot ", slot.worker(), " ", slot.device(), " is kept for two jobs"));
      }
    }
  }
  for (const auto& [id, worker] : workers_.entries()) {
    for (const auto& [device, jobs] : worker.kept_for) {
      for (const auto& [job, share] : jobs) {
        const auto known = stored.find({id.value(), device});
        if (known != stored.end() && known->second.contains(job)) continue;
        broken.push_back(absl::StrCat("slot ", id.value(), " ", device, " is kept for job ",
                                      job.value(), ", which does not know it"));
      }
    }
  }
}

}  // namespace muster::coordinator
