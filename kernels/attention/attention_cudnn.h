// Attention through cuDNN's fused graphs (flash attention on the tensor cores), one graph per
// problem, built at first use. A build without cuDNN or its frontend headers has none.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_CUDNN_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_CUDNN_H_

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/attention/attention.h"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// The graphs of one stream. Used by the thread that enqueues on it.
class AttentionPlans {
 public:
  explicit AttentionPlans(cudaStream_t stream);
  ~AttentionPlans();

  // False where cuDNN has no graph for this problem (dtype, head width, architecture, documents, or
  // a fixed order whose workspace is too large: attention_workspace.h), and then nothing was
  // enqueued. An error while running a graph fails the stream.
  bool Forward(CudaStream& stream, const AttentionArgs& args);
  bool Backward(CudaStream& stream, const AttentionBackwardArgs& args);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_CUDNN_H_
