// The pattern of a hybrid stack: one letter per layer, from the embedding to the head.
//   M  Mamba-2
//   *  attention
//   -  MLP
// An MLP and a mixer other than an MLP in front of it are one block, as in a transformer; every
// other layer is a block of its own. A block is what ZeRO gathers, pipelines place and recompute
// and offload work on; a layer computes the same in either. The letters are those of Nemotron-H
// (arXiv 2504.03624). Pure.
#ifndef MUSTER_PARALLEL_PLAN_PATTERN_H_
#define MUSTER_PARALLEL_PLAN_PATTERN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

inline constexpr char kMambaLetter = 'M', kAttentionLetter = '*', kMlpLetter = '-';
inline constexpr int64_t kPatternMax = 2048;  // letters

// The blocks of a pattern: of "M-MM*-" they are "M-", "M", "M", "*-". kInvalidArgument names the
// letter that is none, and its position, or says that there are none or too many.
absl::StatusOr<std::vector<std::string>> BlocksOfPattern(absl::string_view pattern);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PLAN_PATTERN_H_
