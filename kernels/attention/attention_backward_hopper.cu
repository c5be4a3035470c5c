// Launches of attention_backward_hopper.cuh.
#include "kernels/attention/attention_backward_hopper.h"

#include <algorithm>
#include <limits>

#include "base/status_macros.h"
#include "kernels/attention/attention_backward_hopper.cuh"
#include "kernels/attention/attention_samples.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/device/cuda_status.h"

namespace muster::kernels::cuda {
namespace {

// Heads go through in batches: kBytesAtOnce of what their blocks read and add to stay in the L2
// cache of 50 MB, and kItemsOfMultiprocessor items keep all multiprocessors busy to the end. 64 x
// 1024 tokens take 0.83 of the time that all heads at once take, longer sequences the same
// (docs/decisions/0008-which-attention-kernel-runs.md).
constexpr int64_t kBytesAtOnce = int64_t{16} << 20;
constexpr int64_t kItemsOfMultiprocessor = 2;

bool Serves(const CudaDevice& device, const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  const auto whole = {&forward.q, &forward.k, &forward.v, &forward.out,
                      &args.dout, &args.dq,   &args.dk,   &args.dv};
  const int64_t tiles =
      CeilDiv(forward.q.dim(1), backward::kQueries) + CeilDiv(forward.k.dim(1), backward::kKeys);
  return HasWarpgroups(device) && device.shared_bytes_per_block() >= backward::kSharedBytes &&
         !args.deterministic && forward.documents.empty() && forward.q.dtype() != DType::kF32 &&
         forward.q.dim(3) == backward::kWidth && forward.k.dim(1) > 0 &&
         // The limits of grids, and of counts of tiles in 32 bits.
         forward.q.dim(0) < 65536 && forward.q.dim(2) < 65536 &&
         forward.q.dim(0) * forward.q.dim(2) * tiles < std::numeric_limits<int32_t>::max() &&
         std::all_of(whole.begin(), whole.end(), [](const Tensor* t) { return WholePacks(*t); });
}

template <typename T>
absl::Status Launch(CudaStream& stream, const AttentionBackwardArgs& args) {
  CUtensorMap q, dout, k, v;
  RETURN_IF_ERROR(DescribeHeads(args.forward.q, backward::kQueries, q));
  RETURN_IF_ERROR(DescribeHeads(args.dout, backward::kQueries, dout));
  RETURN_IF_ERROR(DescribeHeads(args.forward.k, backward::kKeys, k));
  RETURN_IF_ERROR(DescribeHeads(args.forward.v, backward::kKeys, v));
  backward::Params<T> p{};
  p.d = ProblemOf<HeadsView<T>>(args, ViewHeads<T>);
  p.query_tiles = static_cast<int>(CeilDiv(p.d.queries, backward::kQueries));
  p.key_tiles = static_cast<int>(CeilDiv(p.d.keys, backward::kKeys));
  const int64_t pairs = int64_t{p.d.batch} * p.d.key_heads;
  p.items = static_cast<int>(pairs * p.key_tiles);
  const int64_t processors = stream.cuda_device().multiprocessors();
  // q and dout, and dq in fp32.
  const int64_t bytes =
      int64_t{p.d.heads / p.d.key_heads} * p.d.queries * backward::kWidth * (2 + 2 + 4);
  p.pairs_at_once = static_cast<int>(std::min(
      pairs,
      std::max(CeilDiv(kItemsOfMultiprocessor * processors, p.key_tiles), kBytesAtOnce / bytes)));
  const int64_t tiles = int64_t{p.d.batch} * p.d.heads * p.query_tiles;
  auto* const scratch = static_cast<float*>(
      stream.Scratch(HopperAttentionBackwardBytes(p.d.batch, p.d.heads, p.d.queries)));
  if (scratch == nullptr) return absl::OkStatus();  // the stream has failed and says why
  p.dq = scratch;
  p.statistics = p.dq + tiles * backward::kQueries * backward::kWidth;
  p.next_item = reinterpret_cast<int*>(p.statistics + tiles * backward::kQueries * 2);

  const dim3 rows(p.query_tiles * backward::kQueries / backward::kRowsOfBlock, p.d.heads,
                  p.d.batch);
  backward::PrepareAttentionBackwardKernel<T>
      <<<rows, backward::kRowThreads, 0, stream.handle()>>>(p);
  RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "AttentionBackward: statistics"));
  const auto kernel = backward::HopperAttentionBackwardKernel<T>;
  RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      backward::kSharedBytes),
                 "AttentionBackward"));
  kernel<<<static_cast<unsigned>(std::min<int64_t>(p.items, processors)), backward::kThreads,
           backward::kSharedBytes, stream.handle()>>>(q, dout, k, v, p);
  RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "AttentionBackward"));
  const dim3 query_tiles(p.query_tiles, p.d.heads, p.d.batch);
  backward::FinishAttentionBackwardKernel<T>
      <<<query_tiles, backward::kRowThreads, 0, stream.handle()>>>(p);
  return CudaStatus(cudaGetLastError(), "AttentionBackward: dq");
}

}  // namespace

bool HopperAttentionBackward(CudaStream& stream, const AttentionBackwardArgs& args) {
  if (!Serves(stream.cuda_device(), args)) return false;
  const Tensor& q = args.forward.q;
  if (const int64_t batch = q.dim(0);
      batch > 1 &&
      HopperAttentionBackwardBytes(batch, q.dim(2), q.dim(1)) > kAttentionWorkspaceBytesMax) {
    return HopperAttentionBackward(stream, SamplesOf(args, 0, batch / 2)) &&
           HopperAttentionBackward(stream, SamplesOf(args, batch / 2, batch - batch / 2));
  }
  absl::Status launched = q.dtype() == DType::kBF16 ? Launch<__nv_bfloat16>(stream, args)
                                                    : Launch<__half>(stream, args);
  if (absl::IsUnimplemented(launched)) return false;  // of the first tensor map
  if (!launched.ok()) stream.Fail(std::move(launched));
  return true;
}

}  // namespace muster::kernels::cuda
