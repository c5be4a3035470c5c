// Linear layers. Row-major [T,N] is column-major N x T, so with weights [N,K] and inputs [T,K]
//   y^T  = W x^T       (m, n, k) = (N, T, K), the weights transposed
//   dx^T = W^T dy^T                (K, T, N)
//   dW^T = x^T dy                  (K, N, T), the gradient transposed, added in fp32 (beta = 1)
// Each is computed in the way that measures fastest: a GEMM of cuBLASLt with the epilogue (the
// activation or its gradient, the residual) fused or as a pass of its own, or one of our GEMMs
// (gemm_hopper.h). In fp32 GELU is always a pass of its own, because cuBLASLt's is less precise
// (docs/decisions/0007-gemms-are-chosen-at-the-power-limit.md). Weight gradients may be our GEMM,
// too (weight_gradient_hopper.h). Bias gradients come with our GEMMs or in a pass: cuBLASLt's
// weight gradients with that epilogue run at 467 to 596 TFLOP/s where those without reach 690 to
// 740 (H200, widths 768 to 1600), and cuBLASLt cannot combine it with GELU's gradient.
#include "kernels/gemm/linear_cuda.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/activation/activation.h"
#include "kernels/attention/rotary.h"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/gemm/gemm_hopper.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/gemm/weight_gradient_hopper.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/square_parts.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(Add)
MUSTER_TWINS(Rotary)
MUSTER_TWINS(GeluForward)
MUSTER_TWINS(Relu2Forward)
MUSTER_TWINS(Relu2Backward)
MUSTER_TWINS(SwigluForward)
MUSTER_TWINS(SwigluBackward)

namespace cuda {
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
          .d = args.dx.data(),
          .beta = args.accumulate_dx ? 1.0f : 0.0f};
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

HopperGemm OwnForward(const LinearForwardArgs& args) {
  HopperGemm own;
  own.a = args.x;
  own.b = args.w;
  own.bias = args.bias;
  if (args.epilogue == Epilogue::kNone) {
    own.out = args.y;
    if (!args.residual.empty()) {
      own.fused = Fused::kResidual;
      own.pre = args.residual;
    }
  } else if (args.epilogue == Epilogue::kRotary) {
    own.fused = args.rotary.dim(1) == 128 ? Fused::kRotary128 : Fused::kRotary64;
    own.out = args.y;
    own.rotary = args.rotary;
    own.rotary_columns = args.rotary_heads * args.rotary.dim(1);
  } else {
    own.fused = args.epilogue == Epilogue::kGelu    ? Fused::kGelu
                : args.epilogue == Epilogue::kRelu2 ? Fused::kRelu2
                                                    : Fused::kSwiglu;
    own.out = args.pre;
    own.activation = args.y;
  }
  return own;
}

HopperGemm OwnInputGradient(const LinearBackwardArgs& args) {
  HopperGemm own;
  own.transpose_b = false;
  own.a = args.dy;
  own.b = args.w;
  own.out = args.dx;
  if (!args.pre.empty()) {
    own.fused = args.activation == Epilogue::kGelu ? Fused::kGeluGradient : Fused::kRelu2Gradient;
    own.pre = args.pre;
    own.column_sums = args.pre_dbias;
    own.accumulate = args.accumulate;
  } else if (!args.packed.empty()) {
    own.fused = Fused::kSwigluGradient;
    own.pre = args.packed;
    own.out = args.d_packed;
  }
  if (args.recompute_x) own.activation = args.x;
  return own;
}

using Way = LinearPlans::Way;

absl::Status Forward(CudaStream& stream, const LinearForwardArgs& args) {
  void* workspace = stream.Scratch(LinearPlans::kWorkspaceBytes);
  if (workspace == nullptr) return stream.status();
  LinearPlans& plans = stream.cuda_device().linear_plans();
  Gemm gemm = ForwardGemm(args);
  std::vector<Way> ways;
  std::string key;
  Gemm adding = gemm;
  if (!args.residual.empty()) {
    ways.push_back([&](bool) -> absl::Status {
      RETURN_IF_ERROR(plans.Run(stream, gemm, workspace));
      cuda::Add(stream, args.residual, args.y, args.y);
      return absl::OkStatus();
    });
    adding.beta = 1;
    adding.c = args.residual.data();
    ways.push_back([&](bool) { return plans.Run(stream, adding, workspace); });
    key = absl::StrCat(plans.KeyOf(gemm), " residual");
  } else if (args.epilogue == Epilogue::kNone) {
    ways.push_back([&](bool) { return plans.Run(stream, gemm, workspace); });
    key = plans.KeyOf(gemm);
  } else if (args.epilogue == Epilogue::kRotary) {
    ways.push_back([&](bool) -> absl::Status {
      RETURN_IF_ERROR(plans.Run(stream, gemm, workspace));
      cuda::Rotary(stream, args.RotaryHeads(), args.rotary, /*inverse=*/false);
      return absl::OkStatus();
    });
    key = absl::StrCat(plans.KeyOf(gemm), " rotary ", args.rotary_heads, "x", args.rotary.dim(1),
                       " of ", args.rotary.dim(0));
  } else {
    gemm.d = args.pre.data();
    ways.push_back([&](bool) -> absl::Status {
      RETURN_IF_ERROR(plans.Run(stream, gemm, workspace));
      if (args.epilogue == Epilogue::kGelu) {
        cuda::GeluForward(stream, args.pre, args.y);
      } else if (args.epilogue == Epilogue::kRelu2) {
        cuda::Relu2Forward(stream, args.pre, args.y);
      } else {
        cuda::SwigluForward(stream, args.pre, args.y);
      }
      return absl::OkStatus();
    });
    key = absl::StrCat(plans.KeyOf(gemm), args.epilogue == Epilogue::kGelu    ? " gelu"
                                          : args.epilogue == Epilogue::kRelu2 ? " relu2"
                                                                              : " swiglu");
  }
  Gemm fused = ForwardGemm(args);
  if (args.epilogue == Epilogue::kGelu && args.x.dtype() != DType::kF32) {
    fused.epilogue = args.bias.empty() ? GemmEpilogue::kGelu : GemmEpilogue::kGeluBias;
    fused.pre = args.pre.data();
    ways.push_back([&](bool) { return plans.Run(stream, fused, workspace); });
  }
  const HopperGemm own = OwnForward(args);
  if (HopperGemmServes(stream.cuda_device(), own)) {
    ways.push_back([&](bool) { return RunHopperGemm(stream, own, nullptr); });
  }
  return plans.RunFastest(stream, key, ways);
}

// Memory that trials write instead of a tensor whose contents must be kept.
class TrialOutput {
 public:
  absl::StatusOr<Tensor> For(CudaStream& stream, bool trial, const Tensor& tensor) {
    if (!trial || tensor.empty()) return tensor;
    if (buffer_ == nullptr) {
      ASSIGN_OR_RETURN(buffer_, stream.cuda_device().Allocate(tensor.bytes()));
    }
    if (tensor.rank() == 1) return Tensor(buffer_->data(), tensor.dtype(), {tensor.dim(0)});
    return Tensor(buffer_->data(), tensor.dtype(), {tensor.dim(0), tensor.dim(1)});
  }

 private:
  std::unique_ptr<Buffer> buffer_;
};

// With `pre` there are three ways: cuBLASLt fuses GELU's gradient, and the bias gradient and the
// recomputed activation are passes of their own; one pass behind the GEMM does all three; or our
// GEMM does. `scratch` is for column sums.
absl::Status InputGradient(CudaStream& stream, const LinearBackwardArgs& args, void* workspace,
                           void* scratch) {
  LinearPlans& plans = stream.cuda_device().linear_plans();
  const Gemm plain = InputGradientGemm(args);
  if (args.accumulate_dx) return plans.Run(stream, plain, workspace);
  const HopperGemm own = OwnInputGradient(args);
  const bool gelu = !args.pre.empty() && args.activation == Epilogue::kGelu;
  const bool relu2 = !args.pre.empty() && !gelu, swiglu = !args.packed.empty();
  const bool in_place = swiglu && args.packed.data() == args.d_packed.data();
  const Tensor recomputed = args.recompute_x ? args.x : Tensor();
  TrialOutput sums, gradients;
  std::vector<Way> ways;
  ways.push_back([&](bool trial) -> absl::Status {
    RETURN_IF_ERROR(plans.Run(stream, plain, workspace));
    if (gelu) {
      ASSIGN_OR_RETURN(const Tensor dbias, sums.For(stream, trial, args.pre_dbias));
      GeluBackwardAndSum(stream, args.pre, args.dx, args.dx, recomputed, dbias, args.accumulate,
                         scratch);
    } else if (relu2) {
      cuda::Relu2Backward(stream, args.pre, args.dx, args.dx, recomputed);
    } else if (swiglu) {
      ASSIGN_OR_RETURN(const Tensor d_packed,
                       gradients.For(stream, trial && in_place, args.d_packed));
      cuda::SwigluBackward(stream, args.packed, args.dx, d_packed, recomputed);
    }
    return absl::OkStatus();
  });
  Gemm fused = plain;
  if (gelu && args.dx.dtype() != DType::kF32) {
    fused.epilogue = GemmEpilogue::kGeluGradient;
    fused.pre = args.pre.data();
    ways.push_back([&](bool trial) -> absl::Status {
      RETURN_IF_ERROR(plans.Run(stream, fused, workspace));
      if (args.recompute_x) cuda::GeluForward(stream, args.pre, args.x);
      if (args.pre_dbias.empty()) return absl::OkStatus();
      ASSIGN_OR_RETURN(const Tensor dbias, sums.For(stream, trial, args.pre_dbias));
      ColumnSum(stream, args.dx, dbias, args.accumulate, scratch);
      return absl::OkStatus();
    });
  }
  if (HopperGemmServes(stream.cuda_device(), own)) {
    ways.push_back([&](bool trial) -> absl::Status {
      HopperGemm now = own;
      ASSIGN_OR_RETURN(now.column_sums, sums.For(stream, trial, own.column_sums));
      ASSIGN_OR_RETURN(now.out, gradients.For(stream, trial && in_place, own.out));
      return RunHopperGemm(stream, now, scratch);
    });
  }
  return plans.RunFastest(
      stream,
      absl::StrCat(plans.KeyOf(plain), gelu ? " gelu'" : "", relu2 ? " relu2'" : "",
                   swiglu ? " swiglu'" : "", args.pre_dbias.empty() ? "" : " bias",
                   args.recompute_x ? " recompute" : ""),
      ways);
}

// There are two ways: cuBLASLt's GEMM, and ours, which also writes `squares` unless that is empty.
// In a trial cuBLASLt's is followed by the pass over dw that ours saves. `sum_scratch` is for the
// bias gradient.
absl::Status WeightGradientOf(CudaStream& stream, const LinearBackwardArgs& args,
                              const Tensor& squares, bool* has_squares, void* workspace,
                              void* sum_scratch) {
  LinearPlans& plans = stream.cuda_device().linear_plans();
  const Gemm gemm = WeightGradientGemm(args);
  TrialOutput gradients, sums;
  std::vector<Way> ways;
  ways.push_back([&](bool trial) -> absl::Status {
    Gemm now = gemm;
    ASSIGN_OR_RETURN(const Tensor dw, gradients.For(stream, trial && args.accumulate, args.dw));
    ASSIGN_OR_RETURN(const Tensor sum, sums.For(stream, trial, squares));
    now.d = dw.data();
    RETURN_IF_ERROR(plans.Run(stream, now, workspace));
    if (trial && !squares.empty()) SquareParts(stream, dw, sum);
    *has_squares = false;
    return absl::OkStatus();
  });
  const HopperWeightGradient own = {
      .dy = args.dy, .x = args.x, .dw = args.dw, .accumulate = args.accumulate, .squares = squares};
  if (HopperWeightGradientServes(stream.cuda_device(), own)) {
    ways.push_back([&](bool trial) -> absl::Status {
      HopperWeightGradient now = own;
      ASSIGN_OR_RETURN(now.dw, gradients.For(stream, trial && args.accumulate, args.dw));
      ASSIGN_OR_RETURN(now.squares, sums.For(stream, trial, squares));
      *has_squares = !squares.empty();
      return RunHopperWeightGradient(stream, now);
    });
  }
  RETURN_IF_ERROR(plans.RunFastest(
      stream, absl::StrCat(plans.KeyOf(gemm), " weights", squares.empty() ? "" : " squares"),
      ways));
  if (!args.dbias.empty()) ColumnSum(stream, args.dy, args.dbias, args.accumulate, sum_scratch);
  return absl::OkStatus();
}

absl::Status Backward(CudaStream& stream, const LinearBackwardArgs& args, const Tensor& squares,
                      bool* has_squares) {
  const auto sum_bytes = [&](const Tensor& sum, const Tensor& of) {
    return sum.empty() ? 0 : ColumnSumScratchBytes(stream.cuda_device(), of.dim(0), of.dim(1));
  };
  int64_t extra = std::max(sum_bytes(args.dbias, args.dy), sum_bytes(args.pre_dbias, args.dx));
  if (!args.dx.empty()) {
    extra = std::max(extra, HopperGemmScratchBytes(OwnInputGradient(args)));
  }
  auto* workspace = static_cast<char*>(stream.Scratch(LinearPlans::kWorkspaceBytes + extra));
  if (workspace == nullptr) return stream.status();
  char* const scratch = workspace + LinearPlans::kWorkspaceBytes;
  // dx comes first, because x may be recomputed with it.
  if (!args.dx.empty()) RETURN_IF_ERROR(InputGradient(stream, args, workspace, scratch));
  if (args.dw.empty()) return absl::OkStatus();
  return WeightGradientOf(stream, args, squares, has_squares, workspace, scratch);
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
  bool has_squares = false;  // none are asked for
  if (const absl::Status status = Backward(cuda, args, Tensor(), &has_squares); !status.ok()) {
    cuda.Fail(Annotate(
        status, absl::StrCat("LinearBackward of ", args.dy.ToString(), " by ", args.w.ToString())));
  }
}

void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* has_squares) {
  CudaStream& cuda = CudaStream::Of(stream);
  *has_squares = false;
  if (args.dy.elements() == 0) return;
  // Only the shape of the weights is used.
  const LinearBackwardArgs backward = {
      .dy = args.dy,
      .x = args.x,
      .w = Tensor(args.dw.data(), args.dy.dtype(), {args.dw.dim(0), args.dw.dim(1)}),
      .dw = args.dw,
      .dbias = args.dbias,
      .accumulate = args.accumulate};
  if (const absl::Status status = Backward(cuda, backward, args.squares, has_squares);
      !status.ok()) {
    cuda.Fail(Annotate(
        status, absl::StrCat("WeightGradient of ", args.dy.ToString(), " by ", args.x.ToString())));
  }
}

}  // namespace cuda
}  // namespace muster::kernels
