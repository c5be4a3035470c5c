// What the launches of ssd_forward_hopper.cu and ssd_backward_hopper.cu share.
#ifndef MUSTER_KERNELS_SSM_SSD_HOPPER_LAUNCH_CUH_
#define MUSTER_KERNELS_SSM_SSD_HOPPER_LAUNCH_CUH_

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/device/cuda_status.h"
#include "kernels/ssm/ssd_states_hopper.cuh"
#include "kernels/ssm/ssd_workspace.h"

namespace muster::kernels::cuda::ssd {

// Factors and borders of a call, at the front of the stream's scratch memory.
struct Prepared {
  float* factors;
  int32_t* borders;  // null: no documents
};
inline int64_t FactorBytes(const SsdProblem<T>& p) {
  return p.samples * p.chunks * p.heads * kFactors * kFactorBytes;
}
inline int64_t BorderBytes(const SsdProblem<T>& p) {
  return p.documents.data == nullptr ? 0 : p.samples * p.chunks * 2 * kChunk * 4;
}
// Enqueues PrepareKernel. `scratch`: FactorBytes + BorderBytes. (ssd_forward_hopper.cu)
Prepared Prepare(CudaStream& stream, const SsdProblem<T>& p, char* scratch);

// A [B,S,slots,64 k] tensor as [B,S,slots k,64].
inline Tensor InSlabs(const Tensor& x) {
  const int64_t slabs = x.dim(3) / kSlab;
  CHECK(slabs == 1 || x.dim(2) == 1 || x.stride(2) == x.dim(3));
  const int64_t stride = x.dim(2) == 1 || slabs > 1 ? kSlab : x.stride(2);
  return Tensor(x.data(), x.dtype(), {x.dim(0), x.dim(1), x.dim(2) * slabs, kSlab},
                {x.stride(0), x.stride(1), stride, 1});
}
inline bool IsMapped(const Tensor& x) {
  const bool in_slabs = x.dim(3) == kSlab || x.dim(2) == 1 || x.stride(2) == x.dim(3);
  return in_slabs && Aligned16(x) && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 &&
         (x.dim(2) == 1 || x.stride(2) % 8 == 0);
}

// Whether tiles fit the tensors. `mapped` are those that TMA accesses.
inline bool Serves(const CudaDevice& device, const SsdArgs& args,
                   std::initializer_list<const Tensor*> mapped) {
  const int64_t rows = CeilDiv(args.x.dim(1), kChunk) * args.x.dim(0) * args.x.dim(2);
  return HasWarpgroups(device) && args.x.dtype() == DType::kBF16 && args.chunk == kChunk &&
         (args.states.empty() || args.states.dtype() == DType::kBF16) &&
         // Coordinates and blocks have 32 bits.
         args.x.dim(1) < std::numeric_limits<int32_t>::max() - kChunk &&
         rows * std::max(args.x.dim(3), int64_t{kChunk}) < std::numeric_limits<int32_t>::max() &&
         std::all_of(mapped.begin(), mapped.end(), [](const Tensor* t) { return IsMapped(*t); });
}

inline int Shares(const CudaDevice& device, int64_t chunks_of_groups, int64_t heads_of_group,
                  double fixed) {
  return SsdShares(device.multiprocessors(), chunks_of_groups, heads_of_group, fixed);
}

template <typename Kernel, typename... Arguments>
absl::Status Launch(CudaStream& stream, const char* what, Kernel kernel, int64_t blocks,
                    int threads, int shared_bytes, const Arguments&... arguments) {
  RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      what));
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
           static_cast<size_t>(shared_bytes), stream.handle()>>>(arguments...);
  return CudaStatus(cudaGetLastError(), what);
}

// How the scan of states fills the device.
struct StatesPlan {
  int64_t column_slices = 1, segments = 1;
  int64_t segment;  // chunks of one

  StatesPlan(const CudaDevice& device, const SsdProblem<T>& p) : segment(p.chunks) {
    constexpr int64_t kSegmentMin = 4, kResident = 3;
    const int64_t blocks = p.samples * p.heads, processors = device.multiprocessors();
    if (blocks >= 2 * processors) return;
    // Segments are scanned twice, so few of them gain nothing.
    const int64_t wanted =
        std::min({kResident * processors / blocks, p.chunks / kSegmentMin, int64_t{kSegmentsMax}});
    if (wanted < 4) {
      column_slices = p.columns / kSlab;
      return;
    }
    segment = CeilDiv(p.chunks, wanted);
    segments = CeilDiv(p.chunks, segment);
  }
  // Of scratch memory.
  int64_t Bytes(const SsdProblem<T>& p) const {
    return segments == 1 ? 0 : p.samples * p.heads * segments * p.width * p.columns * 4;
  }
};

template <bool kReverse, int P, int N>
absl::Status LaunchPass(CudaStream& stream, const StatesParams& params, int64_t samples,
                        const CUtensorMap& left, const CUtensorMap& right,
                        const CUtensorMap& states) {
  const char* const what = kReverse ? "SsdBackward: gradients of states" : "SsdForward: states";
  const int64_t blocks = samples * params.heads * params.segments * params.column_slices;
  if constexpr (N > kSlab) {
    if (params.column_slices > 1) {
      using Layout = StatesLayout<P, kSlab>;
      return Launch(stream, what, StatesKernel<kReverse, P, kSlab>, blocks, Layout::kThreads,
                    Layout::kSharedBytes, left, right, states, params);
    }
  }
  using Layout = StatesLayout<P, N>;
  return Launch(stream, what, StatesKernel<kReverse, P, N>, blocks, Layout::kThreads,
                Layout::kSharedBytes, left, right, states, params);
}

// Writes the states in front of chunks, or with kReverse the gradients behind them, to `states`
// [B * chunks * H * P, N]. `ends`: plan.Bytes() of scratch memory.
template <bool kReverse, int P, int N>
absl::Status LaunchStates(CudaStream& stream, const SsdProblem<T>& p, const StatesPlan& plan,
                          const Tensor& left, const Tensor& right, const Tensor& states,
                          const float* factors, const float* first, float* last, void* ends) {
  CUtensorMap left_map, right_map, states_map;
  RETURN_IF_ERROR(DescribeHeads(InSlabs(left), kHalf, left_map));
  RETURN_IF_ERROR(DescribeHeads(InSlabs(right), kHalf, right_map));
  RETURN_IF_ERROR(DescribeBoxes(states, kWarpRows, states_map));
  StatesParams params = {.factors = factors,
                         .first = first,
                         .last = last,
                         .ends = nullptr,
                         .heads = static_cast<int>(p.heads),
                         .heads_of_group = static_cast<int>(p.heads / p.groups),
                         .chunks = static_cast<int>(p.chunks),
                         .columns = static_cast<int>(p.columns),
                         .column_slices = static_cast<int>(plan.column_slices),
                         .segments = static_cast<int>(plan.segments),
                         .segment = static_cast<int>(plan.segment)};
  if (plan.segments > 1) {
    StatesParams pass = params;
    pass.first = nullptr;
    pass.last = nullptr;
    pass.ends = static_cast<float*>(ends);
    absl::Status launched =
        LaunchPass<kReverse, P, N>(stream, pass, p.samples, left_map, right_map, states_map);
    RETURN_IF_ERROR(launched);
    const int64_t blocks = p.samples * p.heads * (P * N / kChainThreads);
    ChainKernel<kReverse>
        <<<static_cast<unsigned>(blocks), kChainThreads, 0, stream.handle()>>>(pass, first, P * N);
    params.first = pass.ends;
  }
  return LaunchPass<kReverse, P, N>(stream, params, p.samples, left_map, right_map, states_map);
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_HOPPER_LAUNCH_CUH_
