// Linear layers. Row-major [T,N] is column-major N x T, so with weights [N,K] and inputs [T,K]
//   y^T  = W x^T       (m, n, k) = (N, T, K), the weights transposed
//   dx^T = W^T dy^T                (K, T, N)
//   dW^T = x^T dy                  (K, N, T), the gradient transposed, added in fp32 (beta = 1)
// GELU and its gradient are fused into the product where that measures faster than a pass of their
// own; never in fp32, where the fused one costs digits (docs/benchmarks/h200-correctness.md). Bias
// gradients never are: cuBLASLt's weight gradients with that epilogue run at 467 to 596 TFLOP/s
// where those without reach 690 to 740 (H200, widths 768 to 1600), and none adds it to GELU's
// gradient.
#include "kernels/linear_cuda.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/column_sum.cuh"
#include "kernels/ops_cuda.h"

namespace muster::kernels::cuda {
namespace {

Gemm ForwardGemm(const LinearForwardArgs& args) {
  return {.m = args.w.dim(0),
          .n = args.x.dim(0),
          .k = args.w.dim(1),
          .transpose_a = true,
          .transpose_b = false,
          .input = args.x.dtype(),
          .output = args.y.dtype(),
          .a = args.w.data(),
          .b = args.x.data(),
          .d = args.y.data(),
          .epilogue = args.bias.empty() ? GemmEpilogue::kNone : GemmEpilogue::kBias,
          .bias = args.bias.data()};
}

Gemm InputGradientGemm(const LinearBackwardArgs& args) {
  return {.m = args.w.dim(1),
          .n = args.dy.dim(0),
          .k = args.w.dim(0),
          .transpose_a = false,
          .transpose_b = false,
          .input = args.dy.dtype(),
          .output = args.dx.dtype(),
          .a = args.w.data(),
          .b = args.dy.data(),
          .d = args.dx.data()};
}

Gemm WeightGradientGemm(const LinearBackwardArgs& args) {
  return {.m = args.w.dim(1),
          .n = args.w.dim(0),
          .k = args.dy.dim(0),
          .transpose_a = false,
          .transpose_b = true,
          .input = args.dy.dtype(),
          .output = DType::kF32,
          .a = args.x.data(),
          .b = args.dy.data(),
          .d = args.dw.data(),
          .beta = args.accumulate ? 1.0f : 0.0f};
}

absl::Status Forward(CudaStream& stream, const LinearForwardArgs& args) {
  void* workspace = stream.Scratch(LinearPlans::kWorkspaceBytes);
  if (workspace == nullptr) return stream.status();
  LinearPlans& plans = stream.cuda_device().linear_plans();
  const Gemm plain = ForwardGemm(args);
  if (args.epilogue == Epilogue::kNone) return plans.Run(stream, plain, workspace);
  Gemm fused = plain;
  fused.epilogue = args.bias.empty() ? GemmEpilogue::kGelu : GemmEpilogue::kGeluBias;
  fused.pre = args.pre.data();
  Gemm before = plain;
  before.d = args.pre.data();
  const auto run_fused = [&] { return plans.Run(stream, fused, workspace); };
  const auto run_apart = [&]() -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, before, workspace));
    cuda::GeluForward(stream, args.pre, args.y);
    return absl::OkStatus();
  };
  if (args.x.dtype() == DType::kF32) return run_apart();
  return plans.FirstIsFaster(stream, plans.KeyOf(fused), run_fused, run_apart) ? run_fused()
                                                                               : run_apart();
}

// With `pre`, either GELU's gradient is fused into the product, and the bias gradient and the
// recomputed activation are passes of their own, or one pass behind the product does all three.
// `scratch`: of a column sum.
absl::Status InputGradient(CudaStream& stream, const LinearBackwardArgs& args, void* workspace,
                           void* scratch) {
  LinearPlans& plans = stream.cuda_device().linear_plans();
  const Gemm plain = InputGradientGemm(args);
  if (args.pre.empty()) return plans.Run(stream, plain, workspace);
  Gemm fused = plain;
  fused.epilogue = GemmEpilogue::kGeluGradient;
  fused.pre = args.pre.data();
  const Tensor recomputed = args.recompute_x ? args.x : Tensor();
  const auto run_fused = [&](const Tensor& dbias) -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, fused, workspace));
    if (args.recompute_x) cuda::GeluForward(stream, args.pre, args.x);
    if (!dbias.empty()) ColumnSum(stream, args.dx, dbias, args.accumulate, scratch);
    return absl::OkStatus();
  };
  const auto run_apart = [&](const Tensor& dbias) -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, plain, workspace));
    GeluBackwardAndSum(stream, args.pre, args.dx, args.dx, recomputed, dbias, args.accumulate,
                       scratch);
    return absl::OkStatus();
  };
  if (args.dx.dtype() == DType::kF32) return run_apart(args.pre_dbias);
  // Trials add into a buffer of their own.
  std::unique_ptr<Buffer> trial;
  const auto trial_dbias = [&]() -> absl::StatusOr<Tensor> {
    if (args.pre_dbias.empty()) return Tensor();
    if (trial == nullptr) {
      ASSIGN_OR_RETURN(trial, stream.cuda_device().Allocate(args.pre_dbias.bytes()));
    }
    return Tensor(trial->data(), DType::kF32, {args.pre_dbias.elements()});
  };
  const bool fuse = plans.FirstIsFaster(
      stream,
      absl::StrCat(plans.KeyOf(fused), args.pre_dbias.empty() ? "" : " bias",
                   args.recompute_x ? " recompute" : ""),
      [&]() -> absl::Status {
        ASSIGN_OR_RETURN(const Tensor dbias, trial_dbias());
        return run_fused(dbias);
      },
      [&]() -> absl::Status {
        ASSIGN_OR_RETURN(const Tensor dbias, trial_dbias());
        return run_apart(dbias);
      });
  return fuse ? run_fused(args.pre_dbias) : run_apart(args.pre_dbias);
}

absl::Status Backward(CudaStream& stream, const LinearBackwardArgs& args) {
  const auto sum_bytes = [&](const Tensor& sum, const Tensor& of) {
    return sum.empty() ? 0 : ColumnSumScratchBytes(stream.cuda_device(), of.dim(0), of.dim(1));
  };
  const int64_t extra =
      std::max(sum_bytes(args.dbias, args.dy), sum_bytes(args.pre_dbias, args.dx));
  auto* workspace = static_cast<char*>(stream.Scratch(LinearPlans::kWorkspaceBytes + extra));
  if (workspace == nullptr) return stream.status();
  char* const scratch = workspace + LinearPlans::kWorkspaceBytes;
  // dx first: x may be recomputed on the way.
  if (!args.dx.empty()) RETURN_IF_ERROR(InputGradient(stream, args, workspace, scratch));
  if (args.dw.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(
      stream.cuda_device().linear_plans().Run(stream, WeightGradientGemm(args), workspace));
  if (!args.dbias.empty()) ColumnSum(stream, args.dy, args.dbias, args.accumulate, scratch);
  return absl::OkStatus();
}

}  // namespace

void LinearForward(Stream& stream, const LinearForwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.y.elements() == 0) return;
  if (const absl::Status status = Forward(cuda, args); !status.ok()) {
    cuda.Fail(Annotate(
        status, absl::StrCat("LinearForward of ", args.x.ToString(), " by ", args.w.ToString())));
  }
}

void LinearBackward(Stream& stream, const LinearBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.dy.elements() == 0) return;
  if (const absl::Status status = Backward(cuda, args); !status.ok()) {
    cuda.Fail(Annotate(
        status, absl::StrCat("LinearBackward of ", args.dy.ToString(), " by ", args.w.ToString())));
  }
}

}  // namespace muster::kernels::cuda
