// The tail of a step: global norm, clipping and AdamW over flat storage.
#ifndef MUSTER_PARALLEL_OPTIM_OPTIMIZER_H_
#define MUSTER_PARALLEL_OPTIM_OPTIMIZER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "parallel/optim/flat_buffers.h"

namespace muster::parallel {

struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double clip_norm = 1.0;  // 0 = off
};

// Reads gradient level 0. Scalars of the step stay in device memory, so a step need not wait for
// the host. Single-threaded.
class Optimizer {
 public:
  static absl::StatusOr<std::unique_ptr<Optimizer>> Make(FlatBuffers& flat, kernels::Device& device,
                                                         const AdamWConfig& config);

  // Enqueues the norm over all parameters (each once) and the clip coefficient.
  void ComputeNorm(kernels::Stream& stream);
  // After the stream is synchronised: the norm before clipping.
  float norm() const { return *static_cast<const float*>(host_norm_->data()); }
  // Enqueues the update. `step` counts from 1.
  void Update(kernels::Stream& stream, int64_t step, double learning_rate);

 private:
  Optimizer(FlatBuffers& flat, const AdamWConfig& config) : flat_(flat), config_(config) {}

  FlatBuffers& flat_;
  const AdamWConfig config_;
  std::unique_ptr<kernels::Buffer> square_sum_, norm_, scalars_, host_norm_, host_scalars_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_OPTIMIZER_H_
