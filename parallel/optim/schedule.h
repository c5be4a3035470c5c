// Learning rate as a pure function of the number of updates.
#ifndef MUSTER_PARALLEL_OPTIM_SCHEDULE_H_
#define MUSTER_PARALLEL_OPTIM_SCHEDULE_H_

#include <cstdint>

#include "kernels/optimizer/optimizer.h"

namespace muster::parallel {

// Evaluated on the device, because only the device knows how many steps were skipped.
using Schedule = kernels::LearningRateSchedule;
using Decay = Schedule::Decay;

// `update` counts from 1.
double LearningRate(const Schedule& schedule, int64_t update);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_SCHEDULE_H_
