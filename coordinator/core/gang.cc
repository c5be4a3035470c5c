#include "coordinator/core/gang.h"

#include <algorithm>
#include <cmath>

#include "coordinator/core/attempt_machine.h"
#include "coordinator/core/turn.h"

namespace muster::coordinator {
namespace {

// The smaller of two losses; 0 and what is not finite is none.
double Best(double known, double reported) {
  if (!std::isfinite(reported) || reported == 0) return known;
  return known == 0 ? reported : std::min(known, reported);
}

constexpr size_t kPhaseBytesMax = 32;
// The median of step times is computed anew at most this often, unless the gang is small.
constexpr absl::Duration kMedianInterval = absl::Seconds(1);
constexpr int kSmallGang = 64;

double MedianStepSeconds(const std::vector<v1::RankProgress>& reports) {
  std::vector<double> values;
  for (const v1::RankProgress& report : reports) {
    if (report.step() > 0 && report.step_seconds() > 0) values.push_back(report.step_seconds());
  }
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Gang::Gang(const v1::AttemptRow& attempt, absl::Time now)
    : reports_(static_cast<size_t>(attempt.placements_size())),
      answered_(static_cast<size_t>(attempt.placements_size()), now),
      slow_ranks_(attempt.placements_size()) {
  for (const v1::Placement& placement : attempt.placements()) {
    v1::RankStatus& rank = ranks_.emplace_back();
    if (placement.rank() < attempt.ranks_size()) rank = attempt.ranks(placement.rank());
    rank.set_rank(placement.rank());
    rank.set_worker(placement.worker());
    rank.set_device(placement.device());
    rank.set_host(placement.host());
    rank.set_address(placement.address());
    if (rank.state() == v1::RANK_STATE_UNSPECIFIED) rank.set_state(v1::RANK_STATE_ASSIGNED);
    Count(rank.state(), 1);
    std::vector<int32_t>& there = by_worker_[placement.worker()];
    group_ranks_.push_back(there.empty() ? static_cast<int32_t>(by_worker_.size()) - 1
                                         : group_ranks_[static_cast<size_t>(there.front())]);
    there.push_back(placement.rank());
  }
}

const std::vector<int32_t>& Gang::On(const std::string& worker) const {
  static const auto* const none = new std::vector<int32_t>();
  const auto found = by_worker_.find(worker);
  return found == by_worker_.end() ? *none : found->second;
}

bool Gang::AllAtLeast(v1::RankState least) const {
  int there = 0;
  for (size_t state = static_cast<size_t>(least); state < by_state_.size(); ++state) {
    there += by_state_[state];
  }
  return there == size();
}

void Gang::SetState(int rank, v1::RankState state) {
  v1::RankStatus& status = ranks_[static_cast<size_t>(rank)];
  Count(status.state(), -1);
  status.set_state(state);
  Count(state, 1);
  changed_ = true;
}

void Gang::SetPid(int rank, int64_t pid) {
  if (ranks_[static_cast<size_t>(rank)].pid() == pid) return;
  ranks_[static_cast<size_t>(rank)].set_pid(pid);
  changed_ = true;
}

bool Gang::AddExit(int rank, v1::RankExit exit) {
  const auto [entry, first] = exits_.emplace(rank, std::move(exit));
  if (!first) return false;
  if (entry->second.cause() == v1::CAUSE_COMPLETED) {
    ++completed_;
  } else {
    failed_.insert(rank);
  }
  return true;
}

Gang::Report Gang::Take(int rank, const v1::RankProgress& report, absl::Time now,
                        const ProgressView& job) {
  v1::RankProgress& known = reports_[static_cast<size_t>(rank)];
  if (report.step() < known.step()) return Report::kOlder;
  const bool other_phase = report.phase() != known.phase();
  if (report.step() > known.step() || other_phase) {
    advanced_at_ = answered_[static_cast<size_t>(rank)] = now;
  } else if (report.answers() != known.answers()) {
    answered_[static_cast<size_t>(rank)] = now;
  }
  known = report;
  command_reports_ |= report.reports();
  v1::RankStatus& status = ranks_[static_cast<size_t>(rank)];
  status.set_step(report.step());
  status.set_metrics_address(Bounded(report.metrics_address()));
  if (report.has_times()) {
    *status.mutable_times() = report.times();
    slow_ranks_.Add(rank, report.times(), now);
  }
  if (report.has_memory()) *status.mutable_memory() = report.memory();
  changed_ = true;

  bool changed = false;
  if (rank == 0) {
    // Bounded, since every answer about the job carries this text of a rank.
    const std::string phase = report.phase().substr(0, kPhaseBytesMax);
    changed = phase != job.phase;
    job.phase = phase;
  }
  if (report.losses_size() > 0 && (with_points_ < 0 || rank < with_points_)) with_points_ = rank;
  if (report.step() <= 0) return changed ? Report::kChanged : Report::kSame;
  if (front_ < 0 || rank == front_ || report.step() > reports_[front_].step() ||
      (report.step() == reports_[front_].step() && rank < front_)) {
    front_ = rank;
    changed |= FoldFront(job);
  }
  if (rank == with_points_ && report.losses_size() > 0) changed |= job.curve.Merge(report.losses());
  if (size() <= kSmallGang || (changed && now - median_at_ >= kMedianInterval)) {
    median_at_ = now;
    job.stored.set_step_seconds(MedianStepSeconds(reports_));
  }
  return changed ? Report::kChanged : Report::kSame;
}

// The job is as far as the rank that is furthest.
bool Gang::FoldFront(const ProgressView& job) {
  const v1::RankProgress& front = reports_[static_cast<size_t>(front_)];
  v1::ProgressRow& stored = job.stored;
  // A rank that has just restored a checkpoint has a step but no loss of its own yet.
  const double train_loss = front.train_loss() != 0 ? front.train_loss() : stored.train_loss();
  const bool changed = front.step() != stored.step() || train_loss != stored.train_loss() ||
                       front.tokens_per_second() != stored.tokens_per_second();
  if (front.step() < stored.step()) job.curve.DropAfter(front.step());
  // Rank 0 of the engine reports points, which another one may be ahead of. Of a command, and of
  // ranks of older versions, which report none, the curve is made of what is known when.
  const bool makes_curve = with_points_ < 0 && (front_ == 0 || command_reports_);
  if (changed && makes_curve && front.train_loss() != 0) {
    job.curve.AddTrainLoss(front.step(), front.train_loss(), job.steps);
  }
  stored.set_step(front.step());
  stored.set_train_loss(train_loss);
  stored.set_best_train_loss(Best(stored.best_train_loss(), front.train_loss()));
  stored.set_tokens_per_second(front.tokens_per_second());
  stored.set_model_flops_utilization(front.model_flops_utilization());
  stored.set_hardware_flops_utilization(front.hardware_flops_utilization());
  stored.set_consumed_tokens(front.consumed_tokens() > 0
                                 ? front.consumed_tokens()
                                 : front.consumed_samples() * job.sequence_length);
  stored.set_steps(front.steps());
  return changed;
}

void Gang::ForgivePause(absl::Duration away, absl::Time now) {
  for (absl::Time& time : answered_) time = std::min(now, time + away);
  advanced_at_ = std::min(now, advanced_at_ + away);
}

std::vector<v1::RankRun> Gang::Gone() const {
  std::vector<v1::RankRun> runs;
  for (const v1::RankStatus& rank : ranks_) {
    if (!HasEnded(rank.state())) continue;
    if (!runs.empty() && runs.back().state() == rank.state() &&
        runs.back().first() + runs.back().count() == rank.rank()) {
      runs.back().set_count(runs.back().count() + 1);
      continue;
    }
    v1::RankRun& run = runs.emplace_back();
    run.set_first(rank.rank());
    run.set_count(1);
    run.set_state(rank.state());
  }
  return runs;
}

void Gang::RecoverGone(const v1::RankRun& run) {
  for (int32_t rank = run.first(); rank < run.first() + run.count() && Has(rank); ++rank) {
    SetState(rank, run.state());
  }
}

bool AddEvaluation(int64_t step, double loss, v1::ProgressRow& progress, LossCurve& curve) {
  if (!curve.AddEvaluation(step, loss, progress.train_loss())) return false;
  progress.set_best_validation_loss(Best(progress.best_validation_loss(), loss));
  // The loss of an evaluation that arrives late must not replace that of a newer one.
  if (curve.IsNewestEvaluation(step)) progress.set_validation_loss(loss);
  return true;
}

}  // namespace muster::coordinator
