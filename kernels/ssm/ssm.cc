// Checks the arguments of the ops of ssm.h, then calls the implementation of the stream's device.
#include "kernels/ssm/ssm.h"

#include <initializer_list>

#include "base/check.h"
#include "kernels/ssm/ssm_cpu.h"

namespace muster::kernels {
namespace {

// Empty tensors are optional ones.
void CheckShape(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  CHECK_EQ(tensor.rank(), static_cast<int>(shape.size())) << name << " " << tensor.ToString();
  int i = 0;
  for (const int64_t size : shape) {
    CHECK_EQ(tensor.dim(i), size) << name << " " << tensor.ToString() << ", dimension " << i;
    ++i;
  }
  CHECK(tensor.dim(tensor.rank() - 1) <= 1 || tensor.stride(tensor.rank() - 1) == 1)
      << name << ": columns are not dense";
}
void CheckOptional(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  if (!tensor.empty()) CheckShape(tensor, shape, name);
}
void CheckParameter(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  CheckShape(tensor, shape, name);
  CHECK(tensor.contiguous() && tensor.dtype() == DType::kF32) << name << " " << tensor.ToString();
}

void CheckConv(const CausalConvArgs& args) {
  CHECK_EQ(args.x.rank(), 3);
  CHECK_EQ(args.weight.rank(), 2);
  const int64_t b = args.x.dim(0), s = args.x.dim(1), w = args.x.dim(2), k = args.weight.dim(1);
  CHECK(k >= 2 && k <= 4) << "taps " << k;
  CheckParameter(args.weight, {w, k}, "weight");
  CheckParameter(args.bias, {w}, "bias");
  CheckOptional(args.halo, {b, k - 1, w}, "halo");
  CheckOptional(args.documents, {b, s}, "documents");
}

void CheckSsd(const SsdArgs& args) {
  CHECK_EQ(args.x.rank(), 4);
  CHECK_EQ(args.b.rank(), 4);
  const int64_t b = args.x.dim(0), s = args.x.dim(1), h = args.x.dim(2), p = args.x.dim(3);
  const int64_t g = args.b.dim(2), n = args.b.dim(3);
  CHECK(g >= 1 && h % g == 0) << h << " heads in " << g << " groups";
  CHECK_GE(args.chunk, 1);
  CheckShape(args.x, {b, s, h, p}, "x");
  CheckShape(args.dt, {b, s, h}, "dt");
  CheckShape(args.b, {b, s, g, n}, "b");
  CheckShape(args.c, {b, s, g, n}, "c");
  CheckParameter(args.dt_bias, {h}, "dt_bias");
  CheckParameter(args.a_log, {h}, "a_log");
  CheckParameter(args.d, {h}, "d");
  if (!args.initial_state.empty())
    CheckParameter(args.initial_state, {b, h, p, n}, "initial_state");
  CheckOptional(args.documents, {b, s}, "documents");
  if (!args.states.empty()) {
    CheckParameter(args.states, {b, (s + args.chunk - 1) / args.chunk, h, p * n}, "states");
  }
}

void CheckGatedNorm(const GatedRmsNormArgs& args) {
  CHECK_EQ(args.y.rank(), 2);
  const int64_t t = args.y.dim(0), w = args.y.dim(1);
  CHECK(args.groups >= 1 && w % args.groups == 0)
      << w << " columns in " << args.groups << " groups";
  CheckShape(args.z, {t, w}, "z");
  CheckParameter(args.gamma, {w}, "gamma");
  CheckParameter(args.rstd, {t, args.groups}, "rstd");
}

void CheckHost(Stream& stream) {
  CHECK(stream.device().kind() == DeviceKind::kCpu) << "state-space ops run on the host alone";
}

}  // namespace

void CausalConvForward(Stream& stream, const CausalConvArgs& args) {
  CheckHost(stream);
  CheckConv(args);
  CheckShape(args.y, {args.x.dim(0), args.x.dim(1), args.x.dim(2)}, "y");
  cpu::CausalConvForward(stream, args);
}

void CausalConvBackward(Stream& stream, const CausalConvBackwardArgs& args) {
  CheckHost(stream);
  CheckConv(args.forward);
  const Tensor& x = args.forward.x;
  const int64_t taps = args.forward.weight.dim(1);
  CheckShape(args.dy, {x.dim(0), x.dim(1), x.dim(2)}, "dy");
  CheckShape(args.dx, {x.dim(0), x.dim(1), x.dim(2)}, "dx");
  CheckOptional(args.d_halo, {x.dim(0), taps - 1, x.dim(2)}, "d_halo");
  CheckParameter(args.dweight, {x.dim(2), taps}, "dweight");
  CheckParameter(args.dbias, {x.dim(2)}, "dbias");
  cpu::CausalConvBackward(stream, args);
}

void SsdForward(Stream& stream, const SsdArgs& args) {
  CheckHost(stream);
  CheckSsd(args);
  const Tensor& x = args.x;
  CheckShape(args.y, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, "y");
  if (!args.final_state.empty()) {
    CheckParameter(args.final_state, {x.dim(0), x.dim(2), x.dim(3), args.b.dim(3)}, "final_state");
  }
  cpu::SsdForward(stream, args);
}

void SsdBackward(Stream& stream, const SsdBackwardArgs& args) {
  CheckHost(stream);
  CheckSsd(args.forward);
  CHECK(!args.forward.states.empty()) << "backward needs the states that forward stores";
  const Tensor& x = args.forward.x;
  const Tensor& b = args.forward.b;
  CheckShape(args.dy, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, "dy");
  CheckShape(args.dx, {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, "dx");
  CheckShape(args.ddt, {x.dim(0), x.dim(1), x.dim(2)}, "ddt");
  CheckShape(args.db, {b.dim(0), b.dim(1), b.dim(2), b.dim(3)}, "db");
  CheckShape(args.dc, {b.dim(0), b.dim(1), b.dim(2), b.dim(3)}, "dc");
  for (const Tensor& state : {args.d_final_state, args.d_initial_state}) {
    if (!state.empty()) CheckParameter(state, {x.dim(0), x.dim(2), x.dim(3), b.dim(3)}, "state");
  }
  CheckParameter(args.d_dt_bias, {x.dim(2)}, "d_dt_bias");
  CheckParameter(args.d_a_log, {x.dim(2)}, "d_a_log");
  CheckParameter(args.dd, {x.dim(2)}, "dd");
  cpu::SsdBackward(stream, args);
}

void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args) {
  CheckHost(stream);
  CheckGatedNorm(args);
  CheckShape(args.out, {args.y.dim(0), args.y.dim(1)}, "out");
  cpu::GatedRmsNormForward(stream, args);
}

void GatedRmsNormBackward(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  CheckHost(stream);
  CheckGatedNorm(args.forward);
  const Tensor& y = args.forward.y;
  for (const Tensor& tensor : {args.dout, args.dy, args.dz}) {
    CheckShape(tensor, {y.dim(0), y.dim(1)}, "gradient");
  }
  CheckParameter(args.dgamma, {y.dim(1)}, "dgamma");
  cpu::GatedRmsNormBackward(stream, args);
}

}  // namespace muster::kernels
