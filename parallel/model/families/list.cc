// The families of this program and nothing else: a program that defines Families() itself links
// the rest of the engine without this file.
#include <array>

#include "parallel/model/families/family.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/families/hybrid.h"
#include "parallel/model/families/llama.h"
#include "parallel/model/families/mamba2.h"

namespace muster::parallel {

absl::Span<const ModelFamily* const> Families() {
  static constexpr std::array<const ModelFamily*, 4> kFamilies = {&kGpt2Family, &kLlamaFamily,
                                                                  &kMamba2Family, &kHybridFamily};
  return kFamilies;
}

}  // namespace muster::parallel
