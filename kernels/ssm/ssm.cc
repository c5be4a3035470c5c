// Checks the arguments of the ops of ssm.h, then calls the implementation of the stream's device.
#include "kernels/ssm/ssm.h"

#include <initializer_list>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(CausalConvForward)
MUSTER_TWINS(CausalConvBackward)
MUSTER_TWINS(SsdForward)
MUSTER_TWINS(SsdBackward)
MUSTER_TWINS(SsdForwardStates)
MUSTER_TWINS(SsdForwardOutputs)
MUSTER_TWINS(SsdBackwardStates)
MUSTER_TWINS(SsdBackwardInputs)
MUSTER_TWINS(SsdPassStates)
MUSTER_TWINS(SegmentDocuments)
MUSTER_TWINS(GatedRmsNormForward)
MUSTER_TWINS(GatedRmsNormSums)
MUSTER_TWINS(GatedRmsNormUnscaled)
MUSTER_TWINS(RmsScaleRows)
MUSTER_TWINS(GatedRmsNormBackward)
MUSTER_TWINS(GatedRmsNormBackwardSums)

namespace {

// Columns are dense; rows may have any stride.
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
// An activation of the op's dtype.
void CheckAct(const Tensor& tensor, DType act, std::initializer_list<int64_t> shape,
              const char* name) {
  CHECK(tensor.dtype() == act && IsActivation(act)) << name << " " << tensor.ToString();
  CheckShape(tensor, shape, name);
}
void CheckDocuments(const Tensor& tensor, int64_t samples, int64_t positions) {
  if (tensor.empty()) return;
  CHECK(tensor.dtype() == DType::kI32) << "documents " << tensor.ToString();
  CheckShape(tensor, {samples, positions}, "documents");
}
void CheckParameter(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  CheckShape(tensor, shape, name);
  CHECK(tensor.contiguous() && tensor.dtype() == DType::kF32) << name << " " << tensor.ToString();
}

void CheckConv(const CausalConvArgs& args) {
  CHECK_EQ(args.x.rank(), 3);
  CHECK_EQ(args.weight.rank(), 2);
  const int64_t b = args.x.dim(0), s = args.x.dim(1), w = args.x.dim(2), k = args.weight.dim(1);
  const DType act = args.x.dtype();
  CHECK(k >= 2 && k <= 4) << "taps " << k;
  CheckAct(args.x, act, {b, s, w}, "x");
  CheckParameter(args.weight, {w, k}, "weight");
  CheckParameter(args.bias, {w}, "bias");
  if (!args.halo.empty()) CheckAct(args.halo, act, {b, k - 1, w}, "halo");
  CheckDocuments(args.documents, b, s);
}

void CheckSsd(const SsdArgs& args) {
  CHECK_EQ(args.x.rank(), 4);
  CHECK_EQ(args.b.rank(), 4);
  const int64_t b = args.x.dim(0), s = args.x.dim(1), h = args.x.dim(2), p = args.x.dim(3);
  const int64_t g = args.b.dim(2), n = args.b.dim(3);
  CHECK(g >= 1 && h % g == 0) << h << " heads in " << g << " groups";
  CHECK_GE(args.chunk, 1);
  const DType act = args.x.dtype();
  CheckAct(args.x, act, {b, s, h, p}, "x");
  CheckAct(args.dt, act, {b, s, h}, "dt");
  CheckAct(args.b, act, {b, s, g, n}, "b");
  CheckAct(args.c, act, {b, s, g, n}, "c");
  CheckParameter(args.dt_bias, {h}, "dt_bias");
  CheckParameter(args.a_log, {h}, "a_log");
  CheckParameter(args.d, {h}, "d");
  if (!args.initial_state.empty())
    CheckParameter(args.initial_state, {b, h, p, n}, "initial_state");
  CheckDocuments(args.documents, b, s);
  if (!args.states.empty()) {
    CheckShape(args.states, {b, (s + args.chunk - 1) / args.chunk, h, p * n}, "states");
    CHECK(args.states.contiguous() &&
          (args.states.dtype() == act || args.states.dtype() == DType::kF32))
        << "states " << args.states.ToString();
  }
}

void CheckSsdForward(const SsdArgs& args) {
  CheckSsd(args);
  const Tensor& x = args.x;
  CheckAct(args.y, x.dtype(), {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, "y");
  if (!args.final_state.empty()) {
    CheckParameter(args.final_state, {x.dim(0), x.dim(2), x.dim(3), args.b.dim(3)}, "final_state");
  }
}
void CheckSsdBackward(const SsdBackwardArgs& args) {
  CheckSsd(args.forward);
  CHECK(!args.forward.states.empty()) << "backward needs the states that forward stores";
  const Tensor& x = args.forward.x;
  const Tensor& b = args.forward.b;
  CheckAct(args.dy, x.dtype(), {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, "dy");
  CheckAct(args.dx, x.dtype(), {x.dim(0), x.dim(1), x.dim(2), x.dim(3)}, "dx");
  CheckAct(args.ddt, x.dtype(), {x.dim(0), x.dim(1), x.dim(2)}, "ddt");
  CheckAct(args.db, x.dtype(), {b.dim(0), b.dim(1), b.dim(2), b.dim(3)}, "db");
  CheckAct(args.dc, x.dtype(), {b.dim(0), b.dim(1), b.dim(2), b.dim(3)}, "dc");
  for (const Tensor& state : {args.d_final_state, args.d_initial_state}) {
    if (!state.empty()) CheckParameter(state, {x.dim(0), x.dim(2), x.dim(3), b.dim(3)}, "state");
  }
  CheckParameter(args.d_dt_bias, {x.dim(2)}, "d_dt_bias");
  CheckParameter(args.d_a_log, {x.dim(2)}, "d_a_log");
  CheckParameter(args.dd, {x.dim(2)}, "dd");
}

// Of the calls for one segment of a sequence.
void CheckSegment(const SsdArgs& args) {
  CHECK(!args.states.empty());
  CheckParameter(args.decay, {args.x.dim(0), args.x.dim(2)}, "decay");
}
void CheckSegment(const SsdBackwardArgs& args) {
  CheckSegment(args.forward);
  const Tensor& states = args.forward.states;
  CheckShape(args.d_states, {states.dim(0), states.dim(1), states.dim(2), states.dim(3)},
             "d_states");
  CHECK(args.d_states.contiguous() && args.d_states.dtype() == states.dtype())
      << "d_states " << args.d_states.ToString();
}

void CheckGatedNorm(const GatedRmsNormArgs& args) {
  CHECK_EQ(args.y.rank(), 2);
  const int64_t t = args.y.dim(0), w = args.y.dim(1);
  CHECK(args.groups >= 1 && w % args.groups == 0)
      << w << " columns in " << args.groups << " groups";
  CheckAct(args.y, args.y.dtype(), {t, w}, "y");
  CheckAct(args.z, args.y.dtype(), {t, w}, "z");
  CheckParameter(args.gamma, {w}, "gamma");
  if (!args.sums.empty()) {
    CHECK(args.sums.dtype() == DType::kF32) << "sums " << args.sums.ToString();
    CheckShape(args.sums, {t, args.groups}, "sums");
    CHECK_GE(args.group_width, w / args.groups);
  }
}

}  // namespace

void CausalConvForward(Stream& stream, const CausalConvArgs& args) {
  CheckConv(args);
  CheckAct(args.y, args.x.dtype(), {args.x.dim(0), args.x.dim(1), args.x.dim(2)}, "y");
  MUSTER_DISPATCH(CausalConvForward, args);
}

void CausalConvBackward(Stream& stream, const CausalConvBackwardArgs& args) {
  CheckConv(args.forward);
  const Tensor& x = args.forward.x;
  const int64_t taps = args.forward.weight.dim(1);
  CheckAct(args.dy, x.dtype(), {x.dim(0), x.dim(1), x.dim(2)}, "dy");
  CheckAct(args.dx, x.dtype(), {x.dim(0), x.dim(1), x.dim(2)}, "dx");
  if (!args.d_halo.empty()) {
    CheckAct(args.d_halo, DType::kF32, {x.dim(0), taps - 1, x.dim(2)}, "d_halo");
  }
  CheckParameter(args.dweight, {x.dim(2), taps}, "dweight");
  CheckParameter(args.dbias, {x.dim(2)}, "dbias");
  MUSTER_DISPATCH(CausalConvBackward, args);
}

void SsdForward(Stream& stream, const SsdArgs& args) {
  CheckSsdForward(args);
  MUSTER_DISPATCH(SsdForward, args);
}

void SsdForwardStates(Stream& stream, const SsdArgs& args) {
  CheckSsdForward(args);
  CheckSegment(args);
  CHECK(!args.final_state.empty());
  MUSTER_DISPATCH(SsdForwardStates, args);
}

void SsdForwardOutputs(Stream& stream, const SsdArgs& args) {
  CheckSsdForward(args);
  CheckSegment(args);
  CHECK(!args.initial_state.empty());
  MUSTER_DISPATCH(SsdForwardOutputs, args);
}

void SsdBackward(Stream& stream, const SsdBackwardArgs& args) {
  CheckSsdBackward(args);
  MUSTER_DISPATCH(SsdBackward, args);
}

void SsdBackwardStates(Stream& stream, const SsdBackwardArgs& args) {
  CheckSsdBackward(args);
  CheckSegment(args);
  CHECK(!args.d_initial_state.empty());
  MUSTER_DISPATCH(SsdBackwardStates, args);
}

void SsdBackwardInputs(Stream& stream, const SsdBackwardArgs& args) {
  CheckSsdBackward(args);
  CheckSegment(args);
  CHECK(!args.d_final_state.empty());
  MUSTER_DISPATCH(SsdBackwardInputs, args);
}

void SsdPassStates(Stream& stream, const SsdPassArgs& args) {
  const Tensor& own = args.own;
  CHECK_EQ(own.rank(), 4);
  CHECK_EQ(args.states.rank(), 4);
  const int64_t ranks = args.states.dim(0), samples = own.dim(0), heads = own.dim(1);
  const int64_t size = own.dim(2) * own.dim(3);
  CHECK(args.rank >= 0 && args.rank < ranks && samples % 2 == 0)
      << "rank " << args.rank << " of " << ranks << ", " << samples << " segments";
  CheckParameter(own, {samples, heads, own.dim(2), own.dim(3)}, "own");
  CHECK(args.states.dtype() == DType::kF32 && args.decays.dtype() == DType::kF32);
  CheckShape(args.states, {ranks, samples, heads, size}, "states");
  CheckShape(args.decays, {ranks, samples, heads}, "decays");
  CHECK(args.states.stride(1) == heads * size && args.states.stride(2) == size &&
        args.decays.stride(1) == heads)
      << "parts are not dense";
  MUSTER_DISPATCH(SsdPassStates, args);
}

void SegmentDocuments(Stream& stream, const SegmentDocumentsArgs& args) {
  CHECK_EQ(args.documents.rank(), 2);
  CHECK_EQ(args.own.rank(), 2);
  const int64_t samples = args.documents.dim(0), positions = args.documents.dim(1);
  CheckDocuments(args.documents, samples, positions);
  CheckDocuments(args.own, 2 * samples, args.own.dim(1));
  CHECK(args.own.dim(1) > 0 && positions % (2 * args.own.dim(1)) == 0)
      << positions << " positions in segments of " << args.own.dim(1);
  CHECK(args.rank >= 0 && args.rank < positions / (2 * args.own.dim(1))) << args.rank;
  MUSTER_DISPATCH(SegmentDocuments, args);
}

void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args) {
  CheckGatedNorm(args);
  CheckParameter(args.rstd, {args.y.dim(0), args.groups}, "rstd");
  CheckAct(args.out, args.y.dtype(), {args.y.dim(0), args.y.dim(1)}, "out");
  MUSTER_DISPATCH(GatedRmsNormForward, args);
}

void GatedRmsNormBackward(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  CheckGatedNorm(args.forward);
  const Tensor& y = args.forward.y;
  CheckParameter(args.forward.rstd, {y.dim(0), args.forward.groups}, "rstd");
  for (const Tensor& tensor : {args.dout, args.dy, args.dz}) {
    CheckAct(tensor, y.dtype(), {y.dim(0), y.dim(1)}, "gradient");
  }
  CheckParameter(args.dgamma, {y.dim(1)}, "dgamma");
  if (!args.out.empty()) {
    CheckAct(args.out, y.dtype(), {y.dim(0), y.dim(1)}, "out");
    CHECK(!args.forward.sums.empty() && !args.forward.norm_before_gate)
        << "backward writes out with sums of all ranks and the gate in front";
  }
  MUSTER_DISPATCH(GatedRmsNormBackward, args);
}

void GatedRmsNormSums(Stream& stream, const GatedRmsNormArgs& args) {
  CheckGatedNorm(args);
  CHECK(!args.sums.empty());
  MUSTER_DISPATCH(GatedRmsNormSums, args);
}

void GatedRmsNormUnscaled(Stream& stream, const GatedRmsNormArgs& args) {
  CheckGatedNorm(args);
  CHECK(!args.sums.empty() && !args.norm_before_gate);
  CheckAct(args.out, args.y.dtype(), {args.y.dim(0), args.y.dim(1)}, "out");
  MUSTER_DISPATCH(GatedRmsNormUnscaled, args);
}

void RmsScaleRows(Stream& stream, const RmsScaleRowsArgs& args) {
  CheckParameter(args.rstd, {args.sums.dim(0)}, "rstd");
  CheckParameter(args.sums, {args.rstd.dim(0)}, "sums");
  CHECK_GT(args.width, 0);
  if (!args.rows.empty()) {
    CHECK(IsActivation(args.rows.dtype()) && args.rows.rank() == 2 && args.rows.contiguous())
        << "rows " << args.rows.ToString();
    CHECK(args.first >= 0 && args.first + args.rows.dim(0) <= args.sums.dim(0))
        << args.rows.dim(0) << " rows from " << args.first;
  }
  MUSTER_DISPATCH(RmsScaleRows, args);
}

void GatedRmsNormBackwardSums(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  CheckGatedNorm(args.forward);
  CHECK(!args.forward.sums.empty());
  const Tensor& y = args.forward.y;
  CheckAct(args.dout, y.dtype(), {y.dim(0), y.dim(1)}, "dout");
  MUSTER_DISPATCH(GatedRmsNormBackwardSums, args);
}

}  // namespace muster::kernels
