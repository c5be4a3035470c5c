// What a model asks to be stored, without saying where: names, shapes, boxes, initial values.
#ifndef MUSTER_PARALLEL_MODEL_PARAMETERS_H_
#define MUSTER_PARALLEL_MODEL_PARAMETERS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/tensor.h"
#include "parallel/checkpoint/box.h"

namespace muster::parallel {

enum class Initializer : uint8_t { kZeros, kOnes, kNormal };

// Index into a ParameterRegistry.
using ParameterId = int;

// One trainable tensor, or this rank's box of it. One or two dimensions.
struct Parameter {
  // The same in every layout: "blocks.3.attention.qkv.weight"; the block index is global.
  std::string name;
  std::vector<int64_t> global_shape;
  // This rank's part of it; all of it unless an axis is sharded.
  Box box;
  // Rows of storage, >= box.extent[0]: the rows behind are padding, which starts as zero and has no
  // gradient, so it stays zero. It is not part of a checkpoint.
  int64_t storage_rows = 0;
  bool weight_decay = false;  // 2-D weights only
  Initializer initializer = Initializer::kZeros;
  float stddev = 0;  // of kNormal

  int64_t elements() const;          // of the box, without padding
  int64_t storage_elements() const;  // with padding
};

// Parameters in forward order of first use. Backward completes their gradients in about the
// reverse order, which is the order of the flat buckets. Filled while the model is built, read
// only afterwards.
class ParameterRegistry {
 public:
  // Fills in box and storage_rows when empty. Requires: the name is new.
  ParameterId Add(Parameter parameter);
  const Parameter& at(ParameterId id) const { return parameters_[id]; }
  int size() const { return static_cast<int>(parameters_.size()); }
  // Trainable elements of this rank, without padding.
  int64_t elements() const;

 private:
  std::vector<Parameter> parameters_;
};

// One tensor per parameter: their values, or their gradients, or moments. Shaped as stored:
// [storage_rows, columns] or [storage_rows]. Views, owns nothing.
class ParameterViews {
 public:
  ParameterViews() = default;
  explicit ParameterViews(std::vector<kernels::Tensor> tensors) : tensors_(std::move(tensors)) {}
  const kernels::Tensor& operator[](ParameterId id) const { return tensors_[id]; }

 private:
  std::vector<kernels::Tensor> tensors_;
};

// Writes initial values to host memory `values` (storage_elements() floats). Normal values are
// Philox(seed, hash of the name, global element index): the same number for the same element in
// every layout.
void Initialize(const Parameter& parameter, uint64_t seed, float* values);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_PARAMETERS_H_
