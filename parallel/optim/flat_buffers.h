// Flat fp32 storage of a model: parameters, AdamW's two moments, and gradients.
#ifndef MUSTER_PARALLEL_OPTIM_FLAT_BUFFERS_H_
#define MUSTER_PARALLEL_OPTIM_FLAT_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/tensor.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_layout.h"

namespace muster::parallel {

// Owns the device memory: 4 bytes per element of the layout for each of parameters, m, v and every
// gradient level. Single-threaded. The registry and the layout must outlive it.
class FlatBuffers {
 public:
  // Gradient levels: see GradientReducer. kResourceExhausted with the sizes. m, v and gradients are
  // zero, parameters have their initial values.
  static absl::StatusOr<std::unique_ptr<FlatBuffers>> Make(kernels::Device& device,
                                                           kernels::Stream& stream,
                                                           const ParameterRegistry& registry,
                                                           const FlatLayout& layout,
                                                           int gradient_levels, uint64_t seed);
  // Back to the initial values: parameters from the seed, moments zero.
  absl::Status Initialize(kernels::Stream& stream, uint64_t seed);
  // What Make() will ask the device for.
  static int64_t Bytes(const FlatLayout& layout, int gradient_levels);

  const FlatLayout& layout() const { return layout_; }
  const ParameterRegistry& registry() const { return registry_; }
  int gradient_levels() const { return static_cast<int>(gradients_.size()); }

  // Slices of flat storage, fp32 [size].
  kernels::Tensor parameter(const FlatRange& range) { return Slice(*parameter_, range); }
  kernels::Tensor m(const FlatRange& range) { return Slice(*m_, range); }
  kernels::Tensor v(const FlatRange& range) { return Slice(*v_, range); }
  kernels::Tensor gradient(int level, const FlatRange& range) {
    return Slice(*gradients_[level].buffer, range);
  }

  const ParameterViews& parameter_views() const { return parameter_views_; }
  const ParameterViews& gradient_views(int level) const { return gradients_[level].views; }

 private:
  struct Level {
    std::unique_ptr<kernels::Buffer> buffer;
    ParameterViews views;
  };

  FlatBuffers(const ParameterRegistry& registry, const FlatLayout& layout)
      : registry_(registry), layout_(layout) {}
  static kernels::Tensor Slice(kernels::Buffer& buffer, const FlatRange& range);
  ParameterViews Views(kernels::Buffer& buffer) const;

  const ParameterRegistry& registry_;
  const FlatLayout& layout_;
  std::unique_ptr<kernels::Buffer> parameter_, m_, v_;
  std::vector<Level> gradients_;
  ParameterViews parameter_views_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_FLAT_BUFFERS_H_
