// Decides whether a layout of a training run can work: every rule in one place, for the job spec,
// for ranks and for planners. Pure.
#ifndef MUSTER_PARALLEL_PLAN_VALIDATE_H_
#define MUSTER_PARALLEL_PLAN_VALIDATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "parallel/mesh/mesh.h"

namespace muster::parallel {

// A way to split a training run.
struct Layout {
  PerAxis degrees{1, 1, 1, 1};
  bool sequence_parallel = false;  // within tensor groups
  bool tensor_chunks = false;      // tensor_overlap: chunked
  bool tensor_halves = false;      // tensor_overlap: halves
  int pipeline_chunks = 1;         // virtual stages per pipeline rank
  bool interleaved = false;        // schedules that need several pipeline stages
  bool zero_bubble = false;
  int pipeline_parts = 0;        // how many numbers pipeline_blocks has; 0: it is not given
  bool all_to_all = false;       // among context ranks
  bool scan_all_to_all = false;  // the same for state-space mixers
  int tensor_shares = 0;         // how many numbers tensor_shares has; 0: shares are equal
  int zero = 0;                  // stage of ZeRO
  int zero_shards = 0;           // ranks it shards over; 0: all of data x context
  int64_t global_batch = 0;      // samples
  int64_t micro_batch = 0;
  // Gradient compression: share of the elements that is sent as pairs of index and value, 0 = none;
  // or one bit per element.
  double top_k_density = 0;
  bool sign_compression = false;
  // Axes whose degrees a suggestion may change.
  std::vector<Axis> negotiable = {kAxes.begin(), kAxes.end()};
  // Ranks over which ZeRO shards in effect; 1 without ZeRO.
  int EffectiveShards() const;
  // Ranks over which gradients are averaged.
  int64_t GradientRanks() const { return int64_t{degrees[Axis::kData]} * degrees[Axis::kContext]; }
};

// The share of elements above which sending pairs of index and value takes longer than reducing the
// whole gradient, over links that are slow compared to memory. Per element and rank, reducing the
// whole gradient of n ranks sends 2 (n - 1) / n x 4 bytes (half of that with ZeRO-1), and pairs are
// density x (n - 1) x 8 bytes: as many at 1 / n. The limit is two thirds of that, which allows for
// selection and for n - 1 messages instead of a ring.
double TopKDensityMax(int64_t ranks, int zero);
// The same for one bit per element, in ranks: (n - 1) / 8 bytes.
int64_t SignRanksMax(int zero);

struct ModelSize {
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t sequence = 0;    // tokens
  int64_t kv_heads = 0;    // 0: as many as heads
  int64_t ffn = 0;         // columns of the MLP; 0: not judged
  int64_t vocab = 0;       // 0: not judged
  int64_t ssm_heads = 0;   // of state-space mixers; 0: not judged
  int64_t ssm_groups = 0;  // of these heads; 0: not judged
};

struct ClusterSize {
  int ranks = 0;
};

struct LayoutProblem {
  // As in a job spec, e.g. "engine.parallel.zero".
  std::string field;
  std::string message;  // with the numbers
};

// Returns every rule that is broken; none when the layout works. Accepts any numbers: impossible
// ones (0, negative) are problems too. When the degrees do not match the ranks, the message ends
// with the nearest ones that do, if there are any.
std::vector<LayoutProblem> FindProblems(const Layout& layout, const ModelSize& model,
                                        const ClusterSize& cluster);

// FindProblems as a status: kInvalidArgument with one "field: message" per line.
absl::Status Validate(const Layout& layout, const ModelSize& model, const ClusterSize& cluster);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PLAN_VALIDATE_H_
