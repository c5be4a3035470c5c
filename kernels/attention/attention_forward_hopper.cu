// Launches of attention_forward_hopper.cuh, whose constants were chosen by measurements on an H200
// (docs/decisions/0008-which-attention-kernel-runs.md).
#include "kernels/attention/attention_forward_hopper.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/attention/attention_forward_hopper.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/device/cuda_status.h"

namespace muster::kernels::cuda {
namespace {

// Tiles of queries of each key head.
int64_t Tiles(const AttentionArgs& args) {
  const int64_t parts = CeilDiv(args.q.dim(1), forward::kGroupRows);
  return CeilDiv(parts * (args.q.dim(2) / args.k.dim(2)), forward::kGroups);
}

bool Serves(const CudaDevice& device, const AttentionArgs& args) {
  return HasWarpgroups(device) && args.q.dtype() != DType::kF32 &&
         args.q.dim(3) == forward::kWidth && ScaleOf(args) > 0 && args.k.dim(1) > 0 &&
         WholePacks(args.q) && WholePacks(args.k) && WholePacks(args.v) && WholePacks(args.out) &&
         Tiles(args) * args.q.dim(0) * args.k.dim(2) < (int64_t{1} << 31);
}

template <typename T>
absl::Status Launch(CudaStream& stream, const AttentionArgs& args) {
  CUtensorMap q, k, v, out;
  RETURN_IF_ERROR(DescribeHeads(args.q, forward::kGroupRows, q));
  RETURN_IF_ERROR(DescribeHeads(args.k, forward::kKeys, k));
  RETURN_IF_ERROR(DescribeHeads(args.v, forward::kKeys, v));
  RETURN_IF_ERROR(DescribeHeads(args.out, forward::kWarpRows, out));
  const auto d =
      ProblemOf<forward::View>(args, [](const Tensor& /*tensor*/) { return forward::View(); });
  const auto kernel = forward::HopperAttentionForwardKernel<T>;
  RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      forward::kSharedBytes),
                 "AttentionForward"));
  const auto tiles = static_cast<int>(Tiles(args));
  const int blocks =
      std::min(tiles * d.batch * d.key_heads, stream.cuda_device().multiprocessors());
  kernel<<<static_cast<unsigned>(blocks), forward::kThreads, forward::kSharedBytes,
           stream.handle()>>>(q, k, v, out, d, tiles);
  return CudaStatus(cudaGetLastError(), "AttentionForward");
}

}  // namespace

bool HopperAttentionForward(CudaStream& stream, const AttentionArgs& args) {
  if (!Serves(stream.cuda_device(), args)) return false;
  const absl::Status launched = args.q.dtype() == DType::kBF16 ? Launch<__nv_bfloat16>(stream, args)
                                                               : Launch<__half>(stream, args);
  if (absl::IsUnimplemented(launched)) return false;
  if (!launched.ok()) stream.Fail(launched);
  return true;
}

bool HopperAttentionForwardIsFaster(const AttentionArgs& args) {
  // cuDNN has no graph for documents, and our other kernels take longer.
  if (!args.documents.empty()) return true;
  // In short sequences too many tiles lie on the diagonal; fewer do where heads share keys, because
  // a tile then holds queries of several heads. Problems of fewer items were not measured.
  constexpr int64_t kMeasuredItems = 1024;
  const bool shared = args.q.dim(2) > args.k.dim(2);
  return args.q.dtype() == DType::kBF16 && args.q.dim(3) == forward::kWidth &&
         std::min(args.q.dim(1), args.k.dim(1)) >= (shared ? 2048 : 4096) &&
         Tiles(args) * args.q.dim(0) * args.k.dim(2) >= kMeasuredItems;
}

}  // namespace muster::kernels::cuda
