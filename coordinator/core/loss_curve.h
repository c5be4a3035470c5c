// The loss curve of a job: a bounded number of points by step. Value type; one thread.
#ifndef MUSTER_COORDINATOR_CORE_LOSS_CURVE_H_
#define MUSTER_COORDINATOR_CORE_LOSS_CURVE_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "google/protobuf/repeated_ptr_field.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Bound: kLossPointsMax; beyond it every second point goes.
class LossCurve {
 public:
  // Adds a point as it was stored.
  void Recover(v1::LossPoint point) {
    const int64_t step = point.step();
    points_[step] = std::move(point);
  }

  // A job of `steps` steps reported the training loss of one of them. Points are at least
  // steps / (kLossPointsMax / 2) steps apart; evaluations may take the other half.
  void AddTrainLoss(int64_t step, double loss, int64_t steps);
  // Merges points whose steps a rank has chosen, so that they do not depend on when it reports.
  // True when one is new or differs.
  bool Merge(const google::protobuf::RepeatedPtrField<v1::LossPoint>& points);
  // False when the evaluation is known. `train_loss` is used where the step has no point yet.
  bool AddEvaluation(int64_t step, double loss, double train_loss);
  // Removes the points after a restored step, which the attempt trains again.
  void DropAfter(int64_t step);

  // False when an evaluation of a later step is known.
  bool IsNewestEvaluation(int64_t step) const;
  const std::map<int64_t, v1::LossPoint>& points() const { return points_; }
  // Null when the step has no point.
  const v1::LossPoint* Find(int64_t step) const;
  // The steps whose points were added, changed or removed since the last call.
  std::set<int64_t> TakeChanged() { return std::exchange(changed_, {}); }
  // True when a point changed since the last call.
  bool TakeViewChanged() { return std::exchange(view_changed_, false); }

 private:
  void Thin();
  void MarkChanged(int64_t step) {
    changed_.insert(step);
    view_changed_ = true;
  }

  std::map<int64_t, v1::LossPoint> points_;  // by step
  std::set<int64_t> changed_;
  bool view_changed_ = true;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_LOSS_CURVE_H_
