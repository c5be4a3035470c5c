// ZeRO-Offload (Ren et al., arXiv 2101.06840): AdamW on the host for optimizer state that does not
// fit on the device.
#ifndef MUSTER_PARALLEL_OPTIM_OPTIMIZER_OFFLOAD_H_
#define MUSTER_PARALLEL_OPTIM_OPTIMIZER_OFFLOAD_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/optimizer.h"

namespace muster::parallel {

// The number of first buckets that together hold `share` (0 to 1) of the own parts' elements,
// rounded to whole buckets; at least one when share > 0.
int HostBuckets(const FlatLayout& layout, double share);

// Updates the buckets whose optimizer state and master weights are in host memory
// (FlatBuffersOptions::host_buckets). It pipelines slices over three streams beside the compute
// stream: gradients are copied down, the host's threads update them, and parameters are copied up.
// The results have the bits of kernels::AdamW on a CPU device.
//
// Owns the streams, 4 bytes of pinned host memory per offloaded element of the own parts for
// gradients, buffers of a slice each for 16-bit parameters on their way up, and the host's threads.
// Single-threaded.
class OptimizerOffload {
 public:
  // `threads` >= 1, of the host. Requires: flat.options().host_buckets > 0. `optimizer` has the
  // scalars of every step. kResourceExhausted with the sizes.
  static absl::StatusOr<std::unique_ptr<OptimizerOffload>> Make(FlatBuffers& flat,
                                                                const Optimizer& optimizer,
                                                                kernels::Device& device,
                                                                int threads);
  ~OptimizerOffload();
  // Host memory that Make() allocates.
  static int64_t HostBytes(const FlatLayout& layout, const FlatBuffersOptions& options);

  // Enqueues the copies of gradients to the host. Those of a bucket wait for reduced(bucket), or,
  // where that is null, for the work enqueued on `compute` so far, so they overlap with backward.
  void FetchGradients(kernels::Stream& compute,
                      absl::FunctionRef<kernels::Event*(int bucket)> reduced);
  // Enqueues the update with the scalars that Optimizer::Prepare left on `compute`, which may write
  // gradients again afterwards, but must not touch parameters of a bucket before written(bucket).
  void Update(kernels::Stream& compute);
  // The event after which the own part of a bucket is in device memory.
  kernels::Event& written(int bucket) { return *written_[bucket]; }
  // Later work on `compute` sees everything updated, on device and host.
  void Join(kernels::Stream& compute);
  // The first error of any of the streams.
  absl::Status status() const;

 private:
  // A range of an own part that is updated at once.
  struct Slice {
    int bucket = 0;
    std::vector<kernels::AdamWArgs> updates;  // in host memory
    kernels::Tensor master, sent, to;         // `sent` goes to `to`; 16-bit: made from master
    int slot = -1;                            // of `sent`, where it is a slot
    // 16-bit: first element and count of padding, which is copied up as well.
    std::vector<std::pair<int64_t, int64_t>> gaps;
  };

  explicit OptimizerOffload(FlatBuffers& flat) : flat_(flat) {}
  absl::Status Allocate(const Optimizer& optimizer, kernels::Device& device, int threads);
  void MakeSlices(const AdamWConfig& config);
  kernels::Tensor gradients(int bucket);  // in host memory
  void Run(const Slice& slice);
  void Round(const Slice& slice, int64_t begin, int64_t count);  // from master to sent

  FlatBuffers& flat_;
  const kernels::StepScalars* scalars_ = nullptr;  // device memory
  std::unique_ptr<kernels::Device> host_;
  std::unique_ptr<kernels::Stream> adamw_;  // eager: runs inside work_
  std::unique_ptr<kernels::Buffer> gradients_, host_scalars_, slots_;
  std::vector<Slice> slices_;                                       // in the order of the update
  std::vector<std::unique_ptr<kernels::Event>> fetched_, written_;  // per bucket
  std::vector<std::unique_ptr<kernels::Event>> slot_empty_;
  std::unique_ptr<kernels::Event> reduced_, prepared_, updated_, slice_updated_;
  // Last: they end before what they use.
  std::unique_ptr<kernels::Stream> down_, work_, up_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_OPTIMIZER_OFFLOAD_H_
