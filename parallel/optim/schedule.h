// Learning rate as a pure function of the step.
#ifndef MUSTER_PARALLEL_OPTIM_SCHEDULE_H_
#define MUSTER_PARALLEL_OPTIM_SCHEDULE_H_

#include <cstdint>

namespace muster::parallel {

enum class Decay { kConstant, kCosine, kLinear };

struct Schedule {
  Decay decay = Decay::kConstant;
  double peak = 0;
  double minimum = 0;        // not used by kConstant
  int64_t warmup_steps = 0;  // peak * step / warmup_steps
  int64_t decay_steps = 0;   // the minimum is reached here and kept
};

// `step` counts from 1 (the first update).
double LearningRate(const Schedule& schedule, int64_t step);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_SCHEDULE_H_
