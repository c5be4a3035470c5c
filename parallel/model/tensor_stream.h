// Runs collectives of the tensor group on a stream of its own, so that they overlap with GEMMs.
#ifndef MUSTER_PARALLEL_MODEL_TENSOR_STREAM_H_
#define MUSTER_PARALLEL_MODEL_TENSOR_STREAM_H_

#include <array>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/exposure.h"

namespace muster::parallel {

// A tensor that a collective fills. It may be read after TensorShard::Await.
struct Started {
  kernels::Tensor tensor;
  kernels::Event* done = nullptr;  // null: the collective ran on the compute stream
  // Recorded when what the collective sends is complete, where the tensor stream computes that too;
  // else null. Kernels of the tensor stream only run between two GEMMs of the compute stream. A
  // GEMM that waits for this event lets the collective overlap with it instead of following it.
  kernels::Event* input_ready = nullptr;
};

// All rows of a tensor that arrives in one or two slices.
struct InSlices {
  kernels::Tensor all;
  std::array<Started, 2> slices;
  int count = 0;
  bool empty() const { return count == 0; }
};

// Owns the stream and its events, for all layers of a model. Used by the thread that enqueues on
// the compute stream, so that all ranks make their calls in the same order.
class TensorStream {
 public:
  // For a group of `ranks`.
  static absl::StatusOr<std::unique_ptr<TensorStream>> Make(kernels::Device& device, int ranks);

  // The meter that counts the waits of Await; it must outlive this object. May be null.
  void Measure(ExposureMeter* meter) { meter_ = meter; }

  // Enqueues `work`, a collective, behind everything that is enqueued on `compute`. Returns the
  // event of its end, which is reused ranks + kUnderWay calls later.
  kernels::Event* Start(kernels::Stream& compute, Collective collective,
                        absl::FunctionRef<void(kernels::Stream& stream)> work);
  // To be called by `work`. Mark returns the event of what it has enqueued so far, like Start.
  // Follow makes what it enqueues next wait for everything that is enqueued on `compute`.
  kernels::Event* Mark(Collective collective);
  void Follow(kernels::Stream& compute);
  void Await(kernels::Stream& compute, kernels::Event& done);

  kernels::Stream& stream() { return *stream_; }

 private:
  static constexpr int kUnderWay = 16;  // events beside those of one GEMM with kChunked

  struct Call {
    std::unique_ptr<kernels::Event> done;
    Collective collective = Collective::kAllReduce;
  };

  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<kernels::Event> ready_;  // on compute: the input of a collective is written
  std::vector<Call> calls_;
  size_t next_ = 0;
  ExposureMeter* meter_ = nullptr;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_TENSOR_STREAM_H_
