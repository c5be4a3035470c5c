// Jobs that wait for the ends of others (JobSpec.after).
#ifndef MUSTER_COORDINATOR_CORE_DEPENDENCIES_H_
#define MUSTER_COORDINATOR_CORE_DEPENDENCIES_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/turn.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

// JobSpec.after with names looked up, without what holds already. kNotFound, kFailedPrecondition:
// an entry names no job, or one that has ended otherwise.
absl::StatusOr<std::vector<v1::Dependency>> DependenciesOf(const v1::JobSpec& spec,
                                                           const JobTable& jobs);
// Why a job of this spec waits that has the dependencies `after`.
v1::WaitReason WaitFor(const v1::JobSpec& spec,
                       const google::protobuf::RepeatedPtrField<v1::Dependency>& after);

// Who waits for whom. Between turns every dependency of a job that waits (StateRow.after) names a
// live job and is in the index; an end that its condition does not allow has failed the job.
// Thread: the core's.
class Dependents {
 public:
  // The job waits for the ends in StateRow.after.
  void Await(const JobEntry& job, const JobTable& jobs);
  // The job has ended. Its dependents are looked at by TakeNext().
  void Ended(const JobId& job) { ended_.push_back(job); }

  // What the end of another job means for one that waited for it.
  struct Change {
    enum class Kind {
      kCannotStart,  // the other one has ended otherwise, as `why` says
      kWaitsOn,      // for its other dependencies
      kIsFree,       // of dependencies
    };
    JobId job;
    Kind kind = Kind::kWaitsOn;
    std::string why;
  };
  // Whether TakeNext() has anything to look at.
  bool pending() const { return !ended_.empty(); }
  // Looks at one of the jobs and arrays that have ended, takes it out of the dependencies of those
  // that waited for it, and returns these by id. A held one is left out: it waits on when it is
  // released. Requires: pending().
  std::vector<Change> TakeNext(JobTable& jobs, Turn& turn);

 private:
  // Tells those that wait for the array of a task that one has failed, and looks at them by
  // TakeNext() when it was the last one.
  std::vector<Change> TaskEnded(const JobEntry& task, JobTable& jobs, Turn& turn);

  std::map<JobId, std::set<JobId>> waiting_;  // by job or array: those that wait for its end
  std::vector<JobId> ended_;                  // their dependents have not been looked at
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DEPENDENCIES_H_
