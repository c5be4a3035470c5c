#include "parallel/optim/flat_buffers.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/ops.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

Tensor FlatBuffers::Slice(kernels::Buffer& buffer, const FlatRange& range) {
  return Tensor(static_cast<float*>(buffer.data()) + range.begin, DType::kF32, {range.size()});
}

ParameterViews FlatBuffers::Views(kernels::Buffer& buffer) const {
  std::vector<Tensor> tensors;
  for (ParameterId id = 0; id < registry_.size(); ++id) {
    const Parameter& parameter = registry_.at(id);
    float* data = static_cast<float*>(buffer.data()) + layout_.offset(id);
    tensors.push_back(
        parameter.box.extent.size() == 1
            ? Tensor(data, DType::kF32, {parameter.storage_rows})
            : Tensor(data, DType::kF32, {parameter.storage_rows, parameter.box.extent[1]}));
  }
  return ParameterViews(std::move(tensors));
}

int64_t FlatBuffers::Bytes(const FlatLayout& layout, int gradient_levels) {
  return layout.elements() * static_cast<int64_t>(sizeof(float)) * (3 + gradient_levels);
}

absl::StatusOr<std::unique_ptr<FlatBuffers>> FlatBuffers::Make(kernels::Device& device,
                                                               kernels::Stream& stream,
                                                               const ParameterRegistry& registry,
                                                               const FlatLayout& layout,
                                                               int gradient_levels, uint64_t seed) {
  std::unique_ptr<FlatBuffers> flat(new FlatBuffers(registry, layout));
  const int64_t bytes = layout.elements() * static_cast<int64_t>(sizeof(float));
  const FlatRange all = {0, layout.elements()};
  const auto allocate = [&]() -> absl::StatusOr<std::unique_ptr<kernels::Buffer>> {
    auto buffer = device.Allocate(bytes);
    if (!buffer.ok()) {
      return Annotate(buffer.status(),
                      absl::StrFormat("parameters, optimizer state and %d gradient buffers take "
                                      "%.1f MB",
                                      gradient_levels, Bytes(layout, gradient_levels) * 1e-6));
    }
    kernels::Zero(stream, Slice(**buffer, all));
    return buffer;
  };
  ASSIGN_OR_RETURN(flat->parameter_, allocate());
  ASSIGN_OR_RETURN(flat->m_, allocate());
  ASSIGN_OR_RETURN(flat->v_, allocate());
  for (int level = 0; level < gradient_levels; ++level) {
    Level gradients;
    ASSIGN_OR_RETURN(gradients.buffer, allocate());
    gradients.views = flat->Views(*gradients.buffer);
    flat->gradients_.push_back(std::move(gradients));
  }
  flat->parameter_views_ = flat->Views(*flat->parameter_);
  RETURN_IF_ERROR(flat->Initialize(stream, seed));
  return flat;
}

absl::Status FlatBuffers::Initialize(kernels::Stream& stream, uint64_t seed) {
  const FlatRange all = {0, layout_.elements()};
  kernels::Zero(stream, m(all));
  kernels::Zero(stream, v(all));
  for (ParameterId id = 0; id < registry_.size(); ++id) {
    std::vector<float> values(registry_.at(id).storage_elements());
    parallel::Initialize(registry_.at(id), seed, values.data());
    const int64_t begin = layout_.offset(id);
    const int64_t size = static_cast<int64_t>(values.size());
    kernels::Copy(stream, Tensor(values.data(), DType::kF32, {size}),
                  parameter({begin, begin + size}));
    // `values` must live until the copy has run.
    RETURN_IF_ERROR(stream.Synchronize());
  }
  return absl::OkStatus();
}

}  // namespace muster::parallel
