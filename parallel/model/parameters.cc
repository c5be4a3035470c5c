#include "parallel/model/parameters.h"

#include <algorithm>
#include <memory>

#include "base/check.h"
#include "kernels/ops.h"

namespace muster::parallel {
namespace {

int64_t Product(const std::vector<int64_t>& shape, size_t first = 0) {
  int64_t product = 1;
  for (size_t i = first; i < shape.size(); ++i) product *= shape[i];
  return product;
}

// FNV-1a: stable across builds and machines, which std::hash is not.
uint64_t StableHash(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001B3ull;
  return hash;
}

}  // namespace

int64_t Parameter::elements() const { return Product(extent); }
int64_t Parameter::storage_elements() const { return storage_rows * Product(extent, 1); }

ParameterId ParameterRegistry::Add(Parameter parameter) {
  CHECK(parameter.global_shape.size() == 1 || parameter.global_shape.size() == 2)
      << parameter.name << " must have one or two dimensions";
  if (parameter.offset.empty()) parameter.offset.resize(parameter.global_shape.size(), 0);
  if (parameter.extent.empty()) parameter.extent = parameter.global_shape;
  if (parameter.storage_rows == 0) parameter.storage_rows = parameter.extent[0];
  CHECK_GE(parameter.storage_rows, parameter.extent[0]) << parameter.name;
  for (const Parameter& other : parameters_) CHECK(other.name != parameter.name) << other.name;
  parameters_.push_back(std::move(parameter));
  return size() - 1;
}

int64_t ParameterRegistry::elements() const {
  int64_t total = 0;
  for (const Parameter& parameter : parameters_) total += parameter.elements();
  return total;
}

void Initialize(const Parameter& parameter, uint64_t seed, float* values) {
  std::fill(values, values + parameter.storage_elements(), 0.0f);
  if (parameter.initializer == Initializer::kOnes) {
    std::fill(values, values + parameter.elements(), 1.0f);
  }
  if (parameter.initializer != Initializer::kNormal) return;
  const std::unique_ptr<kernels::Device> host = kernels::MakeCpuDevice(1);
  auto stream = host->MakeStream();
  CHECK_OK(stream);
  const uint64_t stream_id = StableHash(parameter.name);
  // A box is whole runs of the last dimension of the global tensor.
  const bool matrix = parameter.global_shape.size() == 2;
  const int64_t rows = matrix ? parameter.extent[0] : 1;
  const int64_t run = matrix ? parameter.extent[1] : parameter.extent[0];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first =
        matrix ? (parameter.offset[0] + row) * parameter.global_shape[1] + parameter.offset[1]
               : parameter.offset[0];
    kernels::FillNormal(**stream, kernels::Tensor(values + row * run, kernels::DType::kF32, {run}),
                        seed, stream_id, first, 0.0f, parameter.stddev);
  }
}

}  // namespace muster::parallel
