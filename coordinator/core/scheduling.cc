#include "coordinator/core/scheduling.h"

#include <algorithm>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

bool Scheduling::Add(WaitingJob job) {
  const bool matters =
      !horizon_.Excludes(job) || job.not_before != absl::InfinitePast();  // a plan wakes at its end
  waiting_.Add(std::move(job));
  return matters;
}

void Scheduling::AddRunning(const JobId& id, RunningJob job, absl::Time now) {
  Accrue(job.queue, now);
  RecoverRunning(id, std::move(job));
}

void Scheduling::RecoverRunning(const JobId& id, RunningJob job) {
  Count(job, 1);
  running_.Put(id, std::move(job));
}

void Scheduling::RemoveRunning(const JobId& id, absl::Time now) {
  const RunningJob* job = running_.Find(id);
  if (job == nullptr) return;
  Accrue(job->queue, now);
  Count(*job, -1);
  running_.Remove(id);
}

// To be called before what the queue uses changes.
void Scheduling::Accrue(const std::string& queue, absl::Time now) {
  const int leaf = tree_.Find(queue);
  if (leaf == QueueTree::kNone) return;
  for (const int above : tree_.Path(leaf)) {
    history_.Accrue(tree_, use_, above, now);
    accrued_.insert(tree_.at(above).name);
  }
}

void Scheduling::SetTree(QueueTree tree, absl::Time now) {
  for (const QueueTree::Queue& queue : tree_.queues()) {
    if (queue.leaf) Accrue(queue.name, now);
  }
  for (const QueueTree::Queue& queue : tree_.queues()) {
    if (tree.Find(queue.name) == QueueTree::kNone) history_.Forget(queue.name);
  }
  RecoverTree(std::move(tree));
  for (const auto& [id, job] : running_.all()) Count(job, 1);
  for (const QueueTree::Queue& queue : tree_.queues()) history_.Begin(queue.name, now);
  for (const QueueTree::Queue& queue : tree_.queues()) accrued_.insert(queue.name);
  horizon_ = {};  // of plans for other queues
}

void Scheduling::RecoverTree(QueueTree tree) {
  tree_ = std::move(tree);
  use_ = QueueUse(tree_);
  spares_as_of_ = 0;
}

void Scheduling::TookTurn(const std::string& queue, absl::Time now) {
  history_.TookTurn(queue, now);
  accrued_.insert(queue);
}

const SpareCount& Scheduling::Spares() {
  if (spares_as_of_ != slots_.version()) {
    spares_ = SpareDevices(slots_, tree_);
    spares_as_of_ = slots_.version();
  }
  return spares_;
}

bool Scheduling::SparesAreRight(int64_t spare) const {
  if (tree_.spares().empty()) return spare == 0;
  SlotIndex slots = slots_;
  return SpareDevices(slots, tree_).free == spare;
}

std::vector<std::string> Scheduling::WarningsOf(const v1::QueuePolicy& policy) {
  std::vector<std::string> warnings;
  for (const v1::SpareStatus& status : CountSpares(slots_, tree_)) {
    if (status.too_small().empty()) continue;
    for (int i = 0; i < policy.spares_size(); ++i) {
      if (policy.spares(i).level() != status.level()) continue;
      warnings.push_back(absl::StrCat(
          "spares[", i, "].devices.", status.device(), ": in ",
          absl::StrJoin(status.too_small(), ", "),
          " that is every device, so that no job but one that recovers starts there; lower it"));
    }
  }
  for (int device = 0; device < v1::DeviceKind_ARRAYSIZE; ++device) {
    if (!v1::DeviceKind_IsValid(device)) continue;
    const auto kind = static_cast<v1::DeviceKind>(device);
    int64_t guaranteed = 0;
    for (const int queue : tree_.Below(QueueTree::kNone)) {
      guaranteed += tree_.at(queue).guaranteed[static_cast<size_t>(device)];
    }
    const int64_t total = slots_.Of(kind).total;
    if (guaranteed <= total) continue;
    warnings.push_back(absl::StrCat("queues: ", guaranteed, " ", spec::EnumName(kind),
                                    " are guaranteed in all, and all workers have ", total,
                                    "; until more join not everybody gets what is theirs"));
  }
  for (int i = 0; i < policy.queues_size(); ++i) {
    if (!policy.queues(i).has_running_jobs_max() || policy.queues(i).running_jobs_max() > 0) {
      continue;
    }
    warnings.push_back(absl::StrCat("queues[", i, "].running_jobs_max: 0, so that no job of queue ",
                                    policy.queues(i).name(), " starts; leave it out for no limit"));
  }
  return warnings;
}

v1::GetQueuesResponse Scheduling::Queues(absl::Time now) {
  struct Waiting {
    int64_t jobs = 0;
    PerDevice<int64_t> thousandths = {};  // of devices
  };
  std::vector<Waiting> waiting(tree_.queues().size());
  for (const auto& [name, shapes] : waiting_.queues()) {
    const int queue = tree_.Find(name);
    if (queue == QueueTree::kNone) continue;
    for (const auto& [shape, jobs] : shapes) {
      for (const int above : tree_.Path(queue)) {
        Waiting& of = waiting[static_cast<size_t>(above)];
        of.jobs += static_cast<int64_t>(jobs.size());
        of.thousandths[static_cast<size_t>(shape.device)] +=
            int64_t{shape.ranks} * shape.share * static_cast<int64_t>(jobs.size());
      }
    }
  }
  v1::GetQueuesResponse out;
  for (size_t i = 0; i < tree_.queues().size(); ++i) {
    const QueueTree::Queue& queue = tree_.queues()[i];
    const QueueUse::Of& used = use_.at(static_cast<int>(i));
    v1::QueueStatus& status = *out.add_queues();
    status.set_name(queue.name);
    if (queue.parent != QueueTree::kNone) status.set_parent(tree_.at(queue.parent).name);
    status.set_running_jobs(used.jobs);
    status.set_waiting_jobs(waiting[i].jobs);
    if (queue.running_jobs_max.has_value()) {
      status.set_running_jobs_max(static_cast<int32_t>(*queue.running_jobs_max));
    }
    status.set_weight(queue.weight);
    status.set_share(ShareOf(Cluster(), use_, static_cast<int>(i), now));
    for (const v1::DeviceKind kind : {v1::DEVICE_KIND_CPU, v1::DEVICE_KIND_CUDA}) {
      const size_t k = static_cast<size_t>(kind);
      if (slots_.Of(kind).total == 0 && queue.guaranteed[k] == 0 && !queue.limit[k].has_value() &&
          used.thousandths[k] == 0 && waiting[i].thousandths[k] == 0) {
        continue;
      }
      const int64_t borrowed =
          std::max<int64_t>(0, used.thousandths[k] - queue.guaranteed[k] * kWholeDevice);
      v1::QueueUse& use = *status.add_uses();
      use.set_device(spec::EnumName(kind));
      use.set_used(DevicesOf(used.thousandths[k]));
      use.set_guaranteed(queue.guaranteed[k]);
      use.set_borrowed(DevicesOf(borrowed));
      if (queue.limit[k].has_value()) use.set_limit(*queue.limit[k]);
      use.set_waiting(DevicesOf(waiting[i].thousandths[k]));
      use.set_used_devices(static_cast<double>(used.thousandths[k]) / kWholeDevice);
      use.set_borrowed_devices(static_cast<double>(borrowed) / kWholeDevice);
      use.set_waiting_devices(static_cast<double>(waiting[i].thousandths[k]) / kWholeDevice);
    }
  }
  for (v1::SpareStatus& spares : CountSpares(slots_, tree_)) *out.add_spares() = std::move(spares);
  std::vector<std::pair<absl::Time, const JobId*>> heads;
  for (const auto& [id, set_aside] : set_aside_) {
    heads.emplace_back(FromProto(set_aside.starts_at()), &id);
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [at, id] : heads) {
    const WaitingJob& job = *waiting_.Find(*id);
    v1::HeadOfQueue& head = *out.add_heads();
    head.set_queue(job.queue);
    head.mutable_job()->set_job_id(id->value());
    head.mutable_job()->set_job_name(job.name);
    head.mutable_job()->set_priority(job.priority);
    head.mutable_job()->set_ranks(job.ranks);
    head.mutable_job()->set_device(job.device);
    *head.mutable_set_aside() = set_aside_.at(*id);
  }
  return out;
}

std::vector<std::string> Scheduling::CheckQueues() const {
  std::vector<std::string> broken;
  QueueUse counted(tree_);
  for (const auto& [id, job] : running_.all()) {
    counted.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, 1, job.share);
  }
  if (!(counted == use_)) broken.push_back("what queues use is not what their jobs use");
  return broken;
}

bool Scheduling::MaySplitDevices() const {
  for (const auto& [queue, shapes] : waiting_.queues()) {
    for (const auto& [shape, jobs] : shapes) {
      if (shape.share < kWholeDevice) return true;
    }
  }
  const auto& elastic = running_.elastic();
  return std::any_of(elastic.begin(), elastic.end(),
                     [this](const JobId& id) { return running_.Find(id)->share < kWholeDevice; });
}

bool Scheduling::Remove(const JobId& id) {
  const WaitingJob* job = waiting_.Find(id);
  if (job == nullptr) return false;
  const bool matters = !horizon_.Excludes(*job);
  waiting_.Remove(id);
  set_aside_.erase(id);
  return matters;
}

Schedule Scheduling::MakePlan(absl::Time now) {
  Schedule plan = Plan(Cluster(), waiting_, policy_, now);
  horizon_ = plan.horizon;
  set_aside_.clear();  // the plan is carried out next, and SetAside() with it
  std::set<JobId> explained;
  for (const Explanation& explanation : plan.explanations) explained.insert(explanation.job);
  std::set<JobId> started;
  for (const Decision& decision : plan.decisions) {
    if (const Start* start = std::get_if<Start>(&decision)) started.insert(start->job);
  }
  for (const JobId& id : explained_) {
    const WaitingJob* job = waiting_.Find(id);
    if (job == nullptr || explained.contains(id) || started.contains(id)) continue;
    plan.explanations.emplace_back(id, BehindMany(*job, policy_));
  }
  explained_ = std::move(explained);
  return plan;
}

bool Scheduling::WouldDecide(absl::Time now) {
  const Schedule plan = Plan(Cluster(), waiting_, policy_, now);
  return std::any_of(plan.decisions.begin(), plan.decisions.end(), ChangesState);
}

Forecast Scheduling::Explain(const JobId& id, std::optional<WaitingJob> added, absl::Time now) {
  if (!added.has_value()) {
    return muster::coordinator::Explain(Cluster(), waiting_, policy_, now, id);
  }
  WaitingQueue with = waiting_;
  with.Add(*std::move(added));
  return muster::coordinator::Explain(Cluster(), with, policy_, now, id);
}

}  // namespace muster::coordinator
