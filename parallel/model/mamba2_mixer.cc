#include "parallel/model/mamba2_mixer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/memory/memory.h"
#include "kernels/ssm/ssm.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/box.h"
#include "parallel/context/scan_by_heads.h"
#include "parallel/context/state_passing.h"
#include "parallel/model/language_model.h"
#include "parallel/model/layer_kind.h"
#include "parallel/model/linear.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

constexpr int64_t kChunk = kMamba2Chunk;
// Columns of 16 bits in 16 bytes.
constexpr int64_t kAligned = 8;

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
              const Recomputed& recomputed, const ModelParallel& parallel)
      : spec_(spec),
        shard_(shard),
        shares_(shard.share(SplitKind::kScanHeads).shares),
        heads_(shard.ssm_heads().size()),
        width_(heads_ * spec.head_width),
        groups_(shard.ssm_groups().size()),
        parts_(PartsOf(shard.share(SplitKind::kScanHeads))),
        recomputes_activation_(recomputed.activation && !recomputed.gemms),
        recomputes_scan_(recomputed.mixing && !recomputed.gemms),
        split_(parallel.split_backward),
        context_size_(parallel.context_size),
        by_heads_(context_size_ > 1 && parallel.scan_method == ScanMethod::kAllToAll),
        passes_states_(context_size_ > 1 && !by_heads_) {
    CHECK(!by_heads_ || parts_.size() == 1) << spec.name;
    const int64_t inner = spec.heads * spec.head_width, group = spec.groups * spec.state;
    const Span own = {shard.ssm_heads().begin * spec.head_width,
                      shard.ssm_heads().end * spec.head_width};
    const Span held =
        shares_ ? Span{0, group}
                : Span{shard.ssm_groups().begin * spec.state, shard.ssm_groups().end * spec.state};
    held_ = held.size();
    const auto behind = [](Span span, int64_t rows) {
      return Span{rows + span.begin, rows + span.end};
    };
    // Rows of the convolution: x, B, C. The projection has z in front of them and dt behind.
    const std::vector<Span> x = {own};
    const std::vector<Span> bc = {behind(held, inner), behind(held, inner + group)};
    const std::vector<Span> xbc = {x[0], bc[0], bc[1]};
    const auto projected = [&](const std::vector<Span>& rows) {
      std::vector<Span> moved;
      for (const Span& span : rows) moved.push_back(behind(span, inner));
      return moved;
    };
    std::vector<Span> rows = {own};
    for (const Span& span : projected(shares_ ? x : xbc)) rows.push_back(span);
    rows.push_back(behind(shard.ssm_heads(), 2 * inner + 2 * group));
    const LinearSpec in = {spec.name + ".in_proj", 2 * inner + 2 * group + spec.heads, spec.hidden,
                           spec.stddev, /*bias=*/false};
    in_proj_ = AddColumnParallel(registry, in, rows, shard, shard.sharded(), /*in_two=*/shares_,
                                 /*storage_rows=*/Packed());
    if (shares_) {
      in_pairs_ = AddColumnParallel(registry, in, projected(bc), shard, TensorSharing::kPartial,
                                    /*in_two=*/true, /*storage_rows=*/2 * held_);
      AddConvolution(registry, {.first = 0, .columns = width_}, x, shard.sharded());
      AddConvolution(registry, {.first = width_, .columns = 2 * held_, .of_pairs = true}, bc,
                     TensorSharing::kPartial);
    } else {
      AddConvolution(registry, {.first = 0, .columns = Conv()}, xbc, shard.sharded());
    }
    const auto add = [&](const char* name, int64_t size, Span part, Initializer initializer,
                         double low = 0, double high = 0) {
      return Add(registry, FullPrecision(spec.name + name, {size}, initializer, low, high), {part},
                 shard.sharded());
    };
    const Span heads = shard.ssm_heads();
    dt_bias_ =
        add(".dt_bias", spec.heads, heads, Initializer::kInverseSoftplusOfLogUniform, 0.001, 0.1);
    a_log_ = add(".a_log", spec.heads, heads, Initializer::kLogOfUniform, 1, 16);
    d_ = add(".d", spec.heads, heads, Initializer::kOnes);
    gamma_ = add(".norm.weight", inner, own, Initializer::kOnes);
    out_proj_ = AddRowParallel(
        registry, {spec.name + ".out_proj", spec.hidden, inner, spec.output_stddev, false}, own,
        shard);
  }

  std::unique_ptr<Saved> MakeSaved() const override { return std::make_unique<MambaSaved>(); }
  void TakeOutputs(Arena& arena, const char* category, const BatchShape& shape,
                   Saved& base) const override {
    MambaSaved& saved = Of(base);
    const int64_t t = shape.tokens();
    saved.packed = arena.Take(category, shape.activation, {t, Packed()});
    if (shares_) saved.pairs = arena.Take(category, shape.activation, {t, 2 * held_});
    if (context_size_ > 1) TakeScanned(arena, category, shape, saved);
    saved.rstd = arena.Take(category, DType::kF32, {t, groups_});
    if (shares_) saved.sums = arena.Take(category, DType::kF32, {t, spec_.groups});
    for (size_t i = 0; split_ && i < scan_parameters_.size(); ++i) {
      const std::vector<int64_t>& of = shapes_[i];
      const int64_t columns = of.size() > 1 ? of[1] : 1;
      const Tensor gradient = arena.Take(category, DType::kF32, {of[0] * columns});
      saved.gradients.push_back(of.size() > 1 ? gradient.Reshape({of[0], columns}) : gradient);
    }
    if (passes_states_) PassingOf(shape).TakeSaved(arena, category, saved.passed);
    if (by_heads_) ByHeadsOf(shape).TakeSaved(arena, category, saved.by_heads);
  }
  // With context parallelism the ranks would have to exchange once more.
  void TakeMixed(Arena& arena, const char* category, const BatchShape& shape,
                 Saved& base) const override {
    if (context_size_ == 1) TakeScanned(arena, category, shape, Of(base));
  }
  void TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                      Saved& base) const override {
    MambaSaved& saved = Of(base);
    const int64_t t = shape.tokens();
    saved.conv = by_heads_
                     ? arena.Take(category, shape.activation,
                                  {t * context_size_, ByHeadsOf(shape).shape().own_channels()})
                     : arena.Take(category, shape.activation, {t, Conv()});
    saved.out = arena.Take(category, shape.activation, {t, width_});
  }
  void TakeScratch(Arena& arena, const BatchShape& shape, Tensor /*d_input*/,
                   Saved& base) const override {
    MambaSaved& saved = Of(base);
    const int64_t t = shape.tokens();
    saved.d_out = arena.Take("scratch", shape.activation, {t, width_});
    if (!by_heads_) saved.d_conv = arena.Take("scratch", shape.activation, {t, Conv()});
    saved.d_packed = arena.Take("scratch", shape.activation, {t, Packed()});
    if (shares_) {
      saved.d_pairs = arena.Take("scratch", shape.activation, {t, 2 * held_});
      saved.d_sums = arena.Take("scratch", DType::kF32, {t, spec_.groups});
    }
    if (by_heads_) ByHeadsOf(shape).TakeScratch(arena, saved.by_heads);
    if (!passes_states_) return;
    const Tensor& states = saved.states;
    saved.d_states = arena.Take("scratch", shape.activation,
                                {states.dim(0), states.dim(1), heads_, StateSize()});
    saved.documents = arena.Take("scratch", DType::kI32, {states.dim(0), shape.sequence / 2});
    PassingOf(shape).TakeScratch(arena, saved.passed);
  }

  void Project(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor x, int64_t first,
               Purpose /*purpose*/) const override {
    const MambaSaved& saved = Of(base);
    LinearForward(pass, in_proj_, x, saved.packed.Rows(first, x.dim(0)));
    if (shares_) LinearForward(pass, in_pairs_, x, saved.pairs.Rows(first, x.dim(0)));
  }
  void Mix(const Pass& pass, const ModelBatch& batch, Saved& base, Span samples) const override {
    MambaSaved& saved = Of(base);
    const Rows rows = RowsOf(batch, saved, samples);
    if (by_heads_) {
      MixByHeads(pass, batch, saved, rows);
      return GateAndNorm(pass, batch, saved, samples);
    }
    if (passes_states_) {
      CutDocuments(pass, batch, saved);
      PassingOf(batch.shape)
          .PassInputs(CallOf(pass), Inputs(rows, rows.packed, rows.pairs), saved.passed);
    }
    for (const Convolution& part : convolutions_) {
      kernels::CausalConvForward(pass.stream, ConvolutionOf(pass, rows, part));
    }
    if (passes_states_) {
      ScanSegments(pass, batch, saved, rows);
    } else {
      ScanForward(pass, rows);
    }
    GateAndNorm(pass, batch, saved, samples);
  }
  bool exchanges() const override { return context_size_ > 1; }
  Tensor Output(const Saved& base) const override { return Of(base).out; }
  const Linear& output() const override { return out_proj_; }
  void FinishBranch(const Pass& on, Saved& base, Span tokens, Tensor rows,
                    int64_t first) const override {
    MambaSaved& saved = Of(base);
    if (!ScalesBehind(saved)) return;
    on.tensor->AllReduce(on.stream, RowsOf(saved.sums, tokens), ReduceOp::kSum);
    WriteFactors(on.stream, saved, tokens, rows, first);
    std::erase_if(saved.unfinished, [&](Span mixed) { return mixed.end <= tokens.end; });
  }
  // Backward adds up the sums of the norm.
  bool sums_in_backward() const override { return shares_; }

  absl::StatusOr<std::unique_ptr<MixerState>> TakeState(Arena& arena,
                                                        const DecodeShape& shape) const override {
    auto state = std::make_unique<MambaState>();
    for (int i = 0; i < 2; ++i) {
      state->tail[i] = arena.Take("state", shape.activation, {shape.batch, spec_.taps - 1, Conv()});
      state->scan[i] =
          arena.Take("state", DType::kF32, {shape.batch, heads_, spec_.head_width, spec_.state});
    }
    return state;
  }
  void MixOnward(const Pass& pass, const ModelBatch& batch, Saved& base,
                 MixerState& base_state) const override {
    MambaSaved& saved = Of(base);
    const Rows rows = RowsOf(batch, saved, {0, batch.shape.batch});
    auto& state = static_cast<MambaState&>(base_state);
    const bool first = batch.first_position == 0;
    const Tensor &tail = state.tail[state.now], &next_tail = state.tail[1 - state.now];
    const int64_t halo = spec_.taps - 1, fresh = std::min(halo, rows.sequence);
    // In front of a text there are zeros.
    if (first && fresh < halo) kernels::Zero(pass.stream, next_tail);
    for (const Convolution& part : convolutions_) {
      kernels::CausalConvArgs args = ConvolutionOf(pass, rows, part);
      const auto columns = [&](const Tensor& of, int64_t begin, int64_t count) {
        return Positions(of, begin, count, part.first, part.columns);
      };
      if (!first) args.halo = columns(tail, 0, halo);
      kernels::CausalConvForward(pass.stream, args);
      // The next tail: the last inputs, behind what is left of this one.
      if (!first && fresh < halo) {
        kernels::CopyStrided(pass.stream, columns(tail, fresh, halo - fresh),
                             columns(next_tail, 0, halo - fresh));
      }
      kernels::CopyStrided(pass.stream,
                           Positions(args.x, rows.sequence - fresh, fresh, 0, part.columns),
                           columns(next_tail, halo - fresh, fresh));
    }
    for (const Part& part : parts_) {
      kernels::SsdArgs scan = Scan(pass, rows, part);
      if (!first) scan.initial_state = OfPart(state.scan[state.now], 1, part);
      scan.final_state = OfPart(state.scan[1 - state.now], 1, part);
      kernels::SsdForward(pass.stream, scan);
    }
    state.now = 1 - state.now;
    GateAndNorm(pass, saved, {0, batch.shape.tokens()});
  }

  // With half-batches the sums of the norm's backward are added up while the other half computes.
  void OutputBackward(const Pass& pass, const ModelBatch& batch, Saved& base, Tensor dy,
                      int64_t first) const override {
    MambaSaved& saved = Of(base);
    const Span tokens = {first, first + dy.dim(0)};
    LinearBackwardInput(pass, out_proj_, dy, RowsOf(saved.d_out, tokens));
    if (!ScalesBehind(saved) || recomputes_scan_ || shard_.slices(batch.shape) == 1) return;
    NormBackwardSums(pass, saved, tokens);
    saved.d_summing.push_back({tokens, StartSum(pass, RowsOf(saved.d_sums, tokens))});
  }
  void MixBackward(const Pass& pass, const ModelBatch& batch, Saved& base, Tensor /*dy*/,
                   const BesideMix& beside) const override {
    std::vector<Tensor> gradients;
    for (const ParameterId id : scan_parameters_) {
      gradients.push_back((*pass.gradients)[id]);
    }
    if (pass.overwrite_gradients) kernels::ZeroAll(pass.stream, gradients);
    MixBackwardInto(pass, batch, Of(base), gradients, beside);
    for (const ParameterId id : scan_parameters_) Ready(pass, id);
  }
  void InputBackward(const Pass& pass, Saved& base, int64_t first, Tensor dx) const override {
    const MambaSaved& saved = Of(base);
    const int64_t rows = dx.dim(0);
    LinearBackwardInput(pass, in_proj_, saved.d_packed.Rows(first, rows), dx);
    if (!shares_) return;
    LinearBackwardInput(pass, in_pairs_, saved.d_pairs.Rows(first, rows), dx, /*accumulate=*/true);
  }
  void InputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    const MambaSaved& saved = Of(base);
    if (shares_) LinearBackwardWeights(pass, in_pairs_, saved.d_pairs, x);
    LinearBackwardWeights(pass, in_proj_, saved.d_packed, x);
  }

  void SplitMixBackward(const Pass& pass, const ModelBatch& batch, Saved& base,
                        Tensor /*dy*/) const override {
    MambaSaved& saved = Of(base);
    kernels::ZeroAll(pass.stream, saved.gradients);
    MixBackwardInto(pass, batch, saved, saved.gradients, {});
  }
  void KeepGradients(const Pass& pass, Saved& base) const override {
    const MambaSaved& saved = Of(base);
    kernels::Copy(pass.stream, saved.d_packed, saved.packed);
    if (shares_) kernels::Copy(pass.stream, saved.d_pairs, saved.pairs);
  }
  void SplitInputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    const MambaSaved& saved = Of(base);
    if (shares_) LinearBackwardWeights(pass, in_pairs_, saved.pairs, x);
    LinearBackwardWeights(pass, in_proj_, saved.packed, x);
    for (size_t i = 0; i < scan_parameters_.size(); ++i) {
      const Tensor gradient = (*pass.gradients)[scan_parameters_[i]];
      if (pass.overwrite_gradients) {
        kernels::Copy(pass.stream, saved.gradients[i], gradient);
      } else {
        kernels::Axpy(pass.stream, 1.0f, saved.gradients[i], gradient);
      }
      Ready(pass, scan_parameters_[i]);
    }
  }

 private:
  // Heads that one call of the scan and of the norm computes: those of some whole groups, or of a
  // part of one.
  struct Part {
    int64_t head = 0, heads = 0;  // counted from this rank's first head
    // The first of its groups: of those that this rank has heads of, and of those whose B and C it
    // holds.
    int64_t own_group = 0, held_group = 0;
    int64_t groups = 0;
  };
  static std::vector<Part> PartsOf(const SplitShare& share) {
    std::vector<Part> parts;
    for (const GroupPart& part : share.parts) {
      const int64_t own_group = part.groups.begin - share.groups.begin;
      parts.push_back({.head = part.units.begin - share.span.begin,
                       .heads = part.units.size(),
                       .own_group = own_group,
                       .held_group = share.shares ? part.groups.begin : own_group,
                       .groups = part.groups.size()});
    }
    return parts;
  }
  // Of states and the like, with all heads in dimension `axis`.
  static Tensor OfPart(const Tensor& of, int axis, const Part& part) {
    return OfHeads(of, axis, part.head, part.heads);
  }

  // A sum over the tensor group of fp32 numbers of some tokens.
  struct Summing {
    Span tokens;
    kernels::Event* done;  // null: it is complete
  };
  struct MambaSaved : Saved {
    Tensor packed;  // [T, 2E + 2GN + H]: z | x | B | C | dt; with shared groups without B and C
    Tensor pairs;   // [T,2GN], with shared groups: B | C
    Tensor conv;    // [T, E + 2GN]: x | B | C behind the convolution; by heads ScanByHeads's
    Tensor y;       // [T,E], the scan's output
    // Of each part (OfPart) [B, chunks, H, P N]; passing states [2B, ...], by heads those of its
    // scan.
    Tensor states;
    Tensor rstd;  // [T,G] fp32, of each part its groups
    Tensor sums;  // with shared groups, [T, G of the model] fp32: of the norm, over all ranks
    Tensor out;   // [T,E]; with ScalesBehind without the norm's factor until backward
    // With ScalesBehind: tokens whose `sums` are this rank's and whose `rstd` is not written yet.
    std::vector<Span> unfinished;
    // Between two calls of backward: of scan_parameters_, in that order.
    std::vector<Tensor> gradients;
    // Scratch.
    Tensor d_out, d_conv, d_packed, d_pairs;
    Tensor d_sums;                   // as `sums`: of the norm's backward
    std::vector<Summing> d_summing;  // with ScalesBehind: what has been started of d_sums
    // With context parallelism, in forward too; passing states:
    Tensor d_states;   // as states
    Tensor documents;  // [2B,S/2c] i32
    StatePassing::Saved passed;
    // By heads:
    ScanByHeads::Saved by_heads;
  };
  // Every call reads one of each pair and writes the other.
  struct MambaState : MixerState {
    Tensor tail[2];  // [B,K-1,E + 2GN]: the convolution's last inputs, x | B | C
    Tensor scan[2];  // [B,H,P,N] fp32, OfPart
    int now = 0;     // which of them holds the state
  };
  // Some columns of positions [begin, begin + count) of [B,S,...].
  static Tensor Positions(const Tensor& of, int64_t begin, int64_t count, int64_t first,
                          int64_t columns) {
    return Tensor(At(of, begin * of.stride(1) + first), of.dtype(), {of.dim(0), count, columns},
                  {of.stride(0), of.stride(1), 1});
  }
  void TakeScanned(Arena& arena, const char* category, const BatchShape& shape,
                   MambaSaved& saved) const {
    const int64_t samples = Segments() * shape.batch;
    const int64_t positions =
        by_heads_ ? shape.sequence * context_size_ : shape.sequence / Segments();
    const int64_t chunks = (positions + kChunk - 1) / kChunk;
    saved.y = arena.Take(category, shape.activation, {shape.tokens(), width_});
    saved.states =
        arena.Take(category, shape.activation,
                   {samples, chunks, by_heads_ ? heads_ / context_size_ : heads_, StateSize()});
  }
  static MambaSaved& Of(Saved& saved) { return static_cast<MambaSaved&>(saved); }
  static const MambaSaved& Of(const Saved& saved) { return static_cast<const MambaSaved&>(saved); }

  // What the ops read and write, of some samples. With context parallelism of all; passing states,
  // their segments are the samples of the ops, and by heads the convolution and the scan have
  // tensors of their own.
  struct Rows {
    int64_t batch = 0, sequence = 0;
    Tensor packed, pairs, halo, conv, y, documents;
    Tensor states;            // of all samples
    int64_t first_state = 0;  // the first sample of these in `states`
  };
  Rows RowsOf(const ModelBatch& batch, const MambaSaved& saved, Span samples) const {
    const int64_t sequence = batch.shape.sequence;
    const int64_t first = samples.begin * sequence, count = samples.size() * sequence;
    CHECK(context_size_ == 1 || samples.size() == batch.shape.batch);
    Rows rows;
    rows.batch = samples.size() * Segments();
    rows.sequence = sequence / Segments();
    rows.packed = saved.packed.Rows(first, count);
    if (shares_) rows.pairs = saved.pairs.Rows(first, count);
    if (!by_heads_) {
      rows.conv = saved.conv.Rows(first, count);
      rows.states = saved.states;
      rows.first_state = samples.begin;
    }
    rows.y = saved.y.Rows(first, count);
    if (passes_states_) {
      rows.halo = saved.passed.halo;
      if (!batch.documents.empty()) rows.documents = saved.documents;
    } else if (!batch.documents.empty()) {
      rows.documents = batch.documents.Rows(samples.begin, samples.size());
    }
    return rows;
  }

  // One convolution over some of the columns of `conv`.
  struct Convolution {
    int64_t first = 0, columns = 0;
    bool of_pairs = false;  // its input is in `pairs`
    int weight = -1, bias = -1;
  };

  // Adds a parameter of the scan, of which this rank holds `rows`. Returns its index in
  // scan_parameters_.
  int Add(ParameterRegistry& registry, Parameter parameter, const std::vector<Span>& rows,
          TensorSharing sharing) {
    parameter.sharing = sharing;
    std::vector<int64_t> shape = parameter.global_shape;
    shape[0] = 0;
    for (const Span& span : rows) {
      Box band = Box::Whole(parameter.global_shape);
      band.offset[0] = span.begin;
      band.extent[0] = span.size();
      shape[0] += span.size();
      if (shard_.size > 1) parameter.bands.push_back(std::move(band));
    }
    scan_parameters_.push_back(registry.Add(std::move(parameter)));
    shapes_.push_back(std::move(shape));
    return static_cast<int>(scan_parameters_.size()) - 1;
  }
  void AddConvolution(ParameterRegistry& registry, Convolution part, const std::vector<Span>& rows,
                      TensorSharing sharing) {
    const double bound = 1 / std::sqrt(static_cast<double>(spec_.taps));
    const int64_t channels = spec_.heads * spec_.head_width + 2 * spec_.groups * spec_.state;
    const auto add = [&](const char* name, std::vector<int64_t> shape) {
      Parameter parameter =
          FullPrecision(spec_.name + name, std::move(shape), Initializer::kUniform, -bound, bound);
      parameter.in_two = shares_;
      return Add(registry, std::move(parameter), rows, sharing);
    };
    part.weight = add(".conv.weight", {channels, spec_.taps});
    part.bias = add(".conv.bias", {channels});
    convolutions_.push_back(part);
  }

  int64_t Conv() const { return width_ + 2 * held_; }
  // Padded, so that rows begin where kernels can load them in packs and GEMMs as tiles.
  int64_t Packed() const { return (Steps() + heads_ + kAligned - 1) / kAligned * kAligned; }
  // The first column of dt in `packed`.
  int64_t Steps() const { return 2 * width_ + (shares_ ? 0 : 2 * held_); }
  const Tensor& Weight(const Pass& pass, int parameter) const {
    return pass.weights[scan_parameters_[parameter]];
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

  // A convolution's columns of the projection's output, or of its gradient.
  Tensor InputOf(const Rows& rows, const Convolution& part, const Tensor& packed,
                 const Tensor& pairs) const {
    return part.of_pairs ? Columns(rows, pairs, 0, part.columns)
                         : Columns(rows, packed, width_ + part.first, part.columns);
  }
  kernels::CausalConvArgs ConvolutionOf(const Pass& pass, const Rows& rows,
                                        const Convolution& part) const {
    kernels::CausalConvArgs args;
    args.x = InputOf(rows, part, rows.packed, rows.pairs);
    if (!rows.halo.empty()) args.halo = HaloOf(rows.halo, part);
    args.weight = Weight(pass, part.weight);
    args.bias = Weight(pass, part.bias);
    args.documents = rows.documents;
    args.y = Columns(rows, rows.conv, part.first, part.columns);
    return args;
  }
  // The columns of B or C in `conv` that these heads read.
  int64_t FirstB(const Part& part) const { return width_ + part.held_group * spec_.state; }
  int64_t FirstC(const Part& part) const { return FirstB(part) + held_; }
  // The columns of these heads, which begin at `first`.
  Tensor HeadColumns(const Rows& rows, const Tensor& of, int64_t first, const Part& part) const {
    return Columns(rows, of, first + part.head * spec_.head_width, part.heads, spec_.head_width);
  }
  Tensor StatesOf(const Rows& rows, const Tensor& states, const Part& part) const {
    return OfPart(states, 2, part).Rows(rows.first_state, rows.batch);
  }
  kernels::SsdArgs Scan(const Pass& pass, const Rows& rows, const Part& part) const {
    const auto weight = [&](int parameter) {
      return Weight(pass, parameter).Rows(part.head, part.heads);
    };
    kernels::SsdArgs args;
    args.x = HeadColumns(rows, rows.conv, 0, part);
    args.dt = Columns(rows, rows.packed, Steps() + part.head, part.heads);
    args.b = Columns(rows, rows.conv, FirstB(part), part.groups, spec_.state);
    args.c = Columns(rows, rows.conv, FirstC(part), part.groups, spec_.state);
    args.dt_bias = weight(dt_bias_);
    args.a_log = weight(a_log_);
    args.d = weight(d_);
    args.documents = rows.documents;
    args.step_min = spec_.step_min;
    args.chunk = kChunk;
    args.y = HeadColumns(rows, rows.y, 0, part);
    args.states = StatesOf(rows, rows.states, part);
    return args;
  }
  void ScanForward(const Pass& pass, const Rows& rows) const {
    for (const Part& part : parts_) kernels::SsdForward(pass.stream, Scan(pass, rows, part));
  }
  // ---- the gated norm ----

  static Tensor RowsOf(const Tensor& of, Span tokens) {
    return of.Rows(tokens.begin, tokens.size());
  }
  // Columns of the heads of a part.
  Tensor NormColumns(const Tensor& of, Span tokens, const Part& part) const {
    return Flat(RowsOf(of, tokens), part.head * spec_.head_width, part.heads * spec_.head_width);
  }
  Tensor NormWeights(const Tensor& of, const Part& part) const {
    return of.Rows(part.head * spec_.head_width, part.heads * spec_.head_width);
  }
  kernels::GatedRmsNormArgs GatedNorm(const Pass& pass, const MambaSaved& saved, Span tokens,
                                      const Tensor& sums, const Part& part) const {
    kernels::GatedRmsNormArgs args;
    args.y = NormColumns(saved.y, tokens, part);
    args.z = NormColumns(saved.packed, tokens, part);
    args.gamma = NormWeights(Weight(pass, gamma_), part);
    args.out = NormColumns(saved.out, tokens, part);
    args.rstd = RowsOf(OfHeads(saved.rstd, 1, part.own_group, part.groups), tokens);
    args.groups = part.groups;
    if (shares_) {
      args.sums = Flat(RowsOf(sums, tokens), part.held_group, part.groups);
      args.group_width = GroupWidth();
    }
    args.epsilon = spec_.norm_epsilon;
    return args;
  }
  int64_t GroupWidth() const { return spec_.heads / spec_.groups * spec_.head_width; }

  // Whether the norm's factor of a token, which needs the columns of all ranks, is applied to the
  // branch, behind the sum over the ranks: nothing in front of the row-parallel GEMM waits for
  // other ranks then. Not in fp16, which the norm keeps within its range, and not with several
  // groups, whose factors differ within a token.
  bool ScalesBehind(const MambaSaved& saved) const {
    return shares_ && spec_.groups == 1 && saved.out.dtype() != DType::kF16;
  }
  kernels::Event* StartSum(const Pass& pass, const Tensor& numbers) const {
    return shard_.Start(pass, Collective::kAllReduce, [&](const Pass& on) {
      on.tensor->AllReduce(on.stream, numbers, ReduceOp::kSum);
    });
  }
  // With ScalesBehind it writes this rank's sums.
  void GateAndNorm(const Pass& pass, const MambaSaved& saved, Span tokens) const {
    const auto norm = [&](const Part& part) {
      return GatedNorm(pass, saved, tokens, saved.sums, part);
    };
    if (ScalesBehind(saved)) {
      for (const Part& part : parts_) kernels::GatedRmsNormUnscaled(pass.stream, norm(part));
      return;
    }
    if (shares_) {
      const Tensor sums = RowsOf(saved.sums, tokens);
      if (spec_.groups > 1) kernels::Zero(pass.stream, sums);
      for (const Part& part : parts_) kernels::GatedRmsNormSums(pass.stream, norm(part));
      shard_.SumInPlace(pass, sums);
    }
    NormScaled(pass, saved, tokens);
  }
  // With the sums of all ranks, where they share groups.
  void NormScaled(const Pass& pass, const MambaSaved& saved, Span tokens) const {
    for (const Part& part : parts_) {
      kernels::GatedRmsNormForward(pass.stream, GatedNorm(pass, saved, tokens, saved.sums, part));
    }
  }
  void GateAndNorm(const Pass& pass, const ModelBatch& batch, MambaSaved& saved,
                   Span samples) const {
    const int64_t sequence = batch.shape.sequence;
    const Span tokens = {samples.begin * sequence, samples.end * sequence};
    GateAndNorm(pass, saved, tokens);
    if (!ScalesBehind(saved)) return;
    if (tokens.begin == 0) saved.unfinished.clear();
    saved.unfinished.push_back(tokens);
  }
  // rstd of `tokens`; rows of the branch, from token `first` on, times it.
  void WriteFactors(kernels::Stream& stream, const MambaSaved& saved, Span tokens,
                    const Tensor& rows, int64_t first) const {
    kernels::RmsScaleRows(stream, {.sums = RowsOf(saved.sums, tokens).Reshape({tokens.size()}),
                                   .rstd = RowsOf(saved.rstd, tokens).Reshape({tokens.size()}),
                                   .width = GroupWidth(),
                                   .epsilon = spec_.norm_epsilon,
                                   .rows = rows,
                                   .first = first - tokens.begin});
  }
  kernels::GatedRmsNormBackwardArgs NormBackward(const Pass& pass, const MambaSaved& saved,
                                                 Span tokens, const Part& part) const {
    kernels::GatedRmsNormBackwardArgs norm;
    norm.forward = GatedNorm(pass, saved, tokens, saved.d_sums, part);
    norm.dout = NormColumns(saved.d_out, tokens, part);
    norm.dy = norm.dout;
    norm.dz = NormColumns(saved.d_packed, tokens, part);
    if (ScalesBehind(saved)) norm.out = norm.forward.out;
    return norm;
  }
  // This rank's part of d_sums.
  void NormBackwardSums(const Pass& pass, const MambaSaved& saved, Span tokens) const {
    for (const Part& part : parts_) {
      kernels::GatedRmsNormBackwardArgs norm = NormBackward(pass, saved, tokens, part);
      if (recomputes_activation_) norm.out = Tensor();  // forward's was not kept
      kernels::GatedRmsNormBackwardSums(pass.stream, norm);
    }
  }
  // From the gradient of the norm's output in d_out to that of y, and to z's columns of d_packed.
  void GateAndNormBackward(const Pass& pass, MambaSaved& saved, const Tensor& d_gamma) const {
    if (saved.d_summing.empty()) {
      const Span all = {0, saved.d_out.dim(0)};
      if (shares_) {
        if (spec_.groups > 1) kernels::Zero(pass.stream, saved.d_sums);
        NormBackwardSums(pass, saved, all);
        shard_.SumInPlace(pass, saved.d_sums);
      }
      saved.d_summing.push_back({all, nullptr});
    }
    for (const Summing& sum : saved.d_summing) {
      TensorShard::Await(pass, {Tensor(), sum.done});
      for (const Part& part : parts_) {
        kernels::GatedRmsNormBackwardArgs norm = NormBackward(pass, saved, sum.tokens, part);
        norm.dgamma = NormWeights(d_gamma, part);
        kernels::GatedRmsNormBackward(pass.stream, norm);
      }
    }
    saved.d_summing.clear();
  }

  // ---- context parallelism ----

  // Of a sequence, on this rank.
  int64_t Segments() const { return passes_states_ ? 2 : 1; }
  int64_t StateSize() const { return spec_.head_width * spec_.state; }
  StatePassing PassingOf(const BatchShape& shape) const {
    std::vector<int64_t> parts;
    for (const Part& part : parts_) parts.push_back(part.heads);
    return StatePassing({.ranks = context_size_,
                         .batch = shape.batch,
                         .heads = heads_,
                         .width = spec_.head_width,
                         .state = spec_.state,
                         .taps = spec_.taps,
                         .channels = Conv(),
                         .activation = shape.activation,
                         .parts = std::move(parts)});
  }
  static StatePassing::Call CallOf(const Pass& pass, const BesideMix& beside = {}) {
    return {pass.stream, *pass.context, pass.context_overlap, beside.first, beside.last};
  }
  // Other layers use the same memory.
  static void CutDocuments(const Pass& pass, const ModelBatch& batch, const MambaSaved& saved) {
    if (batch.documents.empty()) return;
    kernels::SegmentDocuments(pass.stream,
                              {batch.documents, pass.context->rank(), saved.documents});
  }
  // The convolution's inputs, or the gradients of these.
  std::vector<StatePassing::Channels> Inputs(const Rows& rows, const Tensor& packed,
                                             const Tensor& pairs) const {
    std::vector<StatePassing::Channels> inputs;
    for (const Convolution& part : convolutions_) {
      inputs.push_back({InputOf(rows, part, packed, pairs), part.first});
    }
    return inputs;
  }
  // Channels of [2B,K-1,W].
  static Tensor HaloOf(const Tensor& halo, const Convolution& part) {
    return Tensor(At(halo, part.first), halo.dtype(), {halo.dim(0), halo.dim(1), part.columns},
                  {halo.stride(0), halo.stride(1), 1});
  }
  void ScanSegments(const Pass& pass, const ModelBatch& batch, const MambaSaved& saved,
                    const Rows& rows) const {
    const StatePassing passing = PassingOf(batch.shape);
    const StatePassing::Call call = CallOf(pass);
    std::vector<kernels::SsdArgs> scans;
    for (const Part& part : parts_) {
      kernels::SsdArgs& scan = scans.emplace_back(Scan(pass, rows, part));
      scan.initial_state = OfPart(saved.passed.ends, 1, part);
      scan.final_state = OfPart(passing.OwnStates(call, saved.passed), 1, part);
      scan.decay = OfPart(passing.OwnDecays(call, saved.passed), 1, part);
      kernels::SsdForwardStates(pass.stream, scan);
    }
    passing.PassStates(call, /*reverse=*/false, saved.passed);
    for (const kernels::SsdArgs& scan : scans) kernels::SsdForwardOutputs(pass.stream, scan);
  }
  void ScanSegmentsBackward(const Pass& pass, const StatePassing& passing,
                            const StatePassing::Call& call, const MambaSaved& saved,
                            const Rows& rows, const std::vector<Tensor>& gradients) const {
    std::vector<kernels::SsdBackwardArgs> scans;
    for (const Part& part : parts_) {
      kernels::SsdBackwardArgs& scan =
          scans.emplace_back(ScanBackward(pass, saved, rows, gradients, part));
      scan.forward.decay = OfPart(passing.OwnDecays(call, saved.passed), 1, part);
      scan.d_initial_state = OfPart(passing.OwnStates(call, saved.passed), 1, part);
      scan.d_final_state = OfPart(saved.passed.ends, 1, part);
      scan.d_states = StatesOf(rows, saved.d_states, part);
      kernels::SsdBackwardStates(pass.stream, scan);
    }
    passing.PassStates(call, /*reverse=*/true, saved.passed);
    for (const kernels::SsdBackwardArgs& scan : scans) {
      kernels::SsdBackwardInputs(pass.stream, scan);
    }
  }

  // By heads: whole sequences of this context rank's share of the heads.
  ScanByHeads ByHeadsOf(const BatchShape& shape) const {
    return ScanByHeads({context_size_, shape.batch, shape.sequence * context_size_, heads_, groups_,
                        spec_.head_width, spec_.state, shape.activation});
  }
  // The columns of `packed` and `pairs`, or of their gradients, that go to the ranks of their
  // heads.
  ScanByHeads::Inputs InputsByHeads(const Rows& rows, const Tensor& packed,
                                    const Tensor& pairs) const {
    const Tensor& bc = shares_ ? pairs : packed;
    const int64_t b = shares_ ? shard_.ssm_groups().begin * spec_.state : 2 * width_;
    return {Columns(rows, packed, width_, heads_, spec_.head_width),
            Columns(rows, bc, b, groups_, spec_.state),
            Columns(rows, bc, b + held_, groups_, spec_.state),
            Columns(rows, packed, Steps(), heads_, 1)};
  }
  // Of whole sequences.
  struct Whole {
    Rows rows;  // their number, and nothing else
    ScanByHeads by_heads;
    HeadsShape shape;
    int rank;
  };
  Whole WholeOf(const Pass& pass, const ModelBatch& batch) const {
    const ScanByHeads by_heads = ByHeadsOf(batch.shape);
    Rows rows;
    rows.batch = by_heads.shape().batch;
    rows.sequence = by_heads.shape().sequence;
    rows.documents = batch.documents;
    return {rows, by_heads, by_heads.shape(), pass.context->rank()};
  }
  // Some columns of a rank's channels, and the rows of the convolution's parameters that are
  // theirs.
  struct ChannelsByHeads {
    int64_t first, columns;
    const Convolution* part;
    int64_t row;
  };
  std::vector<ChannelsByHeads> ChannelsOf(const Whole& whole) const {
    const HeadsShape& own = whole.shape;
    const Convolution &x = convolutions_.front(), &bc = convolutions_.back();
    const int64_t groups = own.own_groups() * spec_.state;
    // Of the first group in the parameter.
    const int64_t row = FirstB(parts_.front()) + own.first_group(whole.rank) * spec_.state -
                        (shares_ ? bc.first : 0);
    return {{0, own.own_columns(), &x, own.first_head(whole.rank) * spec_.head_width},
            {own.own_columns(), groups, &bc, row},
            {own.own_columns() + groups, groups, &bc, row + held_}};
  }
  kernels::CausalConvArgs ConvolutionOf(const Pass& pass, const Whole& whole,
                                        const ChannelsByHeads& some,
                                        const MambaSaved& saved) const {
    kernels::CausalConvArgs args;
    args.x = Columns(whole.rows, saved.by_heads.channels, some.first, some.columns);
    args.weight = Weight(pass, some.part->weight).Rows(some.row, some.columns);
    args.bias = Weight(pass, some.part->bias).Rows(some.row, some.columns);
    args.documents = whole.rows.documents;
    args.y = Columns(whole.rows, saved.conv, some.first, some.columns);
    return args;
  }
  kernels::SsdArgs Scan(const Pass& pass, const Whole& whole, const MambaSaved& saved) const {
    const HeadsShape& own = whole.shape;
    const int64_t heads = own.own_heads(), groups = own.own_groups(), b = own.own_columns();
    const auto weight = [&](int parameter) {
      return Weight(pass, parameter).Rows(own.first_head(whole.rank), heads);
    };
    kernels::SsdArgs args;
    args.x = Columns(whole.rows, saved.conv, 0, heads, spec_.head_width);
    args.dt = Columns(whole.rows, saved.by_heads.steps, 0, heads);
    args.b = Columns(whole.rows, saved.conv, b, groups, spec_.state);
    args.c = Columns(whole.rows, saved.conv, b + groups * spec_.state, groups, spec_.state);
    args.dt_bias = weight(dt_bias_);
    args.a_log = weight(a_log_);
    args.d = weight(d_);
    args.documents = whole.rows.documents;
    args.step_min = spec_.step_min;
    args.chunk = kChunk;
    args.y = Columns(whole.rows, saved.by_heads.outputs, 0, heads, spec_.head_width);
    args.states = saved.states;
    return args;
  }
  void MixByHeads(const Pass& pass, const ModelBatch& batch, const MambaSaved& saved,
                  const Rows& rows) const {
    const Whole whole = WholeOf(pass, batch);
    const ScanByHeads::Call call = CallOf(pass);
    whole.by_heads.SendInputs(call, InputsByHeads(rows, rows.packed, rows.pairs), saved.by_heads);
    for (const ChannelsByHeads& some : ChannelsOf(whole)) {
      kernels::CausalConvForward(pass.stream, ConvolutionOf(pass, whole, some, saved));
    }
    kernels::SsdForward(pass.stream, Scan(pass, whole, saved));
    whole.by_heads.ReturnOutputs(call, Columns(rows, rows.y, 0, heads_, spec_.head_width),
                                 saved.by_heads);
  }
  // From the gradient of y in d_out to all of d_packed and d_pairs but z's.
  void MixByHeadsBackward(const Pass& pass, const ModelBatch& batch, const MambaSaved& saved,
                          const Rows& rows, const std::vector<Tensor>& gradients,
                          const BesideMix& beside) const {
    const Whole whole = WholeOf(pass, batch);
    const HeadsShape& own = whole.shape;
    const ScanByHeads::Call call = CallOf(pass, beside);
    const int64_t heads = own.own_heads(), groups = own.own_groups(), b = own.own_columns();
    const Tensor& d_channels = saved.by_heads.d_channels;
    const auto gradient = [&](int parameter) {
      return gradients[parameter].Rows(own.first_head(whole.rank), heads);
    };
    whole.by_heads.SendOutputGradients(
        call, Columns(rows, saved.d_out, 0, heads_, spec_.head_width), saved.by_heads);
    kernels::SsdBackwardArgs scan;
    scan.forward = Scan(pass, whole, saved);
    scan.dy = scan.forward.y;
    scan.dx = Columns(whole.rows, d_channels, 0, heads, spec_.head_width);
    scan.ddt = Columns(whole.rows, saved.by_heads.d_steps, 0, heads);
    scan.db = Columns(whole.rows, d_channels, b, groups, spec_.state);
    scan.dc = Columns(whole.rows, d_channels, b + groups * spec_.state, groups, spec_.state);
    scan.d_dt_bias = gradient(dt_bias_);
    scan.d_a_log = gradient(a_log_);
    scan.dd = gradient(d_);
    kernels::SsdBackward(pass.stream, scan);
    for (const ChannelsByHeads& some : ChannelsOf(whole)) {
      kernels::CausalConvBackwardArgs conv;
      conv.forward = ConvolutionOf(pass, whole, some, saved);
      conv.dy = Columns(whole.rows, d_channels, some.first, some.columns);
      conv.dx = conv.dy;
      conv.dweight = gradients[some.part->weight].Rows(some.row, some.columns);
      conv.dbias = gradients[some.part->bias].Rows(some.row, some.columns);
      kernels::CausalConvBackward(pass.stream, conv);
    }
    // B and C of other tensor ranks' groups.
    if (shares_ && spec_.groups > 1) kernels::Zero(pass.stream, saved.d_pairs);
    whole.by_heads.ReturnInputGradients(call, InputsByHeads(rows, saved.d_packed, saved.d_pairs),
                                        saved.by_heads);
  }

  // From the gradient of y in d_out to those of the convolution's output in d_conv and of dt in
  // d_packed.
  kernels::SsdBackwardArgs ScanBackward(const Pass& pass, const MambaSaved& saved, const Rows& rows,
                                        const std::vector<Tensor>& gradients,
                                        const Part& part) const {
    const auto gradient = [&](int parameter) {
      return gradients[parameter].Rows(part.head, part.heads);
    };
    kernels::SsdBackwardArgs scan;
    scan.forward = Scan(pass, rows, part);
    scan.dy = HeadColumns(rows, saved.d_out, 0, part);
    scan.dx = HeadColumns(rows, saved.d_conv, 0, part);
    scan.ddt = Columns(rows, saved.d_packed, Steps() + part.head, part.heads);
    scan.db = Columns(rows, saved.d_conv, FirstB(part), part.groups, spec_.state);
    scan.dc = Columns(rows, saved.d_conv, FirstC(part), part.groups, spec_.state);
    scan.d_dt_bias = gradient(dt_bias_);
    scan.d_a_log = gradient(a_log_);
    scan.dd = gradient(d_);
    return scan;
  }
  // From d_out to d_packed; adds the gradients of scan_parameters_ to `gradients`.
  void MixBackwardInto(const Pass& pass, const ModelBatch& batch, MambaSaved& saved,
                       const std::vector<Tensor>& gradients, const BesideMix& beside) const {
    const Rows rows = RowsOf(batch, saved, {0, batch.shape.batch});
    kernels::Stream& stream = pass.stream;
    // A forward for backward alone does not finish the branch.
    for (const Span tokens : std::exchange(saved.unfinished, {})) {
      shard_.SumInPlace(pass, RowsOf(saved.sums, tokens));
      WriteFactors(stream, saved, tokens, Tensor(), tokens.begin);
    }
    if (passes_states_) CutDocuments(pass, batch, saved);
    if (recomputes_activation_) {
      if (by_heads_) {
        const Whole whole = WholeOf(pass, batch);
        for (const ChannelsByHeads& some : ChannelsOf(whole)) {
          kernels::CausalConvForward(stream, ConvolutionOf(pass, whole, some, saved));
        }
      }
      for (size_t i = 0; i < convolutions_.size() && !by_heads_; ++i) {
        kernels::CausalConvForward(stream, ConvolutionOf(pass, rows, convolutions_[i]));
      }
      if (recomputes_scan_ && context_size_ == 1) ScanForward(pass, rows);
      // With ScalesBehind the norm's backward writes its output.
      if (!ScalesBehind(saved)) NormScaled(pass, saved, {0, batch.shape.tokens()});
    }
    // B and C of other ranks' groups.
    if (shares_ && spec_.groups > 1 && !by_heads_) kernels::Zero(stream, saved.d_conv);
    GateAndNormBackward(pass, saved, gradients[gamma_]);
    if (const int64_t end = Steps() + heads_, padding = Packed() - end; padding > 0) {
      kernels::CopyStrided(stream, Flat(saved.packed, end, padding),
                           Flat(saved.d_packed, end, padding));  // zeros
    }
    if (by_heads_) return MixByHeadsBackward(pass, batch, saved, rows, gradients, beside);

    const StatePassing passing = PassingOf(batch.shape);
    std::optional<StatePassing::Call> call;
    if (passes_states_) {
      call.emplace(CallOf(pass, beside));
      ScanSegmentsBackward(pass, passing, *call, saved, rows, gradients);
    } else {
      for (const Part& part : parts_) {
        kernels::SsdBackward(stream, ScanBackward(pass, saved, rows, gradients, part));
      }
    }

    for (const Convolution& part : convolutions_) {
      kernels::CausalConvBackwardArgs conv;
      conv.forward = ConvolutionOf(pass, rows, part);
      conv.dy = Columns(rows, saved.d_conv, part.first, part.columns);
      conv.dx = InputOf(rows, part, saved.d_packed, saved.d_pairs);
      if (call) conv.d_halo = HaloOf(passing.OwnHaloGradient(*call, saved.passed), part);
      conv.dweight = gradients[part.weight];
      conv.dbias = gradients[part.bias];
      kernels::CausalConvBackward(stream, conv);
    }
    if (call) {
      passing.PassInputGradients(*call, Inputs(rows, saved.d_packed, saved.d_pairs), saved.passed);
    }
  }

  Mamba2Spec spec_;
  TensorShard shard_;
  bool shares_;  // tensor ranks have parts of groups, and B and C of all groups
  // Of this tensor rank.
  int64_t heads_, width_;  // H and E
  int64_t groups_;         // with heads of this rank
  std::vector<Part> parts_;
  int64_t held_ = 0;  // columns of B
  bool recomputes_activation_, recomputes_scan_;
  bool split_;
  int context_size_;
  bool by_heads_, passes_states_;  // how ranks share a sequence; neither where they do not
  Linear in_proj_, in_pairs_, out_proj_;
  // In the order of `gradients`, with their shapes.
  std::vector<ParameterId> scan_parameters_;
  std::vector<std::vector<int64_t>> shapes_;
  // Indices into these.
  std::vector<Convolution> convolutions_;
  int dt_bias_, a_log_, d_, gamma_;
};

}  // namespace

std::unique_ptr<Mixer> MakeMamba2Mixer(ParameterRegistry& registry, const Mamba2Spec& spec,
                                       const TensorShard& shard, const Recomputed& recomputed,
                                       const ModelParallel& parallel) {
  return std::make_unique<Mamba2Mixer>(registry, spec, shard, recomputed, parallel);
}

namespace {

LayerSize SizeOfLayer(const LanguageModelConfig& config) {
  const auto& mamba = config.mamba2;
  const int64_t inner = mamba.heads * mamba.head_width, group = mamba.groups * mamba.state;
  const int64_t conv = inner + 2 * group, in = inner + conv + mamba.heads;
  // Per token with chunks of Q positions: the causal halves of C B^T (per group) and of that with
  // x, the state's update and what is read from it.
  constexpr int64_t kChunk = kMamba2Chunk;
  const int64_t scan = kChunk * group + kChunk * inner + 4 * inner * mamba.state;
  // y, and a state in front of every chunk.
  const int64_t tokens = std::max<int64_t>(1, config.sequence_length);
  const int64_t chunks = (tokens + kChunk - 1) / kChunk;
  const int64_t mixing = inner + (inner * mamba.state * chunks + tokens - 1) / tokens;
  return {(in + inner) * config.hidden,
          conv * (mamba.taps + 1) + 3 * mamba.heads + inner,
          inner * config.hidden,
          scan,
          conv + inner,
          mixing};
}

SplitUnit SplitOfLayer(const LanguageModelConfig& config) {
  // Of GEMMs a head has z, x and its rows of the output projection, a group B and C.
  const auto& mamba = config.mamba2;
  return {.kind = SplitKind::kScanHeads,
          .size = mamba.heads,
          .groups = mamba.groups,
          .group_work =
              2.0 * static_cast<double>(mamba.state) / static_cast<double>(3 * mamba.head_width)};
}

std::unique_ptr<Mixer> MakeLayer(const LayerPlace& place) {
  const LanguageModelConfig::Mamba2& mamba = place.config.mamba2;
  return MakeMamba2Mixer(place.registry,
                         {.name = place.block + ".mamba",
                          .hidden = place.config.hidden,
                          .heads = mamba.heads,
                          .head_width = mamba.head_width,
                          .groups = mamba.groups,
                          .state = mamba.state,
                          .taps = mamba.taps,
                          .step_min = static_cast<float>(mamba.step_min),
                          .norm_epsilon = place.config.norm.epsilon,
                          .stddev = kInitialStddev,
                          .output_stddev = place.residual_stddev},
                         place.shard, place.recomputed, place.parallel);
}

void Exchange(const LanguageModelConfig& config, const TensorShard& shard,
              BlockExchanges& exchanges) {
  ++exchanges.scans;
  // The norm in front of the output projection is over the columns of a group.
  if (shard.share(SplitKind::kScanHeads).shares) exchanges.sums_per_token += config.mamba2.groups;
}

void Shape(const LanguageModelConfig& config, const TensorShard& shard, Model::Shape& shape) {
  const LanguageModelConfig::Mamba2& mamba = config.mamba2;
  shape.scan = {mamba.heads, mamba.head_width, mamba.groups, mamba.state, mamba.taps};
  for (const GroupPart& part : shard.share(SplitKind::kScanHeads).parts) {
    shape.own_scans.push_back({part.units.size(), part.groups.size()});
  }
}

}  // namespace

const LayerKind kMamba2Layer = {.name = "mamba2",
                                .size = SizeOfLayer,
                                .split = SplitOfLayer,
                                .make = MakeLayer,
                                .exchange = Exchange,
                                .shape = Shape};

}  // namespace muster::parallel
