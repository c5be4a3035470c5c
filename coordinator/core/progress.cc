#include "coordinator/core/progress.h"

#include <algorithm>

#include "coordinator/core/limits.h"

namespace muster::coordinator {
namespace {

constexpr size_t kPhaseBytesMax = 32;

// Steps between two points of the training loss. They take half of the points of the curve; the
// rest is for evaluations.
int64_t Stride(const v1::Job& job) {
  return std::max<int64_t>(1, (job.steps() + kLossPointsMax / 2 - 1) / (kLossPointsMax / 2));
}

// Removes the points after a restored step, which the attempt trains again.
void DropPointsAfter(int64_t step, v1::Job& job) {
  while (job.losses_size() > 0 && job.losses(job.losses_size() - 1).step() > step) {
    job.mutable_losses()->RemoveLast();
  }
}

// Removes every second point when there are too many.
void Thin(v1::Job& job) {
  if (job.losses_size() <= kLossPointsMax) return;
  google::protobuf::RepeatedPtrField<v1::LossPoint> kept;
  for (int i = 0; i < job.losses_size(); ++i) {
    if (i % 2 == 0 || i + 1 == job.losses_size()) *kept.Add() = job.losses(i);
  }
  *job.mutable_losses() = std::move(kept);
}

void AddTrainLoss(int64_t step, double loss, v1::Job& job) {
  const int last = job.losses_size() - 1;
  if (last >= 0 && job.losses(last).step() == step) {
    job.mutable_losses(last)->set_train_loss(loss);
    return;
  }
  if (last >= 0 && step < job.losses(last).step() + Stride(job) && step != job.steps()) return;
  v1::LossPoint* point = job.add_losses();
  point->set_step(step);
  point->set_train_loss(loss);
  Thin(job);
}

// Merges the points of a report by step. The rank chooses their steps, so that they do not depend
// on when it reports.
bool MergePoints(const v1::RankProgress& rank, v1::Job& job) {
  bool changed = false;
  for (const v1::LossPoint& point : rank.losses()) {
    int at = job.losses_size();
    while (at > 0 && job.losses(at - 1).step() > point.step()) --at;
    if (at > 0 && job.losses(at - 1).step() == point.step()) {
      changed |= job.losses(at - 1).train_loss() != point.train_loss();
      job.mutable_losses(at - 1)->set_train_loss(point.train_loss());
      continue;
    }
    changed = true;
    v1::LossPoint* added = job.add_losses();
    added->set_step(point.step());
    added->set_train_loss(point.train_loss());
    for (int i = job.losses_size() - 1; i > at; --i) job.mutable_losses()->SwapElements(i, i - 1);
  }
  if (changed) Thin(job);
  return changed;
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

bool FoldProgress(const std::vector<v1::RankProgress>& ranks, v1::Job& job) {
  // Bounded, since every answer about the job carries this text of a rank.
  const std::string phase = ranks.empty() ? "" : ranks[0].phase().substr(0, kPhaseBytesMax);
  const bool other_phase = phase != job.phase();
  job.set_phase(phase);
  const v1::RankProgress* front = nullptr;
  std::vector<double> step_seconds;
  for (const v1::RankProgress& rank : ranks) {
    if (rank.step() <= 0) continue;
    if (front == nullptr || rank.step() > front->step()) front = &rank;
    if (rank.step_seconds() > 0) step_seconds.push_back(rank.step_seconds());
  }
  if (front == nullptr) return other_phase;
  // A rank that has just restored a checkpoint has a step but no loss of its own yet.
  const double train_loss = front->train_loss() != 0 ? front->train_loss() : job.train_loss();
  bool changed = front->step() != job.step() || train_loss != job.train_loss() ||
                 front->tokens_per_second() != job.tokens_per_second();
  if (front->step() < job.step()) DropPointsAfter(front->step(), job);
  const auto with_points = std::find_if(ranks.begin(), ranks.end(),
                                        [](const auto& rank) { return rank.losses_size() > 0; });
  if (with_points != ranks.end()) {
    changed |= MergePoints(*with_points, job);
  } else if (changed && front->train_loss() != 0) {
    AddTrainLoss(front->step(), front->train_loss(), job);
  }
  job.set_step(front->step());
  job.set_train_loss(train_loss);
  job.set_tokens_per_second(front->tokens_per_second());
  job.set_model_flops_utilization(front->model_flops_utilization());
  job.set_hardware_flops_utilization(front->hardware_flops_utilization());
  job.set_step_seconds(Median(std::move(step_seconds)));
  job.set_consumed_tokens(front->consumed_samples() *
                          job.spec().engine().model().sequence_length());
  return changed || other_phase;
}

bool AddEvaluation(int64_t step, double loss, v1::Job& job) {
  int at = job.losses_size();
  while (at > 0 && job.losses(at - 1).step() > step) --at;
  if (at > 0 && job.losses(at - 1).step() == step) {
    v1::LossPoint* point = job.mutable_losses(at - 1);
    if (point->has_validation_loss() && point->validation_loss() == loss) return false;
    point->set_validation_loss(loss);
  } else {
    v1::LossPoint* point = job.add_losses();
    point->set_step(step);
    point->set_train_loss(job.train_loss());
    point->set_validation_loss(loss);
    for (int i = job.losses_size() - 1; i > at; --i) job.mutable_losses()->SwapElements(i, i - 1);
  }
  // The loss of an evaluation that arrives late must not replace that of a newer one.
  bool newest = true;
  for (const v1::LossPoint& point : job.losses()) {
    if (point.step() > step && point.has_validation_loss()) newest = false;
  }
  if (newest) job.set_validation_loss(loss);
  Thin(job);
  return true;
}

}  // namespace muster::coordinator
