#include "proto/spec/elastic.h"

#include <algorithm>

#include "parallel/plan/validate.h"
#include "proto/spec/spec.h"

namespace muster::spec {
namespace {

// Ranks of one data-parallel replica.
int64_t ReplicaOf(const v1::ParallelSpec& parallel) {
  const __int128 ranks = static_cast<__int128>(std::max(1, parallel.pipeline())) *
                         std::max(1, parallel.context()) * std::max(1, parallel.tensor());
  return static_cast<int64_t>(std::min<__int128>(ranks, INT32_MAX));
}

bool Allows(const v1::JobSpec& spec, int64_t replica, int64_t ranks) {
  const int64_t segment = spec.placement().segment();
  if (segment > 0 && ranks % segment != 0) return false;
  if (!spec.has_engine()) return true;
  const v1::TrainingSpec& training = spec.engine().training();
  const int64_t data = ranks / replica;
  // Most sizes are excluded by this rule, which costs less than to look at all.
  if (training.micro_batch() < 1) return false;
  const int64_t micro_batches = training.global_batch() / training.micro_batch();
  if (micro_batches < 1 || micro_batches % data != 0) return false;
  parallel::Layout layout = LayoutOf(spec);
  layout.degrees[parallel::Axis::kData] = static_cast<int>(data);
  return parallel::FindProblems(layout, SizeOf(spec.engine().model()),
                                {.ranks = static_cast<int>(ranks)})
      .empty();
}

}  // namespace

std::vector<int32_t> SizesOf(const v1::JobSpec& spec) {
  if (!IsElastic(spec)) return {spec.resources().ranks()};
  const v1::RankRange& range = spec.resources().rank_range();
  const int64_t step = spec.has_engine() ? ReplicaOf(spec.engine().parallel()) : 1;
  std::vector<int32_t> sizes;
  // Of a range that Validate refuses nothing is looked for: defaults are given to such specs, too.
  if (range.min() < 1 || range.max() < range.min() || range.max() > kElasticRanksMax) return sizes;
  for (int64_t ranks = (range.min() + step - 1) / step * step;
       ranks <= range.max() && static_cast<int>(sizes.size()) <= kSizesMax; ranks += step) {
    if (Allows(spec, step, ranks)) sizes.push_back(static_cast<int32_t>(ranks));
  }
  return sizes;
}

v1::JobSpec AtSize(const v1::JobSpec& spec, int32_t ranks) {
  v1::JobSpec out = spec;
  if (!IsElastic(spec)) return out;
  out.mutable_resources()->clear_rank_range();
  out.mutable_resources()->set_ranks(ranks);
  if (!out.has_engine()) return out;
  v1::ParallelSpec& parallel = *out.mutable_engine()->mutable_parallel();
  parallel.set_data(static_cast<int32_t>(std::max<int64_t>(1, ranks / ReplicaOf(parallel))));
  return out;
}

v1::JobSpec OneReplica(const v1::JobSpec& spec) {
  return AtSize(spec, static_cast<int32_t>(ReplicaOf(spec.engine().parallel())));
}

bool ResizesWhileRunning(const v1::JobSpec& spec) {
  if (!IsElastic(spec)) return false;
  return spec.has_engine() ? spec.has_checkpoint() : spec.resources().rank_range().resumes();
}

}  // namespace muster::spec
