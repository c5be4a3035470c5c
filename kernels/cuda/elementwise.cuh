// One kernel for every op that reads and writes element i of its tensors and nothing else. Such an
// op is a functor with `template <int N> __device__ void Apply(int64_t i) const`, which handles
// elements [i, i + N).
#ifndef MUSTER_KERNELS_CUDA_ELEMENTWISE_CUH_
#define MUSTER_KERNELS_CUDA_ELEMENTWISE_CUH_

#include <initializer_list>

#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

constexpr int kElementwiseThreads = 256;

// N elements a thread and full occupancy keep enough loads in flight. A block's accesses are
// contiguous.
template <int N, typename F>
__global__ void __launch_bounds__(kElementwiseThreads) ElementwiseKernel(int64_t n, F f) {
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kElementwiseThreads + threadIdx.x) * N;
  if (i + N <= n) {
    f.template Apply<N>(i);
  } else {
    for (; i < n; ++i) f.template Apply<1>(i);
  }
}

// Takes packs of N when every one of `tensors` is 16-byte aligned, single elements otherwise.
template <int N, typename F>
void Elementwise(CudaStream& stream, const char* op, int64_t n,
                 std::initializer_list<const void*> tensors, const F& f) {
  if (n == 0) return;
  bool aligned = true;
  for (const void* tensor : tensors) aligned = aligned && Aligned16(tensor);
  const auto blocks = [&](int width) {
    return static_cast<unsigned>(CeilDiv(n, int64_t{kElementwiseThreads} * width));
  };
  if (aligned) {
    ElementwiseKernel<N, F><<<blocks(N), kElementwiseThreads, 0, stream.handle()>>>(n, f);
  } else {
    ElementwiseKernel<1, F><<<blocks(1), kElementwiseThreads, 0, stream.handle()>>>(n, f);
  }
  stream.CheckLaunch(op);
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_ELEMENTWISE_CUH_
