// What sets one family of models apart. Everything else works on Model and is the same for all.
// A family is one file that defines a ModelFamily, its line in Families(), and its layout in
// parallel/interop.
#ifndef MUSTER_PARALLEL_MODEL_FAMILY_H_
#define MUSTER_PARALLEL_MODEL_FAMILY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "parallel/model/model.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// Attention of a model, the same in all its blocks. heads is 0 in a model without.
struct AttentionSizes {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t depth = 0;  // width of a head
};

// State-space mixers of a model, the same in all its blocks. heads is 0 in a model without.
struct ScanSizes {
  int64_t heads = 0;
  int64_t head_width = 0;
  int64_t groups = 0;
  int64_t state = 0;
  int64_t taps = 0;  // of the convolution
};

struct ModelFamily {
  const char* name;  // ModelDescription::family
  // kInvalidArgument names the size, number or flag that is missing, unknown or impossible, or the
  // part of `parallel` that the model cannot be cut by.
  absl::StatusOr<std::unique_ptr<Model>> (*make)(const ModelDescription& description,
                                                 const ModelParallel& parallel);
  // The functions below require a description that `make` takes.
  AttentionSizes (*attention)(const ModelDescription& description);
  ScanSizes (*scan)(const ModelDescription& description);
  SplitSizes (*split)(const ModelDescription& description);
  // Multiply-adds per token of every block between embedding and head, forward.
  std::vector<double> (*block_costs)(const ModelDescription& description);
  // Pairs of a column-parallel and a row-parallel GEMM in a block (tensor_parallel.h).
  int pairs_per_block;
  // Numbers per token that a block sums over a tensor group of `ranks`, once forward and once
  // backward, beside hidden states.
  int64_t (*sums_per_token)(const ModelDescription& description, int ranks);
  // Whether the model has a table of positions, so that it cannot read longer sequences.
  bool learned_positions;
};

inline ScanSizes NoScan(const ModelDescription& /*description*/) { return {}; }
inline int64_t NoSums(const ModelDescription& /*description*/, int /*ranks*/) { return 0; }

extern const ModelFamily kGpt2Family, kLlamaFamily, kMamba2Family;

absl::Span<const ModelFamily* const> Families();
// Null for an unknown name.
const ModelFamily* FindFamily(absl::string_view name);
// Requires: a description that MakeModel takes.
const ModelFamily& FamilyOf(const ModelDescription& description);

// A size of a description that MakeModel takes.
int64_t SizeOf(const ModelDescription& description, const std::string& name);

// Checks that are the same for every family with `layers` blocks between embedding and head.
absl::Status CheckStages(const ModelParallel& parallel, int64_t layers);
// Whether the context ranks can share the heads of every tensor rank, so that all ranks refuse
// alike. Requires: CheckTensorParallel().
absl::Status CheckContext(const ModelParallel& parallel, int64_t sequence, const SplitSizes& sizes);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILY_H_
