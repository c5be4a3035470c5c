#include "coordinator/core/loss_curve.h"

#include <algorithm>

#include "coordinator/core/limits.h"

namespace muster::coordinator {

void LossCurve::AddTrainLoss(int64_t step, double loss, int64_t steps) {
  const int64_t stride =
      std::max<int64_t>(1, (steps + kLossPointsMax / 2 - 1) / (kLossPointsMax / 2));
  if (!points_.empty()) {
    const int64_t last = points_.rbegin()->first;
    if (step != last && step < last + stride && step != steps) return;
  }
  v1::LossPoint& point = points_[step];
  point.set_step(step);
  point.set_train_loss(loss);
  MarkChanged(step);
  Thin();
}

bool LossCurve::Merge(const google::protobuf::RepeatedPtrField<v1::LossPoint>& points) {
  bool changed = false;
  for (const v1::LossPoint& reported : points) {
    const auto [at, added] = points_.try_emplace(reported.step());
    if (!added && at->second.train_loss() == reported.train_loss()) continue;
    at->second.set_step(reported.step());
    at->second.set_train_loss(reported.train_loss());
    MarkChanged(reported.step());
    changed = true;
  }
  if (changed) Thin();
  return changed;
}

bool LossCurve::AddEvaluation(int64_t step, double loss, double train_loss) {
  const auto [at, added] = points_.try_emplace(step);
  v1::LossPoint& point = at->second;
  if (!added && point.has_validation_loss() && point.validation_loss() == loss) return false;
  if (added) {
    point.set_step(step);
    point.set_train_loss(train_loss);
  }
  point.set_validation_loss(loss);
  MarkChanged(step);
  Thin();
  return true;
}

void LossCurve::DropAfter(int64_t step) {
  while (!points_.empty() && points_.rbegin()->first > step) {
    MarkChanged(points_.rbegin()->first);
    points_.erase(std::prev(points_.end()));
  }
}

bool LossCurve::IsNewestEvaluation(int64_t step) const {
  for (auto point = points_.rbegin(); point != points_.rend() && point->first > step; ++point) {
    if (point->second.has_validation_loss()) return false;
  }
  return true;
}

const v1::LossPoint* LossCurve::Find(int64_t step) const {
  const auto found = points_.find(step);
  return found == points_.end() ? nullptr : &found->second;
}

void LossCurve::Thin() {
  if (points_.size() <= kLossPointsMax) return;
  int index = 0;
  for (auto point = points_.begin(); point != points_.end(); ++index) {
    if (index % 2 == 0 || std::next(point) == points_.end()) {
      ++point;
      continue;
    }
    MarkChanged(point->first);
    point = points_.erase(point);
  }
}

}  // namespace muster::coordinator
