// Which ranks an attempt has, and where, in each of its memberships.
#ifndef MUSTER_COORDINATOR_CORE_MEMBERSHIP_H_
#define MUSTER_COORDINATOR_CORE_MEMBERSHIP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/job_entry.h"
#include "coordinator/core/key_value.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/stop_reason.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// What is known of a worker whose ranks are replaced: that its daemon holds none of them, or is
// given up and has to prove it when it returns; or it has to prove it now.
enum class Departure { kProven, kToBeProven };

// Behind the allocation of an attempt nothing else changes AttemptRow.membership, leaving and
// replacements. A rank that was replaced holds its slot until it is known to be gone; a worker that
// has left an epoch takes no part in it again. Thread: the core's. What it is made of outlives it.
class Membership {
 public:
  Membership(WorkerTable& workers, const Reservations& reservations, KeyValue& values)
      : workers_(workers), reservations_(reservations), values_(values) {}

  // The host of every rank and the address at which the others reach it.
  void SetAddresses(v1::AttemptRow& attempt) const;
  // Gives the attempt's ranks on the worker other slots, in a new membership, of which the gang
  // knows nothing yet; returns what has changed, for people. None, and nothing has changed: the
  // attempt has begun to train, or no free slots keep the rules. Requires: it is up, and the worker
  // has ranks of it.
  std::optional<std::string> Replace(JobEntry& job, const std::string& worker,
                                     const StopReason& reason, Departure departure, Turn& turn);
  // The devices of ranks that were replaced on the worker are accounted for; `rank` -1: of all.
  void Departed(JobEntry& job, const std::string& worker, int32_t rank, Turn& turn);
  // Whether a rank on the worker was told to start.
  static bool MayHaveStarted(const JobEntry& job, const std::string& worker);
  // Adds what does not hold. Requires: the job has an attempt.
  void Check(const JobEntry& job, std::vector<std::string>& broken) const;

 private:
  // Whether ranks of the attempt may be replaced for this reason as long as slots are free.
  bool MayReplace(const JobEntry& job, const std::string& worker, v1::Cause cause) const;

  WorkerTable& workers_;
  const Reservations& reservations_;
  KeyValue& values_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_MEMBERSHIP_H_
