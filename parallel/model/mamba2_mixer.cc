#include "parallel/model/mamba2_mixer.h"

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/memory/memory.h"
#include "kernels/ssm/ssm.h"
#include "kernels/tensor.h"
#include "parallel/model/linear.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

// Positions between two stored states. With 128 the fused Hopper kernels run (docs/benchmarks).
constexpr int64_t kChunk = 128;

Parameter FullPrecision(const std::string& name, std::vector<int64_t> shape,
                        Initializer initializer, double low = 0, double high = 0) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = std::move(shape);
  parameter.initializer = initializer;
  parameter.low = static_cast<float>(low);
  parameter.high = static_cast<float>(high);
  parameter.full_precision = true;
  return parameter;
}

class Mamba2Mixer : public Mixer {
 public:
  Mamba2Mixer(ParameterRegistry& registry, const Mamba2Spec& spec, const TensorShard& shard,
              const Recomputed& recomputed, bool split_backward)
      : spec_(spec),
        width_(spec.heads * spec.head_width),
        recomputes_activation_(recomputed.activation && !recomputed.gemms),
        split_(split_backward) {
    CHECK_EQ(shard.size, 1) << spec.name;
    in_proj_ = AddColumnParallel(
        registry, {spec.name + ".in_proj", Packed(), spec.hidden, spec.stddev, /*bias=*/false}, {},
        shard);
    const double bound = 1 / std::sqrt(static_cast<double>(spec.taps));
    const auto add = [&](const char* name, std::vector<int64_t> shape, Initializer initializer,
                         double low = 0, double high = 0) {
      scan_parameters_.push_back(
          registry.Add(FullPrecision(spec.name + name, std::move(shape), initializer, low, high)));
      return scan_parameters_.back();
    };
    conv_weight_ = add(".conv.weight", {Conv(), spec.taps}, Initializer::kUniform, -bound, bound);
    conv_bias_ = add(".conv.bias", {Conv()}, Initializer::kUniform, -bound, bound);
    dt_bias_ = add(".dt_bias", {spec.heads}, Initializer::kInverseSoftplusOfLogUniform, 0.001, 0.1);
    a_log_ = add(".a_log", {spec.heads}, Initializer::kLogOfUniform, 1, 16);
    d_ = add(".d", {spec.heads}, Initializer::kOnes);
    gamma_ = add(".norm.weight", {width_}, Initializer::kOnes);
    out_proj_ = AddRowParallel(
        registry, {spec.name + ".out_proj", spec.hidden, width_, spec.output_stddev, false},
        {0, width_}, shard);
  }

  std::unique_ptr<Saved> MakeSaved() const override { return std::make_unique<MambaSaved>(); }
  void TakeOutputs(Arena& arena, const char* category, const BatchShape& shape,
                   Saved& base) const override {
    MambaSaved& saved = Of(base);
    const int64_t t = shape.tokens(), chunks = (shape.sequence + kChunk - 1) / kChunk;
    saved.packed = arena.Take(category, shape.activation, {t, Packed()});
    saved.y = arena.Take(category, shape.activation, {t, width_});
    saved.states = arena.Take(category, shape.activation,
                              {shape.batch, chunks, spec_.heads, spec_.head_width * spec_.state});
    saved.rstd = arena.Take(category, DType::kF32, {t, spec_.groups});
    for (size_t i = 0; split_ && i < scan_parameters_.size(); ++i) {
      saved.gradients.push_back(arena.Take(category, DType::kF32, {Elements(i)}));
    }
  }
  void TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                      Saved& base) const override {
    MambaSaved& saved = Of(base);
    saved.conv = arena.Take(category, shape.activation, {shape.tokens(), Conv()});
    saved.out = arena.Take(category, shape.activation, {shape.tokens(), width_});
  }
  void TakeScratch(Arena& arena, const BatchShape& shape, Tensor /*d_input*/,
                   Saved& base) const override {
    MambaSaved& saved = Of(base);
    const int64_t t = shape.tokens();
    saved.d_out = arena.Take("scratch", shape.activation, {t, width_});
    saved.d_conv = arena.Take("scratch", shape.activation, {t, Conv()});
    saved.d_packed = arena.Take("scratch", shape.activation, {t, Packed()});
  }

  void Project(const Pass& pass, const Flow& /*flow*/, Saved& base, Tensor x, int64_t first,
               Purpose /*purpose*/) const override {
    LinearForward(pass, in_proj_, x, Of(base).packed.Rows(first, x.dim(0)));
  }
  void Mix(const Pass& pass, const Flow& flow, Saved& base, Span samples) const override {
    const Rows rows = RowsOf(flow, Of(base), samples);
    kernels::CausalConvForward(pass.stream, Convolution(pass, rows));
    kernels::SsdForward(pass.stream, Scan(pass, rows));
    kernels::GatedRmsNormForward(pass.stream, GatedNorm(pass, rows));
  }
  Tensor Output(const Saved& base) const override { return Of(base).out; }
  const Linear& output() const override { return out_proj_; }

  void OutputBackward(const Pass& pass, const Flow& /*flow*/, Saved& base, Tensor dy,
                      int64_t first) const override {
    LinearBackwardInput(pass, out_proj_, dy, Of(base).d_out.Rows(first, dy.dim(0)));
  }
  void MixBackward(const Pass& pass, const Flow& flow, Saved& base, Tensor /*dy*/,
                   const BesideMix& /*beside*/) const override {
    std::vector<Tensor> gradients;
    for (const ParameterId id : scan_parameters_) {
      gradients.push_back((*pass.gradients)[id]);
      if (pass.overwrite_gradients) kernels::Zero(pass.stream, gradients.back());
    }
    MixBackwardInto(pass, flow, Of(base), gradients);
    for (const ParameterId id : scan_parameters_) Ready(pass, id);
  }
  void InputBackward(const Pass& pass, Saved& base, int64_t first, Tensor dx) const override {
    LinearBackwardInput(pass, in_proj_, Of(base).d_packed.Rows(first, dx.dim(0)), dx);
  }
  void InputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    LinearBackwardWeights(pass, in_proj_, Of(base).d_packed, x);
  }

  void SplitMixBackward(const Pass& pass, const Flow& flow, Saved& base,
                        Tensor /*dy*/) const override {
    MambaSaved& saved = Of(base);
    std::vector<Tensor> gradients;
    for (size_t i = 0; i < scan_parameters_.size(); ++i) {
      kernels::Zero(pass.stream, saved.gradients[i]);
      gradients.push_back(i == 0 ? saved.gradients[i].Reshape({Conv(), spec_.taps})
                                 : saved.gradients[i]);
    }
    MixBackwardInto(pass, flow, saved, gradients);
  }
  void KeepGradients(const Pass& pass, Saved& base) const override {
    kernels::Copy(pass.stream, Of(base).d_packed, Of(base).packed);
  }
  void SplitInputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    MambaSaved& saved = Of(base);
    LinearBackwardWeights(pass, in_proj_, saved.packed, x);
    for (size_t i = 0; i < scan_parameters_.size(); ++i) {
      const Tensor whole = (*pass.gradients)[scan_parameters_[i]];
      const Tensor gradient = whole.Reshape({whole.elements()});
      if (pass.overwrite_gradients) {
        kernels::Copy(pass.stream, saved.gradients[i], gradient);
      } else {
        kernels::Axpy(pass.stream, 1.0f, saved.gradients[i], gradient);
      }
      Ready(pass, scan_parameters_[i]);
    }
  }

 private:
  struct MambaSaved : Saved {
    Tensor packed;  // [T, 2E + 2GN + H]: z | x | B | C | dt
    Tensor conv;    // [T, E + 2GN]: x | B | C behind the convolution
    Tensor y;       // [T,E], the scan's output
    Tensor states;  // [B, chunks, H, P N]
    Tensor rstd;    // [T,G] fp32
    Tensor out;     // [T,E]
    // Between two calls of backward: of scan_parameters_, in that order.
    std::vector<Tensor> gradients;
    // Scratch.
    Tensor d_out, d_conv, d_packed;
  };
  static MambaSaved& Of(Saved& saved) { return static_cast<MambaSaved&>(saved); }
  static const MambaSaved& Of(const Saved& saved) { return static_cast<const MambaSaved&>(saved); }

  // What the ops read and write, of some samples.
  struct Rows {
    int64_t batch = 0, sequence = 0;
    Tensor packed, conv, y, states, rstd, out, documents;
  };
  Rows RowsOf(const Flow& flow, const MambaSaved& saved, Span samples) const {
    const int64_t sequence = flow.shape.sequence;
    const int64_t first = samples.begin * sequence, count = samples.size() * sequence;
    Rows rows;
    rows.batch = samples.size();
    rows.sequence = sequence;
    rows.packed = saved.packed.Rows(first, count);
    rows.conv = saved.conv.Rows(first, count);
    rows.y = saved.y.Rows(first, count);
    rows.states = saved.states.Rows(samples.begin, samples.size());
    rows.rstd = saved.rstd.Rows(first, count);
    rows.out = saved.out.Rows(first, count);
    if (!flow.documents.empty()) {
      rows.documents = flow.documents.Rows(samples.begin, samples.size());
    }
    return rows;
  }

  int64_t Conv() const { return width_ + 2 * spec_.groups * spec_.state; }
  int64_t Packed() const { return width_ + Conv() + spec_.heads; }
  int64_t Elements(size_t parameter) const {
    const int64_t elements[] = {Conv() * spec_.taps, Conv(),      spec_.heads,
                                spec_.heads,         spec_.heads, width_};
    return elements[parameter];
  }

  // Columns [first, first + count) of rows [T,...], as [B,S,count].
  static Tensor Columns(const Rows& rows, const Tensor& of, int64_t first, int64_t count) {
    const int64_t stride = of.stride(0);
    return Tensor(At(of, first), of.dtype(), {rows.batch, rows.sequence, count},
                  {rows.sequence * stride, stride, 1});
  }
  // The same as [B,S,outer,inner].
  static Tensor Columns(const Rows& rows, const Tensor& of, int64_t first, int64_t outer,
                        int64_t inner) {
    const int64_t stride = of.stride(0);
    return Tensor(At(of, first), of.dtype(), {rows.batch, rows.sequence, outer, inner},
                  {rows.sequence * stride, stride, inner, 1});
  }
  // The same as [T,count].
  static Tensor Flat(const Tensor& of, int64_t first, int64_t count) {
    return Tensor(At(of, first), of.dtype(), {of.dim(0), count}, {of.stride(0), 1});
  }
  static void* At(const Tensor& of, int64_t column) {
    return static_cast<char*>(of.data()) + column * SizeOf(of.dtype());
  }

  kernels::CausalConvArgs Convolution(const Pass& pass, const Rows& rows) const {
    kernels::CausalConvArgs args;
    args.x = Columns(rows, rows.packed, width_, Conv());
    args.weight = pass.weights[conv_weight_];
    args.bias = pass.weights[conv_bias_];
    args.documents = rows.documents;
    args.y = Columns(rows, rows.conv, 0, Conv());
    return args;
  }
  kernels::SsdArgs Scan(const Pass& pass, const Rows& rows) const {
    const int64_t group = spec_.groups * spec_.state;
    kernels::SsdArgs args;
    args.x = Columns(rows, rows.conv, 0, spec_.heads, spec_.head_width);
    args.dt = Columns(rows, rows.packed, width_ + Conv(), spec_.heads);
    args.b = Columns(rows, rows.conv, width_, spec_.groups, spec_.state);
    args.c = Columns(rows, rows.conv, width_ + group, spec_.groups, spec_.state);
    args.dt_bias = pass.weights[dt_bias_];
    args.a_log = pass.weights[a_log_];
    args.d = pass.weights[d_];
    args.documents = rows.documents;
    args.chunk = kChunk;
    args.y = Columns(rows, rows.y, 0, spec_.heads, spec_.head_width);
    args.states = rows.states;
    return args;
  }
  kernels::GatedRmsNormArgs GatedNorm(const Pass& pass, const Rows& rows) const {
    kernels::GatedRmsNormArgs args;
    args.y = rows.y;
    args.z = Flat(rows.packed, 0, width_);
    args.gamma = pass.weights[gamma_];
    args.out = rows.out;
    args.rstd = rows.rstd;
    args.groups = spec_.groups;
    args.epsilon = spec_.norm_epsilon;
    return args;
  }

  // From d_out to d_packed; adds the gradients of scan_parameters_ to `gradients`.
  void MixBackwardInto(const Pass& pass, const Flow& flow, const MambaSaved& saved,
                       const std::vector<Tensor>& gradients) const {
    const Rows rows = RowsOf(flow, saved, {0, flow.shape.batch});
    kernels::Stream& stream = pass.stream;
    if (recomputes_activation_) {
      kernels::CausalConvForward(stream, Convolution(pass, rows));
      kernels::GatedRmsNormForward(stream, GatedNorm(pass, rows));
    }
    kernels::GatedRmsNormBackwardArgs norm;
    norm.forward = GatedNorm(pass, rows);
    norm.dout = saved.d_out;
    norm.dy = saved.d_out;
    norm.dz = Flat(saved.d_packed, 0, width_);
    norm.dgamma = gradients[5];
    kernels::GatedRmsNormBackward(stream, norm);

    const int64_t group = spec_.groups * spec_.state;
    kernels::SsdBackwardArgs scan;
    scan.forward = Scan(pass, rows);
    scan.dy = Columns(rows, saved.d_out, 0, spec_.heads, spec_.head_width);
    scan.dx = Columns(rows, saved.d_conv, 0, spec_.heads, spec_.head_width);
    scan.ddt = Columns(rows, saved.d_packed, width_ + Conv(), spec_.heads);
    scan.db = Columns(rows, saved.d_conv, width_, spec_.groups, spec_.state);
    scan.dc = Columns(rows, saved.d_conv, width_ + group, spec_.groups, spec_.state);
    scan.d_dt_bias = gradients[2];
    scan.d_a_log = gradients[3];
    scan.dd = gradients[4];
    kernels::SsdBackward(stream, scan);

    kernels::CausalConvBackwardArgs conv;
    conv.forward = Convolution(pass, rows);
    conv.dy = Columns(rows, saved.d_conv, 0, Conv());
    conv.dx = Columns(rows, saved.d_packed, width_, Conv());
    conv.dweight = gradients[0];
    conv.dbias = gradients[1];
    kernels::CausalConvBackward(stream, conv);
  }

  Mamba2Spec spec_;
  int64_t width_;  // E
  bool recomputes_activation_;
  bool split_;
  Linear in_proj_, out_proj_;
  // In the order of `gradients`.
  std::vector<ParameterId> scan_parameters_;
  ParameterId conv_weight_, conv_bias_, dt_bias_, a_log_, d_, gamma_;
};

}  // namespace

std::unique_ptr<Mixer> MakeMamba2Mixer(ParameterRegistry& registry, const Mamba2Spec& spec,
                                       const TensorShard& shard, const Recomputed& recomputed,
                                       bool split_backward) {
  return std::make_unique<Mamba2Mixer>(registry, spec, shard, recomputed, split_backward);
}

}  // namespace muster::parallel
