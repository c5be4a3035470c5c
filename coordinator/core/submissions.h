// Jobs and arrays that users submit.
#ifndef MUSTER_COORDINATOR_CORE_SUBMISSIONS_H_
#define MUSTER_COORDINATOR_CORE_SUBMISSIONS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/core/job_life.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

// What is accepted is live and waits; what is not changes nothing. A request id is accepted once.
// Thread: the core's. What it is made of outlives it.
class Submissions {
 public:
  Submissions(Rng& rng, JobTable& jobs, const Scheduling& scheduling, JobStates& states,
              JobLife& life)
      : rng_(rng), jobs_(jobs), scheduling_(scheduling), states_(states), life_(life) {}

  // Takes the spec out of the event. The job, new or, as reply.existed says, of an earlier event
  // with this request id. kInvalidArgument, kAlreadyExists, kNotFound, kFailedPrecondition: the
  // spec. kResourceExhausted: kLiveJobsMax.
  absl::StatusOr<JobEntry*> Submit(SubmitEvent& event, ReplyAction& reply, Turn& turn);
  // The same, with all tasks or none; fills in reply.array.
  absl::Status SubmitArray(const SubmitArrayEvent& event, ReplyAction& reply, Turn& turn);

 private:
  // A job that can be accepted.
  struct Submission {
    v1::JobSpec spec;  // its deadline is a time
    std::vector<v1::Dependency> after;
  };
  static absl::Status CheckRequestId(const std::string& request_id);
  // kAlreadyExists: a live job or an array with live tasks has the name.
  absl::Status CheckArrayName(const std::string& name) const;
  absl::StatusOr<Submission> CheckSubmission(v1::JobSpec spec, absl::Time now) const;
  JobEntry& Accept(Submission submission, const std::string& request_id, const Caller& caller,
                   Turn& turn);
  JobId NewJobId(const std::string& name);

  Rng& rng_;
  JobTable& jobs_;
  const Scheduling& scheduling_;
  JobStates& states_;
  JobLife& life_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_SUBMISSIONS_H_
