// Collectives of the tensor group beside the computing stream, so that products run over them.
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

// A tensor that a collective fills: to be read once it has been awaited.
struct Started {
  kernels::Tensor tensor;
  kernels::Event* done = nullptr;  // null: it has run on the computing stream
  // What the collective sends is there, where that is made beside the computing stream too; else
  // null. Its kernels find room between two products: who waits for this in front of a product
  // lets the collective run under that one, instead of behind it.
  kernels::Event* sent = nullptr;
};

// All rows of something, of which one piece comes after the other.
struct InPieces {
  kernels::Tensor all;
  std::array<Started, 2> pieces;
  int count = 0;
  bool empty() const { return count == 0; }
};

// Owns the stream and its events. Serves all layers of a model; used by the thread that enqueues on
// the computing stream, which makes the order of the calls the same on all ranks.
class TensorStream {
 public:
  // For a group of `ranks`.
  static absl::StatusOr<std::unique_ptr<TensorStream>> Make(kernels::Device& device, int ranks);

  // Counts the waits of Await, which it must outlive; null: nobody does.
  void Measure(ExposureMeter* meter) { meter_ = meter; }

  // Enqueues `work`, which is a collective, behind all that `compute` has been given. The event is
  // that of its end, and is used again ranks + kUnderWay calls later.
  kernels::Event* Start(kernels::Stream& compute, Collective collective,
                        absl::FunctionRef<void(kernels::Stream& stream)> work);
  // Of work, on the stream that it is given: the event of what it has enqueued so far, as Start's;
  // and the other way round, what it enqueues next waits for all that `compute` has been given.
  kernels::Event* Mark(Collective collective);
  void Follow(kernels::Stream& compute);
  void Await(kernels::Stream& compute, kernels::Event& done);

  kernels::Stream& stream() { return *stream_; }

 private:
  static constexpr int kUnderWay = 16;  // beside those of a product in chunks

  struct Call {
    std::unique_ptr<kernels::Event> done;
    Collective collective = Collective::kAllReduce;
  };

  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<kernels::Event> ready_;  // compute: what is sent has been written
  std::vector<Call> calls_;
  size_t next_ = 0;
  ExposureMeter* meter_ = nullptr;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_TENSOR_STREAM_H_
