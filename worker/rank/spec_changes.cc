#include "worker/rank/spec_changes.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "parallel/model/model.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_spec.h"

namespace muster::worker {
namespace {

// Estimates of what offloading the optimizer costs (docs/benchmarks/results.md): the time of
// AdamW on a host of 16 cores, the arithmetic that a GPU does meanwhile, and the share of the
// host's time that a step does not hide.
constexpr double kHostSecondsPerElement = 0.35e-9;
constexpr double kDeviceFlops = 400e12;
constexpr double kHostExposed = 0.5;
// The share of a step that even the smallest offload takes, for its copies.
constexpr double kOffloadLeast = 0.03;

const char* Name(v1::Recompute recompute) {
  return recompute == v1::RECOMPUTE_FULL ? "full" : "selective";
}

// How much longer a step takes than its work, for the bubble of the pipeline.
double PipelineFactor(int64_t stages, int64_t micro_batches) {
  return 1 +
         static_cast<double>(stages - 1) / static_cast<double>(std::max<int64_t>(1, micro_batches));
}

class Search {
 public:
  Search(const v1::JobSpec& spec, bool less_offload) : spec_(spec), less_offload_(less_offload) {
    const auto model = parallel::MakeModel(Describe(spec.engine().model()));
    if (!model.ok()) return;
    const double tokens = static_cast<double>(spec.engine().training().global_batch()) *
                          static_cast<double>(spec.engine().model().sequence_length());
    const double seconds = static_cast<double>((*model)->training_flops_per_token()) * tokens /
                           spec.resources().ranks() / kDeviceFlops;
    offload_cost_ = kHostExposed * kHostSecondsPerElement *
                    static_cast<double>((*model)->parameters().elements()) / seconds;
  }

  std::vector<SpecChange> All() {
    for (const int more_tensor : {1, 2, 4, 8}) {
      for (const int more_pipeline : {1, 2, 4, 8}) Layout(more_tensor, more_pipeline);
    }
    std::stable_sort(found_.begin(), found_.end(), [](const SpecChange& a, const SpecChange& b) {
      return std::make_pair(a.slowdown, a.settings.size()) <
             std::make_pair(b.slowdown, b.settings.size());
    });
    return std::move(found_);
  }

 private:
  void Layout(int more_tensor, int more_pipeline) {
    const v1::ParallelSpec& before = spec_.engine().parallel();
    const int taken = more_tensor * more_pipeline;
    if (before.data() % taken != 0) return;
    SpecChange candidate = {spec_, {}, 1, {++choices_}};
    v1::ParallelSpec& after = *candidate.spec.mutable_engine()->mutable_parallel();
    after.set_tensor(before.tensor() * more_tensor);
    after.set_pipeline(before.pipeline() * more_pipeline);
    after.set_data(before.data() / taken);
    if (after.zero_shards() > after.data() * after.context()) after.set_zero_shards(0);
    if (more_tensor > 1) {
      candidate.settings.push_back(absl::StrCat("engine.parallel.tensor=", after.tensor()));
      if (!before.tensor_shares().empty()) {
        after.clear_tensor_shares();
        candidate.settings.push_back("engine.parallel.tensor_shares=null");
      }
      if (!after.sequence()) {
        after.set_sequence(true);
        candidate.settings.push_back("engine.parallel.sequence=true");
      }
    }
    if (more_pipeline > 1) {
      candidate.settings.push_back(absl::StrCat("engine.parallel.pipeline=", after.pipeline()));
    }
    // pipeline_blocks has one number for each stage.
    if (more_pipeline > 1 && !before.pipeline_blocks().empty()) {
      after.clear_pipeline_blocks();
      candidate.settings.push_back("engine.parallel.pipeline_blocks=null");
    }
    if (taken > 1) {
      candidate.settings.push_back(absl::StrCat("engine.parallel.data=", after.data()));
    }
    for (int doubled = 1; doubled < more_tensor; doubled *= 2) candidate.slowdown *= 1.08;
    Batches(candidate);
  }

  void Batches(const SpecChange& from) {
    const v1::ParallelSpec& before = spec_.engine().parallel();
    double slowdown = from.slowdown;
    for (int64_t size = from.spec.engine().training().micro_batch();; size /= 2) {
      SpecChange candidate = from;
      v1::TrainingSpec& training = *candidate.spec.mutable_engine()->mutable_training();
      if (size != training.micro_batch()) {
        candidate.settings.push_back(absl::StrCat("engine.training.micro_batch=", size));
      }
      const auto steps = [](const v1::TrainingSpec& of, const v1::ParallelSpec& split) {
        return of.global_batch() / std::max<int64_t>(1, of.micro_batch() * split.data());
      };
      const double pipeline_before =
          PipelineFactor(before.pipeline(), steps(spec_.engine().training(), before));
      training.set_micro_batch(size);
      const v1::ParallelSpec& after = candidate.spec.engine().parallel();
      candidate.slowdown =
          slowdown * PipelineFactor(after.pipeline(), steps(training, after)) / pipeline_before;
      candidate.path.push_back(++choices_);
      Zero(candidate);
      if (size % 2 != 0) return;
      slowdown *= 1.04;
    }
  }

  void Zero(const SpecChange& from) {
    const v1::ParallelSpec& split = from.spec.engine().parallel();
    for (int stage = split.zero(); stage <= 3; ++stage) {
      if (stage > split.zero() && split.data() * split.context() == 1) return;
      SpecChange candidate = from;
      if (stage != split.zero()) {
        candidate.spec.mutable_engine()->mutable_parallel()->set_zero(stage);
        candidate.settings.push_back(absl::StrCat("engine.parallel.zero=", stage));
        constexpr std::array<double, 4> kFactors = {1, 1, 1.01, 1.05};
        candidate.slowdown *= kFactors[stage] / kFactors[split.zero()];
      }
      candidate.path.push_back(++choices_);
      Recompute(candidate);
    }
  }

  void Recompute(const SpecChange& from) {
    const v1::TrainingSpec& given = from.spec.engine().training();
    const v1::Recompute before = given.recompute();
    for (const v1::Recompute after :
         {v1::RECOMPUTE_NONE, v1::RECOMPUTE_SELECTIVE, v1::RECOMPUTE_FULL}) {
      if (after < before) continue;
      SpecChange candidate = from;
      v1::TrainingSpec& training = *candidate.spec.mutable_engine()->mutable_training();
      if (after != before) {
        training.set_recompute(after);
        candidate.settings.push_back(absl::StrCat("engine.training.recompute=", Name(after)));
        candidate.slowdown *= RecomputeFactor(after) / RecomputeFactor(before);
      }
      Offload(candidate);
      // Where the spec recomputes some blocks only: recompute all of them.
      if (given.recompute_blocks() == 0 || after == v1::RECOMPUTE_NONE) continue;
      training.set_recompute_blocks(0);
      candidate.settings.push_back("engine.training.recompute_blocks=0");
      if (after == before) candidate.slowdown *= 1 + (RecomputeFactor(after) - 1) / 2;
      Offload(std::move(candidate));
    }
  }

  void Offload(SpecChange from) {
    from.path.push_back(0);
    Keep(from);
    Order(from);
    if (from.spec.resources().device() != v1::DEVICE_KIND_CUDA) return;
    const v1::ParallelSpec& split = from.spec.engine().parallel();
    const double before = split.offload().optimizer();
    int64_t parts = int64_t{split.tensor()} * split.pipeline();
    if (split.zero() > 0) {
      parts *= split.zero_shards() > 0 ? split.zero_shards() : split.data() * split.context();
    }
    for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      if (share == before || (share < before && !less_offload_)) continue;
      SpecChange candidate = from;
      candidate.spec.mutable_engine()->mutable_parallel()->mutable_offload()->set_optimizer(share);
      candidate.settings.push_back(absl::StrCat("engine.parallel.offload.optimizer=", share));
      const double cost = offload_cost_ / static_cast<double>(parts);
      const auto factor = [&](double of) { return of > 0 ? 1 + kOffloadLeast + cost * of : 1; };
      candidate.slowdown *= factor(share) / factor(before);
      candidate.path.back() = 1 + static_cast<int>(4 * share);
      Keep(candidate);
      Order(std::move(candidate));
    }
  }

  // Adds gradients of all micro-batches up in one buffer, which takes no more time. But the sums
  // then depend on the layout in their last bits, so it counts as a small cost.
  void Order(SpecChange candidate) {
    v1::TrainingSpec& training = *candidate.spec.mutable_engine()->mutable_training();
    const int64_t at_once = training.micro_batch() * candidate.spec.engine().parallel().data();
    if (training.any_order() || training.global_batch() <= at_once) return;
    training.set_any_order(true);
    candidate.settings.push_back("engine.training.any_order=true");
    candidate.slowdown *= 1.005;
    Keep(std::move(candidate));
  }

  void Keep(SpecChange candidate) {
    if (candidate.settings.empty() || !spec::Validate(candidate.spec).ok()) return;
    candidate.number = static_cast<int>(found_.size());
    found_.push_back(std::move(candidate));
  }

  const v1::JobSpec& spec_;
  const bool less_offload_;
  // The exposed time of the optimizer on one host, of all parameters, over a step's time.
  double offload_cost_ = 0;
  int choices_ = 0;  // the last number given out for SpecChange::path
  std::vector<SpecChange> found_;
};

}  // namespace

double RecomputeFactor(v1::Recompute mode) {
  return mode == v1::RECOMPUTE_FULL ? 1.30 : mode == v1::RECOMPUTE_SELECTIVE ? 1.02 : 1.0;
}

std::vector<SpecChange> SpecChanges(const v1::JobSpec& spec, bool less_offload) {
  return Search(spec, less_offload).All();
}

}  // namespace muster::worker
