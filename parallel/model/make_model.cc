#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention/rotary.h"
#include "parallel/model/gpt2.h"
#include "parallel/model/llama.h"
#include "parallel/model/model.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

// The limits of a job spec.
constexpr int64_t kLayersMax = 1024;
constexpr int64_t kHiddenMax = 1 << 20;
constexpr int64_t kFfnMax = 1 << 24;

// Takes values out of a description by name. It remembers the first problem: a value that is
// missing, or one that the family does not know.
class Reader {
 public:
  explicit Reader(const ModelDescription& description) : left_(description) {}

  // Descriptions also come from files, so their products must not overflow.
  int64_t Size(const char* name) {
    const int64_t size = Take(left_.sizes, "size", name, int64_t{0});
    const absl::string_view what = name;
    const int64_t most = what == "layers"   ? kLayersMax
                         : what == "hidden" ? kHiddenMax
                         : what == "ffn"    ? kFfnMax
                                            : std::numeric_limits<int32_t>::max();
    if (size <= most) return size;
    Refuse(absl::StrCat("size '", name, "' is ", size, "; at most ", most));
    return 1;
  }
  int64_t Size(const char* name, int64_t otherwise) {
    return left_.sizes.count(name) > 0 ? Size(name) : otherwise;
  }
  double Number(const char* name) { return Take(left_.numbers, "number", name, 0.0); }
  double Number(const char* name, double otherwise) {
    return left_.numbers.count(name) > 0 ? Number(name) : otherwise;
  }
  bool Flag(const char* name) {
    const auto found = left_.flags.find(name);
    if (found == left_.flags.end()) {
      Refuse(absl::StrCat("flag '", name, "' is missing"));
      return false;
    }
    const bool value = found->second;
    left_.flags.erase(found);
    return value;
  }
  void Require(bool good, const std::string& why) {
    if (!good) Refuse(why);
  }

  // To be called after all values have been taken.
  absl::Status Finish() {
    for (const auto& [name, value] : left_.sizes) Refuse(absl::StrCat("unknown size '", name, "'"));
    for (const auto& [name, value] : left_.numbers) {
      Refuse(absl::StrCat("unknown number '", name, "'"));
    }
    for (const auto& [name, value] : left_.flags) Refuse(absl::StrCat("unknown flag '", name, "'"));
    return status_;
  }

 private:
  template <typename Value>
  Value Take(std::map<std::string, Value>& values, const char* kind, const char* name,
             Value nothing) {
    const auto found = values.find(name);
    if (found == values.end() || !(found->second > nothing) ||
        !std::isfinite(static_cast<double>(found->second))) {
      Refuse(absl::StrCat(kind, " '", name, "' is missing or not positive"));
      return static_cast<Value>(1);
    }
    const Value value = found->second;
    values.erase(found);
    return value;
  }
  void Refuse(const std::string& why) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat("model ", left_.family, ": ", why));
    }
  }

  ModelDescription left_;
  absl::Status status_;
};

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

// Checks the heads of every tensor rank, so that all ranks refuse alike. Requires:
// CheckTensorParallel().
absl::Status CheckContext(const ModelParallel& parallel, int64_t sequence, int64_t heads,
                          int64_t kv_heads, int64_t ffn, int64_t vocab) {
  if (parallel.context_size == 1) return absl::OkStatus();
  // Checks the longest sequence; shorter ones are checked where they are known.
  const int64_t chunks = 2 * parallel.context_size;
  ModelParallel place = parallel;
  for (int rank = 0; rank < parallel.tensor_size; ++rank) {
    place.tensor_rank = rank;
    const TensorShard held = TensorShard::Make(place, heads, kv_heads, ffn, vocab);
    const absl::Status status =
        Validate({parallel.context_method, parallel.context_size, /*batch=*/1,
                  std::max<int64_t>(1, sequence / chunks) * chunks, held.heads.size(),
                  held.kv_heads.size(), /*width=*/1});
    if (status.ok()) continue;
    return parallel.tensor_size == 1 ? status
                                     : Annotate(status, absl::StrCat("tensor-parallel rank ", rank,
                                                                     " of ", parallel.tensor_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> Gpt2FromDescription(const ModelDescription& description,
                                                           const ModelParallel& parallel) {
  Reader reader(description);
  Gpt2Config config;
  config.layers = reader.Size("layers");
  config.hidden = reader.Size("hidden");
  config.heads = reader.Size("heads");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  reader.Require(
      config.hidden % config.heads == 0,
      absl::StrCat("heads (", config.heads, ") does not divide hidden (", config.hidden, ")"));
  RETURN_IF_ERROR(reader.Finish());
  RETURN_IF_ERROR(CheckParts(parallel, config.layers + 2));
  RETURN_IF_ERROR(CheckSplit(parallel));
  RETURN_IF_ERROR(
      CheckTensorParallel(parallel, config.heads, Transformer(config).ffn, config.vocab));
  RETURN_IF_ERROR(CheckContext(parallel, config.sequence_length, config.heads, config.heads,
                               Transformer(config).ffn, config.vocab));
  return MakeGpt2(config, parallel);
}

absl::StatusOr<std::unique_ptr<Model>> LlamaFromDescription(const ModelDescription& description,
                                                            const ModelParallel& parallel) {
  Reader reader(description);
  LlamaConfig config;
  config.layers = reader.Size("layers");
  config.hidden = reader.Size("hidden");
  config.heads = reader.Size("heads");
  config.kv_heads = reader.Size("kv_heads");
  config.ffn = reader.Size("ffn");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.tied = reader.Flag("tied");
  config.norm_epsilon = reader.Number("norm_epsilon");
  config.rope_theta = reader.Number("rope_theta");
  kernels::RotaryScaling& scaling = config.rope_scaling;
  scaling.factor = static_cast<float>(reader.Number("rope_factor", 1));
  scaling.low_frequency_factor = static_cast<float>(reader.Number("rope_low_frequency_factor", 1));
  scaling.high_frequency_factor =
      static_cast<float>(reader.Number("rope_high_frequency_factor", 4));
  scaling.original_context = reader.Size("rope_original_context", 8192);
  reader.Require(
      config.hidden % config.heads == 0,
      absl::StrCat("heads (", config.heads, ") does not divide hidden (", config.hidden, ")"));
  reader.Require(
      config.heads % config.kv_heads == 0,
      absl::StrCat("kv_heads (", config.kv_heads, ") does not divide heads (", config.heads, ")"));
  reader.Require(
      config.hidden / config.heads % 2 == 0,
      absl::StrCat("the width of a head (hidden / heads = ", config.hidden / config.heads,
                   ") is odd; rotary positions need pairs"));
  reader.Require(
      scaling.factor >= 1 && scaling.high_frequency_factor > scaling.low_frequency_factor,
      "rope_factor is below 1, or rope_high_frequency_factor not above the low one");
  RETURN_IF_ERROR(reader.Finish());
  RETURN_IF_ERROR(CheckParts(parallel, config.layers + 2));
  RETURN_IF_ERROR(CheckSplit(parallel));
  RETURN_IF_ERROR(CheckTensorParallel(parallel, config.heads, config.ffn, config.vocab));
  RETURN_IF_ERROR(CheckContext(parallel, config.sequence_length, config.heads, config.kv_heads,
                               config.ffn, config.vocab));
  return MakeLlama(config, parallel);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelDescription& description,
                                                 const ModelParallel& parallel) {
  if (!(parallel.dropout >= 0 && parallel.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dropout ", parallel.dropout, " is not a probability from 0 to less than 1"));
  }
  if (description.family == "gpt2") return Gpt2FromDescription(description, parallel);
  if (description.family == "llama") return LlamaFromDescription(description, parallel);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown model family '", description.family, "'; known: gpt2, llama"));
}

}  // namespace muster::parallel
