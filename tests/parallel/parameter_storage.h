// Memory of its own for each parameter of a model: values, or gradients.
#ifndef MUSTER_TESTS_PARALLEL_PARAMETER_STORAGE_H_
#define MUSTER_TESTS_PARALLEL_PARAMETER_STORAGE_H_

#include <utility>
#include <vector>

#include "kernels/tensor.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

// Zeros to begin with. The registry need not outlive it.
class ParameterStorage {
 public:
  explicit ParameterStorage(const ParameterRegistry& registry) : values_(registry.size()) {
    std::vector<kernels::Tensor> views;
    for (ParameterId id = 0; id < registry.size(); ++id) {
      const Parameter& parameter = registry.at(id);
      values_[id].resize(parameter.storage_elements());
      views.push_back(parameter.StorageIn(values_[id].data(), kernels::DType::kF32));
    }
    views_ = ParameterViews(std::move(views));
  }
  std::vector<float>& operator[](ParameterId id) { return values_[id]; }
  const ParameterViews& views() const { return views_; }

 private:
  std::vector<std::vector<float>> values_;
  ParameterViews views_;
};

}  // namespace muster::parallel

#endif  // MUSTER_TESTS_PARALLEL_PARAMETER_STORAGE_H_
