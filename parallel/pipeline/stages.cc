#include "parallel/pipeline/stages.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/pipeline/partition.h"

namespace muster::parallel {

absl::StatusOr<std::vector<double>> BlockCosts(const ModelDescription& description) {
  ASSIGN_OR_RETURN(const LanguageModelConfig config, FindConfig(description));
  std::vector<double> costs = {0};
  for (const double block : parallel::BlockCosts(config)) costs.push_back(block);
  costs.push_back(static_cast<double>(config.hidden) * static_cast<double>(config.vocab));
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
