#include "coordinator/core/device_accounts.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"

namespace muster::coordinator {
namespace {

constexpr char kTenantLabel[] = "tenant";

bool Trains(v1::UsageClass usage_class) {
  return usage_class == v1::USAGE_CLASS_PRODUCTIVE || usage_class == v1::USAGE_CLASS_REPLAYED ||
         usage_class == v1::USAGE_CLASS_CHECKPOINT_STALL;
}

// Phases before training, RankProgress.phase; some are followed by a share.
bool Initializes(const std::string& phase) {
  static constexpr absl::string_view kPhases[] = {"starting",   "balancing",    "bootstrapping",
                                                  "allocating", "verifying",    "restoring",
                                                  "loading",    "initializing", "measuring"};
  for (const absl::string_view name : kPhases) {
    if (absl::StartsWith(phase, name)) return true;
  }
  return false;
}

bool Hangs(const JobEntry& job, absl::Time now) {
  if (job.gang.step() == 0 || job.progress.step_seconds() <= 0) return false;
  // Daemons report any number.
  const absl::Duration steps = kHungSteps * absl::Seconds(job.progress.step_seconds());
  return now - job.progress_at >= std::max(kHungMin, steps);
}

v1::UsageRow NamesOf(const JobEntry& job) {
  v1::UsageRow row;
  row.set_job_id(job.fixed.id());
  row.set_job_name(job.name());
  row.set_queue(job.spec().queue());
  row.set_tenant(TenantOf(job.spec()));
  return row;
}

}  // namespace

std::string TenantOf(const v1::JobSpec& spec) {
  const auto label = spec.labels().find(kTenantLabel);
  return label == spec.labels().end() ? "" : label->second;
}

Use UseOf(const JobEntry& job, absl::Time now) {
  const v1::Cause before = job.ends.empty() ? v1::CAUSE_UNSPECIFIED : job.ends.back().cause();
  const Use known = job.account.use();
  switch (job.state.attempt_state()) {
    case v1::ATTEMPT_STATE_BOOTSTRAPPING:
      // After a restart of the coordinator the daemons have yet to tell how far the ranks are.
      if (known.usage_class == v1::USAGE_CLASS_INITIALIZING ||
          job.gang.AllAtLeast(v1::RANK_STATE_RUNNING)) {
        return {v1::USAGE_CLASS_INITIALIZING, before};
      }
      return {v1::USAGE_CLASS_LAUNCHING, before};
    case v1::ATTEMPT_STATE_TRAINING:
      if (!job.gang.reported() && Trains(known.usage_class)) return known;
      if (Initializes(job.phase)) return {v1::USAGE_CLASS_INITIALIZING, before};
      if (absl::StartsWith(job.phase, "finished")) {
        return {v1::USAGE_CLASS_HELD, v1::CAUSE_COMPLETED};
      }
      if (Hangs(job, now)) return {v1::USAGE_CLASS_HUNG, v1::CAUSE_HANG};
      if (absl::StartsWith(job.phase, "saving")) return {v1::USAGE_CLASS_CHECKPOINT_STALL};
      if (job.gang.step() < job.state.furthest_step()) return {v1::USAGE_CLASS_REPLAYED, before};
      return {v1::USAGE_CLASS_PRODUCTIVE};
    case v1::ATTEMPT_STATE_STOPPING:
      if (job.state.stop_cause() == v1::CAUSE_PREEMPTED) {
        return {v1::USAGE_CLASS_PREEMPTED, v1::CAUSE_PREEMPTED};
      }
      return {v1::USAGE_CLASS_HELD, job.state.stop_cause()};
    default:
      return {v1::USAGE_CLASS_HELD, before};
  }
}

absl::Status DeviceAccounts::Load(Store& store, absl::Time now) {
  ASSIGN_OR_RETURN(const std::optional<std::string> stored,
                   store.Get(Table::kUsage, schema::kFleetAccount));
  v1::FleetAccount row;
  if (stored.has_value()) {
    RETURN_IF_ERROR(schema::Parse(Table::kUsage, schema::kFleetAccount, *stored, row));
  }
  ledger_.Recover(stored.has_value() ? &row : nullptr, now);
  return absl::OkStatus();
}

void DeviceAccounts::Begin(JobTable& jobs, const WorkerTable& workers, Turn& turn) {
  for (auto& [id, job] : jobs.entries()) {
    if (job.state.has_account()) Settled(job);
    if (job.account.has_period() || !job.account.devices().empty() || workers.HeldBy(id) > 0) {
      open_.insert(id);
      turn.Progressed(id);
    }
  }
}

void DeviceAccounts::UpdateJob(JobEntry& job, const WorkerTable& workers, Turn& turn) {
  Devices devices;
  const int64_t held = workers.HeldBy(job.id());
  if (held > 0) devices[UseOf(job, turn.now())] = held;
  if (devices != job.account.devices()) {
    const Use before = job.account.use();
    const bool hangs = job.state.attempt_state() == v1::ATTEMPT_STATE_STOPPING
                           ? job.state.stop_cause() == v1::CAUSE_HANG
                           : held > 0 && devices.begin()->first.usage_class == v1::USAGE_CLASS_HUNG;
    if (hangs && Trains(before.usage_class)) {
      // It has hung since its last sign of progress.
      const int64_t since = ledger_.ClockAt(job.progress_at);
      job.account.AddTimeUntil(since, ledger_.wall_ms() - (ledger_.clock_ms() - since));
      job.account.SetDevices(
          {{Use{v1::USAGE_CLASS_HUNG, v1::CAUSE_HANG}, job.account.thousandths()}});
    }
    job.account.AddTimeUntil(ledger_.clock_ms(), ledger_.wall_ms());
    // Devices that pass from one account to another must do so in both, also on disk.
    const bool passed = held != job.account.thousandths();
    job.account.SetDevices(std::move(devices));
    Settled(job);
    passed ? turn.Persist(job.id()) : turn.Progressed(job.id());
    open_.insert(job.id());
  }
  if (!job.live() && job.account.has_period()) {
    Close(job, turn);
    open_.erase(job.id());
  }
}

void DeviceAccounts::Settled(JobEntry& job) const {
  job.account_changed = true;
  job.usage = job.account.View(ledger_.clock_ms(), ledger_.wall_ms());
}

void DeviceAccounts::Close(JobEntry& job, Turn& turn) {
  ledger_.Close(job.account, NamesOf(job), turn.batch());
  Settled(job);
  turn.Persist(job.id());
}

int64_t DeviceAccounts::spare() const {
  const Devices& devices = ledger_.fleet().devices();
  const auto spare = devices.find({v1::USAGE_CLASS_SPARE});
  return spare == devices.end() ? 0 : spare->second / kWholeDevice;
}

void DeviceAccounts::BringUpToDate(JobTable& jobs, WorkerTable& workers, SpareCount spares,
                                   Turn& turn) {
  std::set<JobId> touched = turn.persist();
  touched.insert(turn.progressed().begin(), turn.progressed().end());
  for (const JobId& id : touched) {
    if (JobEntry* job = jobs.Find(id); job != nullptr) UpdateJob(*job, workers, turn);
  }
  const FleetTally& tally = workers.Tally();
  Devices unheld;
  const auto count = [&unheld](Use use, int64_t thousandths) {
    if (thousandths > 0) unheld[use] = thousandths;
  };
  count({v1::USAGE_CLASS_IDLE}, tally.idle - spares.free * kWholeDevice);
  count({v1::USAGE_CLASS_SPARE}, spares.free * kWholeDevice);
  count({v1::USAGE_CLASS_AWAY, v1::CAUSE_WORKER_LOST}, tally.away);
  count({v1::USAGE_CLASS_AWAY, v1::CAUSE_MAINTENANCE}, tally.maintenance);
  count({v1::USAGE_CLASS_AWAY, v1::CAUSE_DEVICE}, tally.unusable);
  ledger_.SetFleet(tally.all(), std::move(unheld));
  if (ledger_.PeriodIsOver()) {
    for (auto next = open_.begin(); next != open_.end();) {
      JobEntry& job = *jobs.Find(*next);
      Close(job, turn);
      next = job.account.devices().empty() ? open_.erase(next) : std::next(next);
    }
    ledger_.BeginPeriod(turn.batch());
    fleet_unsaved_ = true;
  }
  const bool fleet_changed = ledger_.TakeFleetChanged();
  fleet_unsaved_ |= fleet_changed;
  if (fleet_changed || spares_missing_ != spares.missing) {
    spares_missing_ = spares.missing;
    turn.Act(FleetUsageChanged{ledger_.fleet().View(ledger_.clock_ms(), ledger_.wall_ms()),
                               spares.missing});
  }
}

void DeviceAccounts::PutFleet(bool jobs_put, Batch& batch) {
  if (!jobs_put && (!fleet_unsaved_ || batch.empty())) return;
  ledger_.Put(batch);
  fleet_unsaved_ = false;
}

OpenUsage DeviceAccounts::Usage(const JobTable& jobs) const {
  OpenUsage open;
  open.last_row = ledger_.last_row();
  open.as_of_ms = ledger_.wall_ms();
  const auto add = [&](DeviceAccount account, v1::UsageRow names) {
    account.AddTimeUntil(ledger_.clock_ms(), ledger_.wall_ms());
    if (!account.has_period()) return;
    names.MergeFrom(account.TakePeriod(ledger_.wall_ms()));
    open.rows.push_back(std::move(names));
  };
  add(ledger_.fleet(), {});
  for (const JobId& id : open_) {
    const JobEntry& job = *jobs.Find(id);
    add(job.account, NamesOf(job));
  }
  return open;
}

void DeviceAccounts::Check(const JobTable& jobs, const WorkerTable& workers,
                           std::vector<std::string>& broken) const {
  int64_t thousandths = ledger_.fleet().thousandths();
  DeviceTime time = ledger_.fleet().Total(ledger_.clock_ms());
  for (const auto& [id, job] : jobs.entries()) {
    thousandths += job.account.thousandths();
    time.Add(job.account.Total(ledger_.clock_ms()));
    if (job.account.thousandths() != workers.HeldBy(id)) {
      broken.push_back(absl::StrCat("job ", id.value(), ": ", job.account.thousandths(),
                                    " thousandths of devices in its account, but it holds ",
                                    workers.HeldBy(id)));
    }
  }
  if (thousandths != ledger_.thousandths()) {
    broken.push_back(absl::StrCat("the accounts have ", thousandths,
                                  " thousandths of devices, the workers ", ledger_.thousandths()));
  }
  if (const DeviceTime all = ledger_.AllTime(); time != all) {
    broken.push_back(absl::StrCat("the accounts have ", time.ms, " ms and ", time.rest_us,
                                  " us of devices, the clock ", all.ms, " and ", all.rest_us));
  }
}

}  // namespace muster::coordinator
