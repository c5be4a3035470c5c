#include "parallel/optim/schedule.h"

#include <algorithm>
#include <cmath>

namespace muster::parallel {

double LearningRate(const Schedule& schedule, int64_t step) {
  if (step < schedule.warmup_steps) {
    return schedule.peak * static_cast<double>(step) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.decay == Decay::kConstant) return schedule.peak;
  const int64_t span = schedule.decay_steps - schedule.warmup_steps;
  const double progress = span <= 0
                              ? 1.0
                              : std::min(1.0, static_cast<double>(step - schedule.warmup_steps) /
                                                  static_cast<double>(span));
  const double remaining =
      schedule.decay == Decay::kCosine ? 0.5 * (1.0 + std::cos(M_PI * progress)) : 1.0 - progress;
  return schedule.minimum + (schedule.peak - schedule.minimum) * remaining;
}

}  // namespace muster::parallel
