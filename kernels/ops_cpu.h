// The host twins of ops.h, with the same meaning and arguments; called by dispatch.cc alone, which
// has checked the arguments (check_args.h). fp32 only, but for Copy, CopyStrided, Cast and
// AttentionMerge (kI32 tokens and targets aside).
#ifndef MUSTER_KERNELS_OPS_CPU_H_
#define MUSTER_KERNELS_OPS_CPU_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {

void Zero(Stream& stream, Tensor out);
void Copy(Stream& stream, Tensor from, Tensor to);
void Cast(Stream& stream, Tensor from, Tensor to);
void Axpy(Stream& stream, float alpha, Tensor x, Tensor y);
void Scale(Stream& stream, float alpha, Tensor x);
void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate);
void Add(Stream& stream, Tensor a, Tensor b, Tensor out);
void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out);
void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups);
void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe);
void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out);
void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args);
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args);
void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args);
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args);
void RotaryTable(Stream& stream, const RotaryTableArgs& args);
void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse);
void Dropout(Stream& stream, const DropoutArgs& args);
void SwigluForward(Stream& stream, Tensor packed, Tensor y);
void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y);
void LinearForward(Stream& stream, const LinearForwardArgs& args);
void LinearBackward(Stream& stream, const LinearBackwardArgs& args);
void GeluForward(Stream& stream, Tensor x, Tensor y);
void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx);
void AttentionForward(Stream& stream, const AttentionArgs& args);
void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args);
void AttentionMerge(Stream& stream, const AttentionMergeArgs& args);
void CrossEntropy(Stream& stream, const CrossEntropyArgs& args);
void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args);
void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args);
void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate);
void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate);
void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate);
void SumParts(Stream& stream, Tensor in, Tensor out);
void PrepareStep(Stream& stream, const PrepareStepArgs& args);
void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars);
void AdamW(Stream& stream, const AdamWArgs& args);
void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower);
void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master);
void TakeLargest(Stream& stream, const TakeLargestArgs& args);
void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out);
void TakeSigns(Stream& stream, Tensor x, Tensor packed);
void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out);

}  // namespace muster::kernels::cpu

#endif  // MUSTER_KERNELS_OPS_CPU_H_
