#include "worker/rank/plan_advice.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/spec_changes.h"
#include "worker/rank/stage_blocks.h"

namespace muster::worker {
namespace {

// Predictions of one search, which bound its time to a few seconds.
constexpr int kTriesMax = 2000;

// The least imbalance of memory that is worth a change, and the least share that a change must
// save.
constexpr double kImbalanceMin = 0.05;

using Fits = absl::FunctionRef<bool(const JobPlan&)>;

// `change` of `spec`, whose plan fits; recomputation that it adds narrowed, by bisection, to as few
// blocks as fit.
PlannedChange WithFewestBlocks(const v1::JobSpec& spec, SpecChange change, JobPlan plan,
                               Fits fits) {
  const v1::TrainingSpec& before = spec.engine().training();
  const v1::TrainingSpec& training = change.spec.engine().training();
  const bool adds = training.recompute() != before.recompute() ||
                    training.recompute_blocks() != before.recompute_blocks();
  int all = 0;
  for (const RankPlan& rank : plan.ranks) all = std::max(all, rank.blocks);
  const double dearest = change.slowdown, cost = RecomputeFactor(training.recompute());
  PlannedChange best = {change.settings, dearest, std::move(plan)};
  if (!adds || training.recompute() == v1::RECOMPUTE_NONE || training.recompute_blocks() != 0) {
    return best;
  }
  for (int too_few = 0, enough = all; enough - too_few > 1;) {
    const int blocks = (too_few + enough) / 2;
    change.spec.mutable_engine()->mutable_training()->set_recompute_blocks(blocks);
    absl::StatusOr<JobPlan> fewer = absl::UnknownError("");
    if (spec::Validate(change.spec).ok()) fewer = PlanJob(change.spec);
    if (!fewer.ok() || !fits(*fewer)) {
      too_few = blocks;
      continue;
    }
    enough = blocks;
    best.settings = change.settings;
    best.settings.erase(std::remove(best.settings.begin(), best.settings.end(),
                                    "engine.training.recompute_blocks=0"),
                        best.settings.end());
    best.settings.push_back(absl::StrCat("engine.training.recompute_blocks=", blocks));
    best.slowdown = dearest / cost * (1 + (cost - 1) * blocks / all);
    best.plan = *std::move(fewer);
  }
  return best;
}

// Which groups of changes cannot fit because even their smallest one does not.
class HopelessGroups {
 public:
  // Of the changes with a common prefix of `path` the last one needs the least device memory.
  HopelessGroups(const std::vector<SpecChange>& changes, int64_t bytes) : bytes_(bytes) {
    for (const SpecChange& change : changes) {
      for (std::vector<int> prefix = change.path; !prefix.empty(); prefix.pop_back()) {
        const SpecChange*& known = least_[prefix];
        if (known == nullptr || known->number < change.number) known = &change;
      }
    }
  }

  // Whether some group that has `path` is hopeless. Adds the predictions that it makes to `tries`.
  bool Have(const std::vector<int>& path, int& tries) {
    std::vector<int> prefix;
    for (const int number : path) {
      prefix.push_back(number);
      const auto [entry, first] = hopeless_.try_emplace(prefix, false);
      if (first) {
        ++tries;
        const absl::StatusOr<JobPlan> plan = PlanJob(least_[prefix]->spec);
        entry->second = !plan.ok() || plan->needed_bytes() > bytes_;
      }
      if (entry->second) return true;
    }
    return false;
  }

 private:
  const int64_t bytes_;
  // By prefix of SpecChange::path.
  std::map<std::vector<int>, const SpecChange*> least_;
  std::map<std::vector<int>, bool> hopeless_;
};

}  // namespace

std::optional<PlannedChange> CheapestFit(const v1::JobSpec& spec, int64_t bytes,
                                         int64_t host_bytes) {
  const bool cuda = DeviceKindOf(spec) == kernels::DeviceKind::kCuda;
  const auto fits = [&](const JobPlan& plan) {
    return plan.needed_bytes() <= bytes && (!cuda || plan.host_bytes() <= host_bytes);
  };
  const absl::StatusOr<JobPlan> now = PlanJob(spec);
  std::vector<SpecChange> changes =
      SpecChanges(spec, now.ok() && cuda && now->host_bytes() > host_bytes);
  if (std::optional<SpecChange> moved = BlockMover(spec).Within(bytes); moved.has_value()) {
    const auto dearer = std::find_if(changes.begin(), changes.end(), [&](const SpecChange& change) {
      return change.slowdown > moved->slowdown;
    });
    changes.insert(dearer, *std::move(moved));
  }
  HopelessGroups hopeless(changes, bytes);
  int tries = 0;
  for (SpecChange& change : changes) {
    if (hopeless.Have(change.path, tries)) continue;
    if (++tries > kTriesMax) break;
    absl::StatusOr<JobPlan> plan = PlanJob(change.spec);
    if (!plan.ok() || !fits(*plan)) continue;
    return WithFewestBlocks(spec, std::move(change), *std::move(plan), fits);
  }
  return std::nullopt;
}

std::optional<PlannedChange> EvenMemory(const v1::JobSpec& spec, const JobPlan& plan) {
  if (plan.imbalance() < kImbalanceMin) return std::nullopt;
  BlockMover mover(spec);
  std::optional<PlannedChange> best;
  auto enough = static_cast<double>(plan.needed_bytes());
  double too_little = enough / (1 + plan.imbalance());  // the mean
  while (enough - too_little > kImbalanceMin / 8 * enough) {
    const double bytes = (enough + too_little) / 2;
    std::optional<SpecChange> moved = mover.Within(static_cast<int64_t>(bytes));
    absl::StatusOr<JobPlan> after;
    if (moved.has_value()) after = PlanJob(moved->spec);
    if (!moved.has_value() || !after.ok()) {
      too_little = bytes;
      continue;
    }
    enough = std::min(bytes, static_cast<double>(after->needed_bytes()));
    best = PlannedChange{std::move(moved->settings), moved->slowdown, *std::move(after)};
  }
  const auto saved =
      best.has_value() ? static_cast<double>(plan.needed_bytes() - best->plan.needed_bytes()) : 0.0;
  if (saved < kImbalanceMin * static_cast<double>(plan.needed_bytes())) return std::nullopt;
  return best;
}

std::string EvenText(const PlannedChange& change) {
  return absl::StrFormat(
      "%s would even it: %s for the largest rank, about %.0f %% slower by "
      "estimate",
      absl::StrJoin(change.settings, " "), BytesText(change.plan.needed_bytes()),
      std::max(0.0, 100 * (change.slowdown - 1)));
}

std::string AdviceText(const std::optional<PlannedChange>& change) {
  if (!change.has_value()) {
    return "No change of recompute, any_order, zero, micro_batch, tensor, pipeline and "
           "offload.optimizer makes it fit: it needs more ranks, or devices with more memory";
  }
  return absl::StrFormat("%s would fit: %s for the largest rank, about %.0f %% slower by estimate",
                         absl::StrJoin(change->settings, " "),
                         BytesText(change->plan.needed_bytes()),
                         std::max(0.0, 100 * (change->slowdown - 1)));
}

}  // namespace muster::worker
