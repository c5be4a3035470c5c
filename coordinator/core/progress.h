// Merges the progress that ranks report into the job that users see. Pure.
#ifndef MUSTER_COORDINATOR_CORE_PROGRESS_H_
#define MUSTER_COORDINATOR_CORE_PROGRESS_H_

#include <vector>

#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"

namespace muster::coordinator {

// Merges the newest report of every rank of the current attempt, by rank (a default message where a
// rank has not reported), into step, loss, speed, tokens and loss curve. True when something
// changed.
bool FoldProgress(const std::vector<v1::RankProgress>& ranks, v1::Job& job);

// Sets the validation loss of the curve's point at `step`, which is added when there is none.
// False: it had this loss already.
bool AddEvaluation(int64_t step, double loss, v1::Job& job);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_PROGRESS_H_
