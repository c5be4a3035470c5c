// What every device of the cluster is used for: the accounts of jobs and the fleet's, over time.
#ifndef MUSTER_COORDINATOR_CORE_DEVICE_ACCOUNTS_H_
#define MUSTER_COORDINATOR_CORE_DEVICE_ACCOUNTS_H_

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/core/device_account.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/ledger.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "coordinator/scheduler/spares.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {

// Who pays: the label "tenant"; empty where there is none.
std::string TenantOf(const v1::JobSpec& spec);
// What the devices of the job are used for now. Requires: it holds some.
Use UseOf(const JobEntry& job, absl::Time now);

// Nothing else changes JobEntry::account. At the end of every turn the accounts have as many
// devices as the workers, and as much time as the ledger's clock (Check), in memory and on disk: a
// batch with the account of a job has the fleet's too. Thread: the core's.
class DeviceAccounts {
 public:
  // kDataLoss: the fleet's account cannot be read.
  absl::Status Load(Store& store, absl::Time now);
  // To be called first in every turn, and before Usage().
  void Advance(absl::Time now) { ledger_.Advance(now); }
  // To be called once, in the turn that begins a term.
  void Begin(JobTable& jobs, const WorkerTable& workers, Turn& turn);

  // Brings the accounts of the jobs that changed in this turn, and that of the fleet, up to date.
  // `spares`: of the devices that nobody holds.
  void BringUpToDate(JobTable& jobs, WorkerTable& workers, SpareCount spares, Turn& turn);
  // Adds the fleet's row to a batch that needs it: one with the account of a job (`jobs_put`), or
  // any that is written when the fleet's account has changed.
  void PutFleet(bool jobs_put, Batch& batch);

  // The time of the period that is not over.
  OpenUsage Usage(const JobTable& jobs) const;
  // The devices that are USAGE_CLASS_SPARE now.
  int64_t spare() const;
  // Adds what does not hold.
  void Check(const JobTable& jobs, const WorkerTable& workers,
             std::vector<std::string>& broken) const;

 private:
  void UpdateJob(JobEntry& job, const WorkerTable& workers, Turn& turn);
  void Settled(JobEntry& job) const;
  void Close(JobEntry& job, Turn& turn);

  Ledger ledger_;
  int64_t spares_missing_ = 0;
  std::set<JobId> open_;       // jobs with time in the period that is not over, or with devices
  bool fleet_unsaved_ = true;  // the fleet's account changed since it was last put into a batch
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DEVICE_ACCOUNTS_H_
