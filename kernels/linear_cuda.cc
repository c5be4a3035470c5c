// Linear layers. Row-major [T,N] is column-major N x T, so with weights [N,K] and inputs [T,K]
//   y^T  = W x^T       (m, n, k) = (N, T, K), the weights transposed
//   dx^T = W^T dy^T                (K, T, N)
//   dW^T = x^T dy                  (K, N, T), the gradient transposed, added in fp32 (beta = 1)
// Epilogues are fused into the product where that measures faster than a pass of their own.
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
          .beta = 1};
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
  return plans.FirstIsFaster(stream, plans.KeyOf(fused), run_fused, run_apart) ? run_fused()
                                                                               : run_apart();
}

absl::Status InputGradient(CudaStream& stream, const LinearBackwardArgs& args, void* workspace) {
  LinearPlans& plans = stream.cuda_device().linear_plans();
  const Gemm plain = InputGradientGemm(args);
  if (args.pre.empty()) return plans.Run(stream, plain, workspace);
  Gemm fused = plain;
  fused.epilogue = GemmEpilogue::kGeluGradient;
  fused.pre = args.pre.data();
  const auto run_fused = [&] { return plans.Run(stream, fused, workspace); };
  const auto run_apart = [&]() -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, plain, workspace));
    cuda::GeluBackward(stream, args.pre, args.dx, args.dx);
    return absl::OkStatus();
  };
  return plans.FirstIsFaster(stream, plans.KeyOf(fused), run_fused, run_apart) ? run_fused()
                                                                               : run_apart();
}

// `scratch` follows the workspace: partial sums, or the bias gradient of the fused product.
absl::Status WeightGradient(CudaStream& stream, const LinearBackwardArgs& args, void* workspace,
                            void* scratch) {
  LinearPlans& plans = stream.cuda_device().linear_plans();
  const Gemm plain = WeightGradientGemm(args);
  if (args.dbias.empty()) return plans.Run(stream, plain, workspace);
  Gemm fused = plain;
  fused.epilogue = GemmEpilogue::kBiasGradient;
  fused.bias = scratch;
  const Tensor product_bias(scratch, DType::kF32, {args.dbias.elements()});
  const auto run_fused = [&](const Gemm& gemm, const Tensor& dbias) -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, gemm, workspace));
    cuda::Axpy(stream, 1, product_bias, dbias);
    return absl::OkStatus();
  };
  const auto run_apart = [&](const Gemm& gemm, const Tensor& dbias) -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, gemm, workspace));
    ColumnSum(stream, args.dy, dbias, scratch);
    return absl::OkStatus();
  };
  // Trials add into buffers of their own.
  std::unique_ptr<Buffer> trial_dw, trial_dbias;
  const auto trial = [&](const auto& run, Gemm gemm) -> absl::Status {
    if (trial_dw == nullptr) {
      ASSIGN_OR_RETURN(trial_dw, stream.cuda_device().Allocate(args.dw.bytes()));
      ASSIGN_OR_RETURN(trial_dbias, stream.cuda_device().Allocate(args.dbias.bytes()));
    }
    gemm.d = trial_dw->data();
    return run(gemm, Tensor(trial_dbias->data(), DType::kF32, {args.dbias.elements()}));
  };
  const bool fuse = plans.FirstIsFaster(
      stream, plans.KeyOf(fused), [&] { return trial(run_fused, fused); },
      [&] { return trial(run_apart, plain); });
  return fuse ? run_fused(fused, args.dbias) : run_apart(plain, args.dbias);
}

absl::Status Backward(CudaStream& stream, const LinearBackwardArgs& args) {
  int64_t extra = 0;
  if (!args.dbias.empty()) {
    extra = std::max(ColumnSumScratchBytes(stream.cuda_device(), args.dy.dim(0), args.dy.dim(1)),
                     args.dbias.bytes());
  }
  auto* workspace = static_cast<char*>(stream.Scratch(LinearPlans::kWorkspaceBytes + extra));
  if (workspace == nullptr) return stream.status();
  RETURN_IF_ERROR(
      WeightGradient(stream, args, workspace, workspace + LinearPlans::kWorkspaceBytes));
  return args.dx.empty() ? absl::OkStatus() : InputGradient(stream, args, workspace);
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
