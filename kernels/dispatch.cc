// Every public op: checks the arguments, then picks the host or the CUDA twin by the stream's
// device.
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/ops.h"
#include "kernels/ops_cpu.h"
#include "kernels/tensor.h"

#ifdef MUSTER_KERNELS_CUDA
#include "kernels/ops_cuda.h"
#define MUSTER_DISPATCH(op, ...)                     \
  if (stream.device().kind() == DeviceKind::kCuda) { \
    cuda::op(stream, __VA_ARGS__);                   \
  } else {                                           \
    cpu::op(stream, __VA_ARGS__);                    \
  }
#else
#define MUSTER_DISPATCH(op, ...)                                                \
  CHECK(stream.device().kind() == DeviceKind::kCpu)                             \
      << #op " was called on a stream of " << stream.device().name()            \
      << ", but this build has no CUDA engine (configure with MUSTER_CUDA=ON)"; \
  cpu::op(stream, __VA_ARGS__)
#endif

namespace muster::kernels {
namespace {

void CheckWeightGradient(const WeightGradientArgs& args) {
  CHECK(args.dy.rank() == 2 && args.x.rank() == 2);
  // Of its weights only the shape is looked at.
  CheckLinear({.dy = args.dy,
               .x = args.x,
               .w = Tensor(args.dw.data(), args.dy.dtype(), {args.dy.dim(1), args.x.dim(1)}),
               .dw = args.dw,
               .dbias = args.dbias});
  CHECK(!args.dw.empty());
  CheckReduction(args.dw, args.squares);
  CHECK_EQ(args.squares.elements(), 2 * kSquareParts);
}

}  // namespace

void Zero(Stream& stream, Tensor out) {
  CHECK(out.contiguous()) << out.ToString();
  MUSTER_DISPATCH(Zero, out);
}

void Copy(Stream& stream, Tensor from, Tensor to) {
  CheckCopy(from, to);
  MUSTER_DISPATCH(Copy, from, to);
}

void Cast(Stream& stream, Tensor from, Tensor to) {
  CheckCast(from, to);
  MUSTER_DISPATCH(Cast, from, to);
}

void Axpy(Stream& stream, float alpha, Tensor x, Tensor y) {
  CheckSameFp32(x, y);
  MUSTER_DISPATCH(Axpy, alpha, x, y);
}

void Scale(Stream& stream, float alpha, Tensor x) {
  CheckFp32(x);
  MUSTER_DISPATCH(Scale, alpha, x);
}

void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate) {
  CheckCopyStrided(from, to);
  MUSTER_DISPATCH(CopyStrided, from, to, accumulate);
}

void Add(Stream& stream, Tensor a, Tensor b, Tensor out) {
  CheckAdd(a, b, out);
  MUSTER_DISPATCH(Add, a, b, out);
}

void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out) {
  CHECK(!wte.empty());
  CheckEmbedding(tokens, wte, wpe, sequence, out);
  MUSTER_DISPATCH(EmbeddingForward, tokens, wte, wpe, sequence, out);
}

void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups) {
  CheckGroupTokens(tokens, vocab, groups);
  MUSTER_DISPATCH(GroupTokens, tokens, vocab, groups);
}

void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe) {
  CheckEmbeddingBackward(groups, d_wte, d_wpe, sequence, dout);
  MUSTER_DISPATCH(EmbeddingBackward, groups, dout, sequence, d_wte, d_wpe);
}

void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out) {
  CheckShardTokens(tokens, first, count, out);
  MUSTER_DISPATCH(ShardTokens, tokens, first, count, out);
}

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  CheckLayerNorm(args);
  MUSTER_DISPATCH(LayerNormForward, args);
}

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  CheckLayerNorm(args);
  MUSTER_DISPATCH(LayerNormBackward, args);
}

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  CheckRmsNorm(args);
  MUSTER_DISPATCH(RmsNormForward, args);
}

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  CheckRmsNorm(args);
  MUSTER_DISPATCH(RmsNormBackward, args);
}

void RotaryTable(Stream& stream, const RotaryTableArgs& args) {
  CheckRotaryTable(args);
  MUSTER_DISPATCH(RotaryTable, args);
}

void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse) {
  CheckRotary(x, table);
  MUSTER_DISPATCH(Rotary, x, table, inverse);
}

void Dropout(Stream& stream, const DropoutArgs& args) {
  CheckDropout(args);
  MUSTER_DISPATCH(Dropout, args);
}

void SwigluForward(Stream& stream, Tensor packed, Tensor y) {
  CheckSwiglu(packed, y);
  MUSTER_DISPATCH(SwigluForward, packed, y);
}

void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y) {
  CheckSwiglu(packed, dy);
  CheckSwiglu(d_packed, dy);
  if (!y.empty()) CheckSwiglu(packed, y);
  MUSTER_DISPATCH(SwigluBackward, packed, dy, d_packed, y);
}

void LinearForward(Stream& stream, const LinearForwardArgs& args) {
  CheckLinear(args);
  MUSTER_DISPATCH(LinearForward, args);
}

void LinearBackward(Stream& stream, const LinearBackwardArgs& args) {
  CheckLinear(args);
  MUSTER_DISPATCH(LinearBackward, args);
}

void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* left) {
  CheckWeightGradient(args);
  MUSTER_DISPATCH(WeightGradient, args, left);
}

void GeluForward(Stream& stream, Tensor x, Tensor y) {
  CheckGelu(x, y);
  MUSTER_DISPATCH(GeluForward, x, y);
}

void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx) {
  CheckGelu(x, dy);
  CheckGelu(x, dx);
  MUSTER_DISPATCH(GeluBackward, x, dy, dx);
}

void AttentionForward(Stream& stream, const AttentionArgs& args) {
  CheckAttention(args);
  MUSTER_DISPATCH(AttentionForward, args);
}

void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args) {
  CheckAttention(args);
  MUSTER_DISPATCH(AttentionBackward, args);
}

void AttentionMerge(Stream& stream, const AttentionMergeArgs& args) {
  CheckAttention(args);
  MUSTER_DISPATCH(AttentionMerge, args);
}

void CrossEntropy(Stream& stream, const CrossEntropyArgs& args) {
  CheckCrossEntropy(args);
  MUSTER_DISPATCH(CrossEntropy, args);
}

void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args) {
  CheckCrossEntropy(args);
  MUSTER_DISPATCH(CrossEntropyStats, args);
}

void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args) {
  CheckCrossEntropy(args);
  MUSTER_DISPATCH(CrossEntropyMerge, args);
}

void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  CheckReduction(x, out);
  MUSTER_DISPATCH(Sum, x, out, accumulate);
}

void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  CheckReduction(x, out);
  MUSTER_DISPATCH(SumSquares, x, out, accumulate);
}

void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  CheckReduction(x, out);
  CHECK_EQ(out.elements(), 2);
  MUSTER_DISPATCH(SumSquaresPair, x, out, accumulate);
}

void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate) {
  for (const Tensor& x : of) CheckReduction(x, out);
  CHECK_EQ(out.elements(), 2);
  MUSTER_DISPATCH(SumSquaresPair, of, out, accumulate);
}

void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate) {
  CheckReduction(pairs, out);
  CHECK_EQ(out.elements(), 2);
  MUSTER_DISPATCH(SumPairs, pairs, out, accumulate);
}

void SumParts(Stream& stream, Tensor in, Tensor out) {
  CheckSumParts(in, out);
  MUSTER_DISPATCH(SumParts, in, out);
}

void PrepareStep(Stream& stream, const PrepareStepArgs& args) {
  CheckPrepareStep(args);
  MUSTER_DISPATCH(PrepareStep, args);
}

void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars) {
  CheckReduction(square_sum, norm);
  CHECK(scalars != nullptr);
  MUSTER_DISPATCH(ClipCoefficient, square_sum, clip_norm, norm, scalars);
}

void AdamW(Stream& stream, const AdamWArgs& args) {
  CheckAdamW(args);
  MUSTER_DISPATCH(AdamW, args);
}

void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower) {
  CheckHalves(master, upper, lower);
  MUSTER_DISPATCH(SplitMaster, master, upper, lower);
}

void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master) {
  CHECK(!lower.empty());
  CheckHalves(master, upper, lower);
  MUSTER_DISPATCH(JoinMaster, upper, lower, master);
}

void TakeLargest(Stream& stream, const TakeLargestArgs& args) {
  CheckTakeLargest(args);
  MUSTER_DISPATCH(TakeLargest, args);
}

void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out) {
  CheckSumSparse(entries, first, out);
  MUSTER_DISPATCH(SumSparse, entries, first, out);
}

void TakeSigns(Stream& stream, Tensor x, Tensor packed) {
  CheckTakeSigns(x, packed);
  MUSTER_DISPATCH(TakeSigns, x, packed);
}

void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out) {
  CheckSumSigns(packed, first, out);
  MUSTER_DISPATCH(SumSigns, packed, first, out);
}

#ifndef MUSTER_KERNELS_CUDA
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal, const CudaOptions&) {
  return absl::UnimplementedError(absl::StrCat(
      "cuda:", ordinal, ": this build has no CUDA engine (configure with MUSTER_CUDA=ON)"));
}
#endif

}  // namespace muster::kernels
