#include "parallel/optim/schedule.h"

#include "kernels/optimizer/step_math.h"

namespace muster::parallel {

double LearningRate(const Schedule& schedule, int64_t update) {
  return kernels::LearningRateAt(schedule, update);
}

}  // namespace muster::parallel
