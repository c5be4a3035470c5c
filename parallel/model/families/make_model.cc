#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/context/context_attention.h"
#include "parallel/context/scan_by_heads.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/model/model.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

absl::Status CheckParts(const ModelParallel& parallel, int64_t blocks) {
  for (const BlockRange& part : parallel.parts) {
    const int64_t end = part.end < 0 ? blocks : part.end;
    if (part.begin < 0 || part.begin >= end || end > blocks) {
      return absl::InvalidArgumentError(absl::StrCat("blocks ", part.begin, " to ", end,
                                                     " (embedding and head counted) are no "
                                                     "part of a model of ",
                                                     blocks, " blocks"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSplit(const ModelParallel& parallel) {
  if (parallel.recompute_blocks > 0 && parallel.offload_activations) {
    return absl::InvalidArgumentError(absl::StrCat(
        "offload.activations takes what every block keeps by turns into the same memory, but ",
        parallel.recompute_blocks,
        " blocks (recompute_blocks) keep less than the others; use "
        "recompute_blocks 0"));
  }
  if (parallel.split_backward && parallel.offload_activations) {
    return absl::InvalidArgumentError(
        "a backward in two parts (schedule zero_bubble) leaves gradients in the place of "
        "activations, which offload.activations brings from the host once; use schedule 1f1b, "
        "gpipe or interleaved");
  }
  if (!parallel.split_backward || parallel.recompute == Recompute::kNone) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a backward in two parts (schedule zero_bubble) puts the gradients of weights off and keeps "
      "the activations that they need, which recompute gives up; use recompute none or schedule "
      "1f1b");
}

// Whether the context ranks can share the heads of every tensor rank, so that all ranks refuse
// alike. Requires: CheckTensorParallel().
absl::Status CheckContext(const ModelParallel& parallel, int64_t sequence, const SplitList& units) {
  if (parallel.context_size == 1) return absl::OkStatus();
  // Checks the longest sequence; shorter ones are checked where they are known.
  const int64_t chunks = 2 * parallel.context_size;
  ModelParallel place = parallel;
  for (int rank = 0; rank < parallel.tensor_size; ++rank) {
    place.tensor_rank = rank;
    const TensorShard held = TensorShard::Make(place, units);
    absl::Status status;
    if (held.heads().size() > 0) {
      status = Validate(ContextShape{parallel.context_method, parallel.context_size, /*batch=*/1,
                                     std::max<int64_t>(1, sequence / chunks) * chunks,
                                     held.heads().size(), held.kv_heads().size(), /*width=*/1});
    }
    if (status.ok() && held.ssm_heads().size() > 0 &&
        parallel.scan_method == ScanMethod::kAllToAll) {
      status = Validate(HeadsShape{.ranks = parallel.context_size,
                                   .heads = held.ssm_heads().size(),
                                   .groups = held.ssm_groups().size()});
    }
    if (status.ok()) continue;
    return parallel.tensor_size == 1 ? status
                                     : Annotate(status, absl::StrCat("tensor-parallel rank ", rank,
                                                                     " of ", parallel.tensor_size));
  }
  return absl::OkStatus();
}

}  // namespace

const ModelFamily* FindFamily(absl::string_view name) {
  for (const ModelFamily* family : Families()) {
    if (family->name == name) return family;
  }
  return nullptr;
}

absl::StatusOr<LanguageModelConfig> FindConfig(const ModelDescription& description) {
  const ModelFamily* family = FindFamily(description.family);
  if (family != nullptr) return family->config(description);
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown model family '", description.family,
      "'; known: ", absl::StrJoin(Families(), ", ", [](std::string* out, const ModelFamily* known) {
        absl::StrAppend(out, known->name);
      })));
}

LanguageModelConfig ConfigOf(const ModelDescription& description) {
  auto config = FindConfig(description);
  CHECK_OK(config);
  return *std::move(config);
}

int64_t SizeOf(const ModelDescription& description, const std::string& name) {
  const auto found = description.sizes.find(name);
  CHECK(found != description.sizes.end()) << description.family << " has no size " << name;
  return found->second;
}

namespace {

absl::StatusOr<std::unique_ptr<Model>> Build(const LanguageModelConfig& config,
                                             const ModelDescription& description,
                                             const ModelParallel& parallel) {
  if (!(parallel.dropout >= 0 && parallel.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dropout ", parallel.dropout, " is not a probability from 0 to less than 1"));
  }
  const SplitList units = SplitOf(config);
  RETURN_IF_ERROR(CheckParts(parallel, static_cast<int64_t>(config.blocks.size()) + 2));
  RETURN_IF_ERROR(CheckSplit(parallel));
  RETURN_IF_ERROR(CheckTensorParallel(parallel, units));
  RETURN_IF_ERROR(CheckContext(parallel, config.sequence_length, units));
  return MakeLanguageModel(config, description, parallel);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelFamily& family,
                                                 const ModelDescription& description,
                                                 const ModelParallel& parallel) {
  ASSIGN_OR_RETURN(const LanguageModelConfig config, family.config(description));
  return Build(config, description, parallel);
}

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelDescription& description,
                                                 const ModelParallel& parallel) {
  ASSIGN_OR_RETURN(const LanguageModelConfig config, FindConfig(description));
  return Build(config, description, parallel);
}

absl::StatusOr<std::unique_ptr<Model>> MakeModelOfKinds(const ModelDescription& description,
                                                        const ModelParallel& parallel) {
  ASSIGN_OR_RETURN(LanguageModelConfig config, FindConfig(description));
  decltype(config.blocks) kinds;
  for (const int first : KindsOfBlocks(config).first_block) kinds.push_back(config.blocks[first]);
  config.blocks = std::move(kinds);
  return Build(config, description, parallel);
}

}  // namespace muster::parallel
