// A model as plain names and numbers: what a checkpoint keeps so that the model can be rebuilt from
// it, and what a job spec's engine.model becomes (spec::Describe). Each family says which names
// there are (parallel/model/families). Pure.
#ifndef MUSTER_PARALLEL_PLAN_MODEL_DESCRIPTION_H_
#define MUSTER_PARALLEL_PLAN_MODEL_DESCRIPTION_H_

#include <cstdint>
#include <map>
#include <string>

namespace muster::parallel {

struct ModelDescription {
  std::string family;                        // "gpt2", "llama", ...
  std::map<std::string, int64_t> sizes;      // "layers", "hidden", ...; > 0
  std::map<std::string, double> numbers;     // "norm_epsilon", "rope_theta", ...; finite
  std::map<std::string, bool> flags;         // "tied"
  std::map<std::string, std::string> texts;  // "pattern"
  friend bool operator==(const ModelDescription&, const ModelDescription&) = default;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PLAN_MODEL_DESCRIPTION_H_
