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
template <typename T>
int64_t FactorBytes(const SsdProblem<T>& p) {
  return p.samples * p.chunks * p.heads * kFactors * kFactorBytes;
}
template <typename T>
int64_t BorderBytes(const SsdProblem<T>& p) {
  return p.documents.data == nullptr ? 0 : p.samples * p.chunks * 2 * kChunk * 4;
}
// Enqueues PrepareKernel. `scratch`: FactorBytes + BorderBytes. (ssd_forward_hopper.cu)
template <typename T>
Prepared Prepare(CudaStream& stream, const SsdProblem<T>& p, char* scratch);

inline bool IsMapped(const Tensor& x) {
  return Aligned16(x) && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 &&
         (x.dim(2) == 1 || x.stride(2) % 8 == 0);
}
// The states in front of all chunks of heads, each a sample for TMA, so that tiles end where a
// head's state does.
template <typename T>
Tensor StatesOf(const SsdProblem<T>& p, void* states, DType dtype) {
  return Tensor(states, dtype, {p.samples * p.chunks * p.heads, p.width, 1, p.columns});
}
template <typename T>
HeadSlices SlicesOf(const SsdProblem<T>& p, const SsdTiles& tiles) {
  return {static_cast<int>(p.heads), static_cast<int>(tiles.slices)};
}

// Whether tiles fit the tensors. `mapped` are those that TMA accesses.
inline bool Serves(const CudaDevice& device, const SsdArgs& args,
                   std::initializer_list<const Tensor*> mapped) {
  const DType dtype = args.x.dtype();
  const int64_t width = args.x.dim(3), columns = args.b.dim(3);
  const int64_t slices = CeilDiv(args.x.dim(1), kChunk) * args.x.dim(0) * args.x.dim(2) *
                         SsdTilesOf(width, columns).slices;
  return HasWarpgroups(device) && (dtype == DType::kBF16 || dtype == DType::kF16) &&
         SsdIsFused(width, columns) && args.chunk == kChunk &&
         (args.states.empty() || (args.states.dtype() == dtype && Aligned16(args.states))) &&
         // Coordinates and blocks have 32 bits.
         args.x.dim(1) < std::numeric_limits<int32_t>::max() - kChunk &&
         slices * kChunk < std::numeric_limits<int32_t>::max() &&
         std::all_of(mapped.begin(), mapped.end(), [](const Tensor* t) { return IsMapped(*t); });
}

template <typename T>
int Shares(const CudaDevice& device, const SsdProblem<T>& p, int64_t slices, double fixed) {
  return SsdShares(device.multiprocessors(), p.samples * p.chunks * p.groups,
                   p.heads / p.groups * slices, fixed);
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
  int64_t tile_columns, column_slices, segments = 1;
  int64_t segment;  // chunks of one

  template <typename T>
  StatesPlan(const CudaDevice& device, const SsdProblem<T>& p, const SsdTiles& tiles)
      : tile_columns(tiles.columns), column_slices(tiles.passes), segment(p.chunks) {
    constexpr int64_t kSegmentMin = 4, kResident = 3;
    const int64_t blocks = p.samples * p.heads * tiles.slices * tiles.passes;
    const int64_t processors = device.multiprocessors();
    if (blocks >= 2 * processors) return;
    // Segments are scanned twice, so few of them gain nothing.
    const int64_t wanted =
        std::min({kResident * processors / blocks, p.chunks / kSegmentMin, int64_t{kSegmentsMax}});
    if (wanted < 4) {
      tile_columns = kSlab;
      column_slices = CeilDiv(p.columns, kSlab);
      return;
    }
    segment = CeilDiv(p.chunks, wanted);
    segments = CeilDiv(p.chunks, segment);
  }
  // Of scratch memory.
  template <typename T>
  int64_t Bytes(const SsdProblem<T>& p) const {
    return segments == 1 ? 0 : p.samples * p.heads * segments * p.width * p.columns * 4;
  }
};

template <bool kReverse, typename T, int P, int N>
absl::Status LaunchPass(CudaStream& stream, const StatesParams& params, const StatesPlan& plan,
                        int64_t samples, const CUtensorMap& left, const CUtensorMap& right,
                        const CUtensorMap& states) {
  const char* const what = kReverse ? "SsdBackward: gradients of states" : "SsdForward: states";
  const int64_t blocks =
      samples * params.all.heads * params.all.slices * params.segments * params.column_slices;
  if constexpr (N > kSlab) {
    if (plan.tile_columns == kSlab) {
      using Layout = StatesLayout<P, kSlab>;
      return Launch(stream, what, StatesKernel<kReverse, T, P, kSlab>, blocks, Layout::kThreads,
                    Layout::kSharedBytes, left, right, states, params);
    }
  }
  using Layout = StatesLayout<P, N>;
  return Launch(stream, what, StatesKernel<kReverse, T, P, N>, blocks, Layout::kThreads,
                Layout::kSharedBytes, left, right, states, params);
}

// Writes the states in front of chunks, or with kReverse the gradients behind them, to `states`
// [B * chunks * H, width, 1, columns]. `ends`: plan.Bytes() of scratch memory.
template <bool kReverse, typename T, int P, int N>
absl::Status LaunchStates(CudaStream& stream, const SsdProblem<T>& p, const StatesPlan& plan,
                          HeadSlices all, const Tensor& left, const Tensor& right,
                          const Tensor& states, const float* factors, const float* first,
                          float* last, void* ends) {
  CUtensorMap left_map, right_map, states_map;
  RETURN_IF_ERROR(DescribeHeads(left, kHalf, left_map));
  RETURN_IF_ERROR(DescribeHeads(right, kHalf, right_map));
  RETURN_IF_ERROR(DescribeHeads(states, kWarpRows, states_map));
  StatesParams params = {.factors = factors,
                         .first = first,
                         .last = last,
                         .ends = nullptr,
                         .all = all,
                         .width = static_cast<int>(p.width),
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
    absl::Status launched = LaunchPass<kReverse, T, P, N>(stream, pass, plan, p.samples, left_map,
                                                          right_map, states_map);
    RETURN_IF_ERROR(launched);
    const int size = static_cast<int>(p.width * p.columns);
    const int64_t blocks = p.samples * p.heads * CeilDiv(size, kChainThreads);
    ChainKernel<kReverse>
        <<<static_cast<unsigned>(blocks), kChainThreads, 0, stream.handle()>>>(pass, first, size);
    params.first = pass.ends;
  }
  return LaunchPass<kReverse, T, P, N>(stream, params, plan, p.samples, left_map, right_map,
                                       states_map);
}

// Calls f(T(), P, N) for the tiles of a problem, P and N as constants.
template <typename F>
absl::Status ForTiles(DType dtype, const SsdTiles& tiles, F f) {
  const auto for_type = [&](auto type) {
    using C64 = std::integral_constant<int, 64>;
    using C128 = std::integral_constant<int, 128>;
    if (tiles.width == 128) return f(type, C128(), C64());
    if (tiles.columns == 64) return f(type, C64(), C64());
    return f(type, C64(), C128());
  };
  return dtype == DType::kBF16 ? for_type(__nv_bfloat16()) : for_type(__half());
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_HOPPER_LAUNCH_CUH_
