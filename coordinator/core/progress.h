// How reports of ranks become the progress that users see. Pure.
#ifndef MUSTER_COORDINATOR_CORE_PROGRESS_H_
#define MUSTER_COORDINATOR_CORE_PROGRESS_H_

#include <vector>

#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"

namespace muster::coordinator {

// Folds the newest report of every rank of the current attempt (entries without a report are
// default messages) into step, loss, speed, tokens and the loss curve. True when something changed.
bool FoldProgress(const std::vector<v1::RankProgress>& ranks, v1::Job& job);

// Adds or completes the point of `step` with its validation loss. False: it was there already.
bool AddEvaluation(int64_t step, double loss, v1::Job& job);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_PROGRESS_H_
