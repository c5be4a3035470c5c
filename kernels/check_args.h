// The requirements of ops.h that hold on every device: shapes agree, dtypes are as stated, tensors
// are contiguous where they must be. A violation is a bug of the caller and ends the process.
#ifndef MUSTER_KERNELS_CHECK_ARGS_H_
#define MUSTER_KERNELS_CHECK_ARGS_H_

#include <cstdint>

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace muster::kernels {

void CheckCopy(const Tensor& from, const Tensor& to);
void CheckCast(const Tensor& from, const Tensor& to);
void CheckCopyStrided(const Tensor& from, const Tensor& to);
void CheckFp32(const Tensor& x);
void CheckSameFp32(const Tensor& x, const Tensor& y);
void CheckEmbedding(const Tensor& tokens, const Tensor& wte, const Tensor& wpe, int64_t sequence,
                    const Tensor& out);
void CheckGroupTokens(const Tensor& tokens, int64_t vocab, const Tensor& groups);
void CheckEmbeddingBackward(const Tensor& groups, const Tensor& d_wte, const Tensor& d_wpe,
                            int64_t sequence, const Tensor& dout);
void CheckLayerNorm(const LayerNormForwardArgs& args);
void CheckLayerNorm(const LayerNormBackwardArgs& args);
void CheckRmsNorm(const RmsNormForwardArgs& args);
void CheckRmsNorm(const RmsNormBackwardArgs& args);
void CheckRotaryTable(const RotaryTableArgs& args);
void CheckRotary(const Tensor& x, const Tensor& table);
void CheckDropout(const DropoutArgs& args);
void CheckSwiglu(const Tensor& packed, const Tensor& y);
void CheckAdd(const Tensor& a, const Tensor& b, const Tensor& out);
void CheckLinear(const LinearForwardArgs& args);
void CheckLinear(const LinearBackwardArgs& args);
void CheckGelu(const Tensor& x, const Tensor& y);
void CheckAttention(const AttentionArgs& args);
void CheckAttention(const AttentionBackwardArgs& args);
void CheckAttention(const AttentionMergeArgs& args);
void CheckCrossEntropy(const CrossEntropyArgs& args);
void CheckCrossEntropy(const CrossEntropyStatsArgs& args);
void CheckCrossEntropy(const CrossEntropyMergeArgs& args);
void CheckShardTokens(const Tensor& tokens, int64_t first, int64_t count, const Tensor& out);
void CheckReduction(const Tensor& x, const Tensor& out);
void CheckSumParts(const Tensor& in, const Tensor& out);
void CheckPrepareStep(const PrepareStepArgs& args);
// Requires `lower` or nothing, of a master weight in two halves.
void CheckHalves(const Tensor& master, const Tensor& upper, const Tensor& lower);
void CheckAdamW(const AdamWArgs& args);
void CheckTakeLargest(const TakeLargestArgs& args);
void CheckSumSparse(const Tensor& entries, int64_t first, const Tensor& out);
void CheckTakeSigns(const Tensor& x, const Tensor& packed);
void CheckSumSigns(const Tensor& packed, int64_t first, const Tensor& out);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_CHECK_ARGS_H_
