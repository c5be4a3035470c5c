#include "parallel/pipeline/stages.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/pipeline/partition.h"

namespace muster::parallel {

absl::StatusOr<std::vector<double>> BlockCosts(const ModelDescription& description) {
  const auto size = [&](const char* name) {
    const auto found = description.sizes.find(name);
    return found == description.sizes.end() ? 0.0 : static_cast<double>(found->second);
  };
  const double c = size("hidden");
  const double attention = size("sequence_length") * c;  // q k^T and p v, half of each
  double block = 0;
  if (description.family == "gpt2") {
    block = 12 * c * c + attention;
  } else if (description.family == "llama") {
    const double key_width = c / size("heads") * size("kv_heads");
    block = 2 * c * c + 2 * c * key_width + 3 * c * size("ffn") + attention;
  } else {
    return absl::UnimplementedError(absl::StrCat("the cost of a block of model family '",
                                                 description.family, "' is not known"));
  }
  std::vector<double> costs = {0};
  costs.insert(costs.end(), static_cast<size_t>(size("layers")), block);
  costs.push_back(c * size("vocab"));
  return costs;
}

absl::StatusOr<ModelParallel> StageParts(const ModelDescription& description, int stages,
                                         int chunks, int stage) {
  CHECK(stage >= 0 && stage < stages && chunks >= 1);
  ASSIGN_OR_RETURN(const std::vector<double> costs, BlockCosts(description));
  const auto boundaries = PartitionLayers(costs, stages * chunks);
  if (!boundaries.ok()) {
    return Annotate(boundaries.status(),
                    absl::StrFormat("%d pipeline stages x %d chunks", stages, chunks));
  }
  ModelParallel parallel;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int part = chunk * stages + stage;
    parallel.parts.push_back({(*boundaries)[part], (*boundaries)[part + 1]});
  }
  return parallel;
}

}  // namespace muster::parallel
