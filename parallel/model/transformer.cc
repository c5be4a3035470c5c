#include "parallel/model/transformer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/dropout.h"
#include "parallel/model/embedding.h"
#include "parallel/model/head.h"
#include "parallel/model/linear.h"
#include "parallel/model/norm.h"
#include "parallel/model/qkv.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

// What a block does not keep but computes again.
struct Again {
  bool norms = false;       // their outputs
  bool activation = false;  // the MLP's
  bool products = false;    // all the rest; with both of the others
};

class TransformerBlock : public Block {
 public:
  // `behind`: what the block does whose backward comes next.
  TransformerBlock(ParameterRegistry& registry, const TransformerConfig& config,
                   const ModelParallel& parallel, const TensorPart& part, int64_t index,
                   const Again& again, const Again& behind)
      : name_(absl::StrCat("blocks.", index)),
        hidden_(config.hidden),
        part_(part),
        ffn_(part.ffn.size()),
        swiglu_(config.mlp == MlpKind::kSwiglu),
        rotary_(config.position == PositionKind::kRotary),
        again_(again),
        gathers_ahead_(!again.products && !behind.products),
        split_(parallel.split_backward),
        offload_(parallel.offload_activations),
        context_size_(parallel.context_size),
        context_method_(parallel.context_method),
        context_head_groups_(parallel.context_head_groups),
        deterministic_(parallel.deterministic),
        attention_dropout_{parallel.dropout, Dropout::AttentionSite(index)},
        mlp_dropout_{parallel.dropout, Dropout::MlpSite(index)},
        norm1_(AddNorm(registry, name_ + ".norm1", config.hidden, config.norm, part.by_rows())),
        qkv_(registry,
             {name_ + ".attention.qkv", config.hidden, config.heads, config.kv_heads,
              kInitialStddev, config.bias},
             part) {
    const float residual = kInitialStddev / std::sqrt(2.0f * static_cast<float>(config.layers));
    const int64_t c = config.hidden;
    const auto spec = [&](const char* name, int64_t outputs, int64_t inputs, float stddev) {
      return LinearSpec{name_ + name, outputs, inputs, stddev, config.bias};
    };
    const Span q = {part.heads.begin * qkv_.depth(), part.heads.end * qkv_.depth()};
    std::vector<Span> up = {part.ffn};
    if (swiglu_) up.push_back({config.ffn + part.ffn.begin, config.ffn + part.ffn.end});

    output_ = AddRowParallel(registry, spec(".attention.output", c, c, residual), q, part);
    norm2_ = AddNorm(registry, name_ + ".norm2", c, config.norm, part.by_rows());
    up_ = AddColumnParallel(
        registry, spec(".mlp.up", swiglu_ ? 2 * config.ffn : config.ffn, c, kInitialStddev), up,
        part);
    down_ = AddRowParallel(registry, spec(".mlp.down", c, config.ffn, residual), part.ffn, part);
  }

  const std::string& name() const override { return name_; }
  bool offloads() const override { return offload_; }

  std::unique_ptr<Saved> TakeSaved(Arena& arena, const BatchShape& shape) const override {
    auto saved = std::make_unique<TransformerSaved>();
    saved->norm1.TakeInput(arena, kKept, shape.activation, part_.rows(shape), hidden_);
    if (!again_.products) TakeProducts(arena, kKept, shape, *saved);
    if (!again_.norms) TakeNorms(arena, kKept, shape, *saved);
    if (!again_.activation) TakeActivation(arena, kKept, shape, *saved);
    if (split_) {
      saved->d_norm1 = NormGradients::Take(arena, kKept, norm1_, hidden_);
      saved->d_norm2 = NormGradients::Take(arena, kKept, norm2_, hidden_);
    }
    return saved;
  }

  void TakeScratch(Arena& arena, const BatchShape& shape, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    const int64_t t = shape.tokens();
    if (again_.products) TakeProducts(arena, kScratch, shape, saved);
    if (again_.norms) TakeNorms(arena, kScratch, shape, saved);
    if (again_.activation) TakeActivation(arena, kScratch, shape, saved);
    saved.d_small = arena.Take("scratch", shape.activation, {t, hidden_});
    // The MLP's and the attention's backward follow each other: the larger need serves both.
    const int64_t mark = arena.Mark();
    saved.d_up = arena.Take("scratch", shape.activation, {t, ffn_});
    if (SwigluComesAgain()) saved.up = saved.d_up;
    arena.ReleaseTo(mark);
    saved.d_qkv = qkv_.Take(arena, "scratch", shape.activation, t);
    saved.d_shared = qkv_.TakeScratch(arena, shape.activation, t);
    if (context_size_ == 1) {
      saved.delta = arena.Take("scratch", DType::kF32, {shape.batch, qkv_.heads(), shape.sequence});
    } else {
      saved.spread->TakeScratch(arena, *saved.spread_saved);
    }
  }

  void Forward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    if (part_.pieces(flow.shape) > 1) {
      ForwardInHalves(pass, flow, saved);
      return;
    }
    NormForward(pass, norm1_, flow, saved.norm1);
    saved.x1 = flow.residual;
    AttentionForward(pass, flow, saved);
    NormForward(pass, norm2_, flow, saved.norm2);
    UpForward(pass, flow, saved, /*activate=*/true, [] {});
    RowForward(pass, down_, saved.up, flow, mlp_dropout_, flow.next_sum);
  }
  Tensor SumStorage(const Saved& base) const override {
    return static_cast<const TransformerSaved&>(base).norm1.x;
  }
  std::vector<ParameterId> BeginsWith() const override {
    if (part_.overlap != TensorOverlap::kHalves) return {};
    std::vector<ParameterId> parameters = {norm1_.weight};
    if (norm1_.bias >= 0) parameters.push_back(norm1_.bias);
    return parameters;
  }
  // Norm and gather: the computing stream goes on with the other half.
  void BeginForward(const Pass& pass, Flow& flow, Saved& base, int half) const override {
    const auto& saved = static_cast<const TransformerSaved&>(base);
    const Tensor residual = PieceOf(flow.residual, 2, half);
    const Tensor branch = half == 0 ? flow.branch : flow.second_branch;
    const NormSaved norm = saved.norm1.Piece(2, half);
    Started& begun = Entering(flow, saved.norm1, half);
    begun.done = part_.Start(pass, Collective::kAllGather, [&](const Pass& on) {
      NormForward(on, norm1_, residual, branch, norm);
      begun.sent = TensorPart::Sends(on);
      part_.Enter(on, norm.y, PieceOf(flow.branch_storage, 2, half));
    });
  }

  // Every collective is begun as soon as what it sends is there, and awaited where its result is
  // used, with gradients of weights in between, which nothing else waits for: that of `down` under
  // the sum of the gradient of norm2's output, that of `up` under the gather behind norm2, that of
  // `output` under the second sum, that of qkv under the gather behind norm1. The inputs of `up`
  // and qkv are gathered once more, rather than kept, under what comes before. Where ranks share
  // sequences and no collective of the tensor group overlaps, the gradients of `output` and, where
  // there is memory for that, of `up` are left for the exchanges of attention's backward. Of tokens
  // that come in pieces each is sent as soon as it is there, and those of weights wait for all.
  void Backward(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    InPieces d_out = std::exchange(flow.d_whole, {}), y2;
    if (again_.norms) ForwardAgain(pass, flow, saved, d_out, y2);
    if (d_out.empty()) d_out = StartGradient(pass, flow);
    const bool beside = GathersBeside(flow);
    if (beside && y2.empty()) y2 = StartInput(pass, flow, saved.norm2);
    std::array<Started, 2> d_norm2;
    const Tensor d_mlp = MlpBackwardInput(pass, flow, saved, d_out, d_norm2);
    const bool summed = std::exchange(flow.d_hidden_summed, false);
    if (summed) LinearBackwardBias(pass, down_, flow.d_hidden_sums);
    LinearBackwardWeights(pass, down_, d_mlp, saved.up, /*bias_is_complete=*/summed);
    if (!beside && !LeavesUpForExchange()) {
      UpBackwardWeights(pass, saved, StartInput(pass, flow, saved.norm2));
    }
    if (d_out.count == 1) {
      const bool sums = SumsHiddenGradient(flow);
      NormBackward(pass, norm2_, part_.Await(pass, d_norm2[0]), saved.norm2.x, saved.norm2, flow,
                   sums ? (*pass.gradients)[*output_.bias] : Tensor());
      if (sums) Ready(pass, *output_.bias);
      d_out = StartGradient(pass, flow);
    } else {
      d_out = NormBackwardGathering(pass, norm2_, d_norm2, saved.norm2.x, saved.norm2, flow);
    }
    if (beside) UpBackwardWeights(pass, saved, y2);
    AttentionBackward(pass, flow, saved, d_out);
  }

  // Leaves behind, for BackwardWeights: the gradients of the outputs of the four products in the
  // place of norm2.x (down), pre (up), norm1.x (output) and qkv (qkv). Their inputs, norm2.y, up,
  // norm1.y and attention, stay.
  void BackwardInput(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    kernels::Stream& stream = pass.stream;
    EnterKeeping(pass, flow, mlp_dropout_, [&](Tensor dy, int64_t first) {
      const int64_t rows = dy.dim(0);
      const Tensor d_up = saved.d_up.Rows(first, rows), pre = saved.pre.Rows(first, rows);
      if (swiglu_) {
        LinearBackwardInputThroughSwiglu(pass, down_, dy, /*x=*/Tensor(), d_up, pre);
      } else {
        LinearBackwardInput(pass, down_, dy, d_up, pre);
      }
    });
    if (!swiglu_) kernels::Copy(stream, saved.d_up, saved.pre);
    const Tensor d_norm2 =
        part_.LeaveThrough(pass, saved.d_small, flow.gathered, [&](int64_t first, Tensor dx) {
          LinearBackwardInput(pass, up_, saved.pre.Rows(first, dx.dim(0)), dx);
        });
    NormBackwardInput(pass, norm2_, d_norm2, saved.norm2.x, saved.norm2, flow.d_hidden,
                      saved.d_norm2);
    kernels::Copy(stream, KeptGradient(flow), saved.norm2.x);
    EnterKeeping(pass, flow, attention_dropout_, [&](Tensor dy, int64_t first) {
      LinearBackwardInput(pass, output_, dy, AttentionGradient(saved).Rows(first, dy.dim(0)));
    });
    ScoresBackward(pass, flow, saved, {});
    const Tensor d_norm1 = part_.LeaveThrough(
        pass, saved.d_small, flow.gathered,
        [&](int64_t first, Tensor dx) { QkvBackwardInput(pass, saved, first, dx); });
    Copy(stream, saved.d_qkv, saved.qkv);
    NormBackwardInput(pass, norm1_, d_norm1, saved.x1, saved.norm1, flow.d_hidden, saved.d_norm1);
    kernels::Copy(stream, KeptGradient(flow), saved.norm1.x);
  }
  void BackwardWeights(const Pass& pass, Flow& flow, Saved& base) const override {
    auto& saved = static_cast<TransformerSaved&>(base);
    // Each is gathered under the product before it.
    const Tensor rows[] = {saved.norm2.x, saved.norm2.y, saved.norm1.x, saved.norm1.y};
    const bool beside = GathersBeside(flow);
    int next = 0;
    const auto start = [&] {
      const Tensor storage = beside && next % 2 == 0 ? flow.gathered : flow.branch_storage;
      return part_.StartEnter(pass, rows[next++], storage);
    };
    Started begun = beside ? start() : Started();
    const auto whole = [&] {
      const Started now = beside ? begun : start();
      if (beside && next < 4) begun = start();
      return part_.Await(pass, now);
    };
    LinearBackwardWeights(pass, down_, whole(), saved.up);
    LinearBackwardWeights(pass, up_, saved.pre, whole());
    NormBackwardWeights(pass, norm2_, saved.d_norm2);
    LinearBackwardWeights(pass, output_, whole(), saved.attention);
    qkv_.BackwardWeights(pass, saved.qkv, whole());
    NormBackwardWeights(pass, norm1_, saved.d_norm1);
  }

 private:
  static constexpr char kKept[] = "activations";
  static constexpr char kScratch[] = "scratch";

  struct TransformerSaved : Saved {
    NormSaved norm1, norm2;
    Tensor x1;  // input of norm1: norm1.x, or what came from outside into the first block
    QkvProjection::Output qkv;
    Tensor attention, lse, pre, up;
    Tensor d_small, d_up, delta, d_shared;  // scratch
    QkvProjection::Output d_qkv;            // scratch
    // Where several ranks share a sequence, in the place of lse and delta.
    std::unique_ptr<ContextAttention> spread;
    std::unique_ptr<ContextAttention::Saved> spread_saved;
    NormGradients d_norm1, d_norm2;  // between two calls of backward
  };

  // What matrix products and attention make, and what has to go through them again to be had.
  void TakeProducts(Arena& arena, const char* category, const BatchShape& shape,
                    TransformerSaved& saved) const {
    const int64_t t = shape.tokens(), rows = part_.rows(shape);
    const DType activation = shape.activation;
    // The sum that flows on stands first, where no other block writes before reading it.
    saved.norm2.TakeInput(arena, category, activation, rows, hidden_);
    saved.norm1.TakeStatistics(arena, category, norm1_, rows);
    saved.norm2.TakeStatistics(arena, category, norm2_, rows);
    saved.qkv = qkv_.Take(arena, category, activation, t);
    saved.attention = arena.Take(category, activation, {t, AttentionWidth()});
    if (context_size_ == 1) {
      saved.lse = arena.Take(category, DType::kF32, {shape.batch, qkv_.heads(), shape.sequence});
    } else {
      auto spread = MakeContextAttention({context_method_, context_size_, shape.batch,
                                          shape.sequence * context_size_, qkv_.heads(),
                                          qkv_.kv_heads(), qkv_.depth(), shape.activation,
                                          deterministic_, context_head_groups_});
      CHECK_OK(spread);
      saved.spread = *std::move(spread);
      saved.spread_saved = saved.spread->TakeSaved(arena);
    }
    saved.pre = arena.Take(category, activation, {t, UpWidth()});
  }
  // What norms make.
  void TakeNorms(Arena& arena, const char* category, const BatchShape& shape,
                 TransformerSaved& saved) const {
    const int64_t rows = part_.rows(shape);
    saved.norm1.TakeOutput(arena, category, shape.activation, rows, hidden_);
    saved.norm2.TakeOutput(arena, category, shape.activation, rows, hidden_);
  }
  // What the MLP's activation makes.
  void TakeActivation(Arena& arena, const char* category, const BatchShape& shape,
                      TransformerSaved& saved) const {
    if (SwigluComesAgain()) return;
    saved.up = arena.Take(category, shape.activation, {shape.tokens(), ffn_});
  }

  // The samples in two halves. What a half waits for is on its way while the other one is computed:
  // on the tensor group's stream the sum of its branch, the norm behind that and the gather of its
  // output follow each other, and the next block's beginning follows this one's end. Sum and norm
  // run between the two products of the other half, the gather under the second.
  void ForwardInHalves(const Pass& pass, Flow& flow, TransformerSaved& saved) const {
    const InPieces begun = Begin(pass, flow, saved);
    saved.x1 = flow.branch.empty() ? flow.residual : saved.norm1.x;
    flow.branch = flow.second_branch = Tensor();
    const InPieces y2 = AttentionInHalves(pass, flow, saved, begun);
    flow.residual = saved.norm2.x;
    std::array<kernels::Event*, 2> left;
    const bool ahead = flow.next != nullptr;
    for (const int half : {0, 1}) {
      const Tensor x = part_.Await(pass, y2.pieces[half]);
      Up(pass, saved, x, half * x.dim(0), /*activate=*/true);
      if (half == 0) {
        TensorPart::AwaitSent(pass, y2.pieces[1]);
      } else if (ahead) {
        TensorPart::AwaitSent(pass, flow.begun.pieces[0]);
      }
      const Tensor y = PieceOf(flow.branch_storage, 2, half);
      LinearForward(pass, down_, PieceOf(saved.up, 2, half), y);
      Tensor& branch = half == 0 ? flow.branch : flow.second_branch;
      left[half] = part_.Start(pass, Ends(), [&](const Pass& on) {
        branch = LeaveWithDropout(on, flow, y, mlp_dropout_, half, /*gather_follows=*/ahead);
      });
      if (ahead) flow.next->BeginForward(pass, flow, *flow.next_saved, half);
    }
    // Who goes on with all of it does so on the computing stream.
    for (const int half : {0, 1}) {
      if (!ahead) part_.Await(pass, {Tensor(), left[half]});
    }
  }
  // What BeginForward has for Forward, by halves.
  Started& Entering(Flow& flow, const NormSaved& norm, int half) const {
    InPieces& begun = flow.begun;
    begun.all = part_.sequence ? flow.branch_storage : norm.y;
    begun.count = half + 1;
    begun.pieces[half].tensor = PieceOf(begun.all, 2, half);
    return begun.pieces[half];
  }
  InPieces Begin(const Pass& pass, Flow& flow, TransformerSaved& saved) const {
    for (const int half : {0, 1}) {
      if (flow.begun.count == half) BeginForward(pass, flow, saved, half);
    }
    return std::exchange(flow.begun, {});
  }
  // From norm1's output to norm2's, `y1` and the result all rows of them.
  InPieces AttentionInHalves(const Pass& pass, const Flow& flow, const TransformerSaved& saved,
                             const InPieces& y1) const {
    InPieces y2 = {.all = part_.sequence ? flow.branch_storage : saved.norm2.y, .count = 2};
    const int64_t samples = flow.shape.batch / 2, rows = flow.shape.tokens() / 2;
    const auto project = [&](int half) {
      const Tensor x = part_.Await(pass, y1.pieces[half]);
      qkv_.Forward(pass, x, saved.qkv.Rows(half * rows, rows), rotary_ ? flow.rotary : Tensor());
    };
    // Ranks that share sequences exchange those of all samples at once.
    if (context_size_ > 1) {
      for (const int half : {0, 1}) project(half);
      saved.spread->Forward({pass.stream, *pass.context, pass.context_overlap}, Spread(flow, saved),
                            *saved.spread_saved);
    }
    for (const int half : {0, 1}) {
      if (context_size_ == 1) {
        project(half);
        kernels::AttentionForward(pass.stream,
                                  Attention(flow, saved, {half * samples, (half + 1) * samples}));
      }
      // The other half's, whose gather can then run under this product.
      TensorPart::AwaitSent(pass, half == 0 ? y1.pieces[1] : y2.pieces[0]);
      const Tensor y = PieceOf(flow.branch_storage, 2, half);
      LinearForward(pass, output_, PieceOf(saved.attention, 2, half), y);
      const NormSaved norm = saved.norm2.Piece(2, half);
      Started& entering = y2.pieces[half];
      entering.tensor = PieceOf(y2.all, 2, half);
      entering.done = part_.Start(pass, Collective::kAllGather, [&](const Pass& on) {
        const Tensor branch =
            LeaveWithDropout(on, flow, y, attention_dropout_, half, /*gather_follows=*/true);
        NormForward(on, norm2_, PieceOf(saved.x1, 2, half), branch, norm);
        entering.sent = TensorPart::Sends(on);
        part_.Enter(on, norm.y, y);
      });
    }
    return y2;
  }
  // What ends a pair of matrices.
  Collective Ends() const {
    return part_.sequence ? Collective::kReduceScatter : Collective::kAllReduce;
  }
  // This rank's rows of the sum of a piece, without what is dropped.
  Tensor LeaveWithDropout(const Pass& pass, const Flow& flow, const Tensor& partial,
                          const Dropout& dropout, int piece, bool gather_follows = false) const {
    const Tensor rows = part_.Leave(pass, partial, gather_follows);
    dropout.Apply(pass, flow, rows, rows, part_.FirstToken(flow.shape, piece));
    return rows;
  }

  // Norms consume the branch: its storage is free for their gathered rows.
  void AttentionForward(const Pass& pass, Flow& flow, const TransformerSaved& saved) const {
    bool turn = rotary_;
    const auto product = [&](Tensor x, int64_t first) {
      const int64_t rows = x.dim(0);
      // Whole sequences are turned on the way; pieces of them once all have come.
      const bool whole = rotary_ && rows % flow.shape.sequence == 0;
      if (whole) turn = false;
      qkv_.Forward(pass, x, saved.qkv.Rows(first, rows), whole ? flow.rotary : Tensor());
    };
    part_.EnterThrough(pass, saved.norm1.y, flow.branch_storage, product, /*keeps_all=*/false);
    if (turn) qkv_.Rotate(pass, flow, saved.qkv, /*inverse=*/false);
    if (context_size_ == 1) {
      kernels::AttentionForward(pass.stream, Attention(flow, saved));
    } else {
      saved.spread->Forward({pass.stream, *pass.context, pass.context_overlap}, Spread(flow, saved),
                            *saved.spread_saved);
    }
    RowForward(pass, output_, saved.attention, flow, attention_dropout_, saved.norm2.x);
  }
  // From norm2's output, all rows of which end up in the branch's storage, to the pre-activation
  // and, with GELU or `activate`, the activation. `begun` is called behind the last exchange.
  void UpForward(const Pass& pass, const Flow& flow, const TransformerSaved& saved, bool activate,
                 absl::FunctionRef<void()> begun) const {
    bool waiting = true;
    const auto product = [&](Tensor x, int64_t first) {
      if (std::exchange(waiting, false)) begun();
      Up(pass, saved, x, first, activate);
    };
    // Who makes it again goes on with all rows of its input.
    part_.EnterThrough(pass, saved.norm2.y, flow.branch_storage, product,
                       /*keeps_all=*/!activate);
  }
  // From rows [first, first + x.dim(0)) of norm2's output.
  void Up(const Pass& pass, const TransformerSaved& saved, const Tensor& x, int64_t first,
          bool activate) const {
    const Tensor pre = saved.pre.Rows(first, x.dim(0));
    if (swiglu_ && !activate) {
      LinearForward(pass, up_, x, pre);
      return;
    }
    const Tensor y = saved.up.Rows(first, x.dim(0));
    if (swiglu_) {
      LinearForwardThroughSwiglu(pass, up_, x, pre, y);
    } else {
      LinearForward(pass, up_, x, y, pre);
    }
  }
  // The last product of a pair: this rank's rows of the sum, without what is dropped, become the
  // branch. Where this rank has all of the sum, and the norm behind keeps its input in `next_sum`,
  // the product adds the residual stream, and the norm need not.
  void RowForward(const Pass& pass, const Linear& linear, const Tensor& x, Flow& flow,
                  const Dropout& dropout, const Tensor& next_sum) const {
    if (part_.size == 1 && !next_sum.empty() && !dropout.Drops(pass)) {
      LinearForwardAdding(pass, linear, x, flow.residual, next_sum);
      flow.residual = next_sum;
      return;
    }
    const Tensor rows = part_.LeaveThrough(
        pass, flow.branch_storage, flow.gathered,
        [&](int64_t first, Tensor y) { LinearForward(pass, linear, x.Rows(first, y.dim(0)), y); });
    dropout.Apply(pass, flow, rows, rows, part_.FirstToken(flow.shape, 0));
    flow.branch = rows;
  }
  // Its gradient, from all rows of d_hidden, as one piece after the other arrives; `use` gets each,
  // with the first row of it. Those that were gathered are nobody else's; d_hidden itself also
  // flows along the residual, and nothing stands in the branch's storage then. Returns all of it.
  Tensor Dropped(const Pass& pass, const Flow& flow, const InPieces& d_out, const Dropout& dropout,
                 absl::FunctionRef<void(Tensor dy, int64_t first)> use) const {
    const Tensor& all = dropout.Drops(pass) && !part_.sequence ? flow.branch_storage : d_out.all;
    for (int piece = 0; piece < d_out.count; ++piece) {
      const Tensor arrived = part_.Await(pass, d_out.pieces[piece]);
      const Tensor dy = PieceOf(all, d_out.count, piece);
      const int64_t first = piece * dy.dim(0);
      dropout.Apply(pass, flow, arrived, dy, first);
      use(dy, first);
    }
    return all;
  }
  // Makes what was not kept, but for the activation of a block that keeps its products: that comes
  // with its gradient. Where everything comes again, and gathers overlap, the gather of d_hidden is
  // begun on the way, and all rows of norm2's output stay where they were needed.
  void ForwardAgain(const Pass& pass, const Flow& flow, TransformerSaved& saved, InPieces& d_out,
                    InPieces& y2) const {
    Flow again = flow;
    again.residual = saved.x1;
    again.branch = again.second_branch = Tensor();
    NormForward(pass, norm1_, again, saved.norm1);
    if (again_.products && part_.pieces(flow.shape) > 1) {
      const InPieces y1 = part_.StartEnter(pass, saved.norm1.y, flow.branch_storage, 2);
      y2 = AttentionInHalves(pass, flow, saved, y1);
      if (GathersBeside(flow)) d_out = StartGradient(pass, flow);
      for (const int half : {0, 1}) {
        const Tensor x = part_.Await(pass, y2.pieces[half]);
        Up(pass, saved, x, half * x.dim(0), /*activate=*/false);
        y2.pieces[half].done = nullptr;
      }
      if (!GathersBeside(flow)) y2 = {};
      return;
    }
    if (again_.products) {
      AttentionForward(pass, again, saved);
      NormForward(pass, norm2_, again, saved.norm2);
      UpForward(pass, flow, saved, /*activate=*/false, [&] {
        if (!GathersBeside(flow)) return;
        d_out = StartGradient(pass, flow);
        y2 = {flow.branch_storage, {Started{flow.branch_storage}}, 1};
      });
      return;
    }
    again.residual = saved.norm2.x;
    NormForward(pass, norm2_, again, saved.norm2);
  }
  // The MLP's activation comes again with its gradient, in one pass: in the place of d_up, which
  // that pass reads.
  bool SwigluComesAgain() const { return swiglu_ && again_.activation; }

  // Whether there is memory for two gathers at once.
  static bool GathersBeside(const Flow& flow) { return !flow.gathered.empty(); }
  // All rows of flow.d_hidden.
  InPieces StartGradient(const Pass& pass, const Flow& flow) const {
    return part_.StartEnter(pass, flow.d_hidden, GradientStorage(flow), part_.pieces(flow.shape));
  }
  static const Tensor& GradientStorage(const Flow& flow) {
    return GathersBeside(flow) ? flow.gathered : flow.branch_storage;
  }
  // Those of a norm's output.
  InPieces StartInput(const Pass& pass, const Flow& flow, const NormSaved& norm) const {
    return part_.StartEnter(pass, norm.y, flow.branch_storage, part_.pieces(flow.shape));
  }
  // NormBackwardInPieces, behind each piece of which the gather of its d_hidden begins.
  InPieces NormBackwardGathering(const Pass& pass, const Norm& norm,
                                 const std::array<Started, 2>& dy, const Tensor& x,
                                 const NormSaved& saved, const Flow& flow) const {
    const Tensor& storage = GradientStorage(flow);
    InPieces d_hidden = {.all = part_.sequence ? storage : flow.d_hidden, .count = 2};
    NormBackwardInPieces(pass, norm, dy, x, saved, flow.d_hidden, [&](int piece) {
      d_hidden.pieces[piece] =
          part_.StartEnter(pass, PieceOf(flow.d_hidden, 2, piece), PieceOf(storage, 2, piece));
    });
    return d_hidden;
  }

  // From the gradient of the MLP's output, which is returned, to that of norm2's: this rank's part
  // of it goes through saved.d_small to the ranks, piece by piece.
  Tensor MlpBackwardInput(const Pass& pass, const Flow& flow, const TransformerSaved& saved,
                          const InPieces& d_out, std::array<Started, 2>& d_norm2) const {
    const auto leave = [&](const Tensor& d_up, int64_t first) {
      const int64_t rows = d_up.dim(0);
      const Tensor dx = saved.d_small.Rows(first, rows);
      LinearBackwardInput(pass, up_, d_up, dx);
      // What attention's backward writes there has awaited the gather behind norm2.
      d_norm2[first / rows] = part_.StartLeave(pass, dx, /*gather_follows=*/true);
    };
    if (swiglu_) {
      return Dropped(pass, flow, d_out, mlp_dropout_, [&](Tensor dy, int64_t first) {
        const int64_t rows = dy.dim(0);
        const Tensor pre = saved.pre.Rows(first, rows);
        LinearBackwardInputThroughSwiglu(pass, down_, dy,
                                         SwigluComesAgain() ? saved.up.Rows(first, rows) : Tensor(),
                                         saved.d_up.Rows(first, rows), pre);
        leave(pre, first);
      });
    }
    // The bias of `up` gets the sum over all rows at once.
    const Tensor dy = Dropped(pass, flow, d_out, mlp_dropout_, [](Tensor, int64_t) {});
    LinearBackwardInputThroughGelu(pass, down_, dy, saved.up, saved.d_up, saved.pre, up_,
                                   again_.activation && !again_.products);
    for (int piece = 0; piece < d_out.count; ++piece) {
      const Tensor d_up = PieceOf(saved.d_up, d_out.count, piece);
      leave(d_up, piece * d_up.dim(0));
    }
    return dy;
  }
  void UpBackwardWeights(const Pass& pass, const TransformerSaved& saved,
                         const InPieces& y2) const {
    LinearBackwardWeights(pass, up_, swiglu_ ? saved.pre : saved.d_up, part_.Await(pass, y2),
                          /*bias_is_complete=*/!swiglu_);
  }
  // Whether the norms' backward gives the gradients of the biases in front of them.
  static bool SumsHiddenGradient(const Flow& flow) { return !flow.d_hidden_sums.empty(); }
  // Whether gradients of weights are left for the exchanges of the context group. Where collectives
  // of the tensor group overlap, those have them: they carry more.
  bool LeavesForExchanges() const {
    return context_size_ > 1 && part_.overlap == TensorOverlap::kNone;
  }
  // That of `up` too. What it needs must last so long: with GELU the gradient of its output stands
  // where attention's scratch memory is, and rows of its input that have to be gathered would take
  // the place of those of d_hidden.
  bool LeavesUpForExchange() const { return LeavesForExchanges() && swiglu_ && !part_.sequence; }
  // `d_out`: of the gradient of attention's output. To flow.d_hidden.
  void AttentionBackward(const Pass& pass, Flow& flow, const TransformerSaved& saved,
                         const InPieces& d_out) const {
    const bool beside = GathersBeside(flow);
    InPieces y1;
    if (beside) y1 = StartInput(pass, flow, saved.norm1);
    const Tensor dy = Dropped(pass, flow, d_out, attention_dropout_, [&](Tensor of, int64_t first) {
      LinearBackwardInput(pass, output_, of, AttentionGradient(saved).Rows(first, of.dim(0)));
    });
    const auto output_weights = [&] {
      LinearBackwardWeights(pass, output_, dy, saved.attention,
                            /*bias_is_complete=*/SumsHiddenGradient(flow));
    };
    const auto up_weights = [&] {
      UpBackwardWeights(pass, saved, StartInput(pass, flow, saved.norm2));
    };
    BesideScores work;
    if (LeavesForExchanges()) work.first = output_weights;
    // The last exchange is the larger one, and `up` the larger product.
    if (LeavesUpForExchange()) work.last = up_weights;
    ScoresBackward(pass, flow, saved, work);
    std::array<Started, 2> d_norm1;
    for (int piece = 0; piece < d_out.count; ++piece) {
      const Tensor dx = PieceOf(saved.d_small, d_out.count, piece);
      QkvBackwardInput(pass, saved, piece * dx.dim(0), dx);
      // No gather follows: the next block of backward may recompute its norms in this memory first.
      d_norm1[piece] = part_.StartLeave(pass, dx);
    }
    if (!LeavesForExchanges()) output_weights();
    // The block behind takes the gather over, unless it uses the memory before.
    const bool ahead = beside && flow.more_behind && gathers_ahead_;
    const auto weights = [&] {
      if (!beside) y1 = StartInput(pass, flow, saved.norm1);
      qkv_.BackwardWeights(pass, saved.d_qkv, part_.Await(pass, y1));
    };
    if (!ahead) weights();
    if (d_out.count == 1) {
      NormBackward(pass, norm1_, part_.Await(pass, d_norm1[0]), saved.x1, saved.norm1, flow);
      if (ahead) flow.d_whole = StartGradient(pass, flow);
    } else if (ahead) {
      flow.d_whole = NormBackwardGathering(pass, norm1_, d_norm1, saved.x1, saved.norm1, flow);
    } else {
      NormBackwardInPieces(pass, norm1_, d_norm1, saved.x1, saved.norm1, flow.d_hidden, [](int) {});
    }
    if (ahead) weights();
  }
  // Rows [first, first + dx.dim(0)).
  void QkvBackwardInput(const Pass& pass, const TransformerSaved& saved, int64_t first,
                        const Tensor& dx) const {
    const int64_t rows = dx.dim(0);
    qkv_.BackwardInput(pass, saved.d_qkv.Rows(first, rows), dx,
                       saved.d_shared.empty() ? Tensor() : saved.d_shared.Rows(first, rows));
  }
  Tensor AttentionGradient(const TransformerSaved& saved) const {
    return Tensor(saved.d_small.data(), saved.d_small.dtype(),
                  {saved.attention.dim(0), AttentionWidth()});
  }
  // Work for the exchanges of the context group (ContextAttention::Call).
  struct BesideScores {
    std::function<void()> first = nullptr, last = nullptr;
  };
  // From the gradient of the attention's output to saved.d_qkv. Requires of `beside`: no work
  // where there is no such group.
  void ScoresBackward(const Pass& pass, const Flow& flow, const TransformerSaved& saved,
                      const BesideScores& beside) const {
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(flow, saved);
    args.dout = AttentionHeads(AttentionGradient(saved), flow.shape);
    args.dq = qkv_.Queries(saved.d_qkv, flow.shape);
    args.dk = qkv_.Keys(saved.d_qkv, flow.shape);
    args.dv = qkv_.Values(saved.d_qkv, flow.shape);
    args.delta = saved.delta;
    args.deterministic = deterministic_;
    if (context_size_ == 1) {
      kernels::AttentionBackward(pass.stream, args);
    } else {
      saved.spread->Backward(
          {pass.stream, *pass.context, pass.context_overlap, beside.first, beside.last},
          Spread(flow, saved), {args.dout, args.dq, args.dk, args.dv}, *saved.spread_saved);
    }
    if (rotary_) qkv_.Rotate(pass, flow, saved.d_qkv, /*inverse=*/true);
  }

  // Through `product` from flow.d_hidden without what was dropped, of which this rank's rows stay
  // in the branch's storage while d_hidden changes.
  void EnterKeeping(const Pass& pass, const Flow& flow, const Dropout& dropout,
                    TensorPart::RowsIn product) const {
    if (!dropout.Drops(pass)) {
      if (!part_.sequence) kernels::Copy(pass.stream, flow.d_hidden, flow.branch_storage);
      part_.EnterThrough(pass, flow.d_hidden, flow.branch_storage, product);
      return;
    }
    part_.EnterThrough(pass, flow.d_hidden, flow.branch_storage, [&](Tensor dy, int64_t first) {
      const Tensor rows = flow.branch_storage.Rows(first, dy.dim(0));
      dropout.Apply(pass, flow, dy, rows, first);
      product(rows, first);
    });
  }
  Tensor KeptGradient(const Flow& flow) const {
    const int64_t rows = part_.rows(flow.shape);
    return flow.branch_storage.Rows(part_.sequence ? part_.rank * rows : 0, rows);
  }

  int64_t AttentionWidth() const { return qkv_.heads() * qkv_.depth(); }
  int64_t UpWidth() const { return swiglu_ ? 2 * ffn_ : ffn_; }

  // Attention's output [T,HD], or its gradient, as [B,S,H,D].
  Tensor AttentionHeads(Tensor output, const BatchShape& shape) const {
    return output.Reshape({shape.batch, shape.sequence, qkv_.heads(), qkv_.depth()});
  }
  ContextAttention::Inputs Spread(const Flow& flow, const TransformerSaved& saved) const {
    const BatchShape& shape = flow.shape;
    return {qkv_.Queries(saved.qkv, shape), qkv_.Keys(saved.qkv, shape),
            qkv_.Values(saved.qkv, shape), AttentionHeads(saved.attention, shape), flow.documents};
  }
  kernels::AttentionArgs Attention(const Flow& flow, const TransformerSaved& saved) const {
    return Attention(flow, saved, {0, flow.shape.batch});
  }
  kernels::AttentionArgs Attention(const Flow& flow, const TransformerSaved& saved,
                                   Span samples) const {
    BatchShape shape = flow.shape;
    shape.batch = samples.size();
    const int64_t first = samples.begin * shape.sequence;
    const QkvProjection::Output qkv = saved.qkv.Rows(first, shape.tokens());
    kernels::AttentionArgs args;
    args.q = qkv_.Queries(qkv, shape);
    args.k = qkv_.Keys(qkv, shape);
    args.v = qkv_.Values(qkv, shape);
    args.out = AttentionHeads(saved.attention.Rows(first, shape.tokens()), shape);
    if (!saved.lse.empty()) args.lse = saved.lse.Rows(samples.begin, shape.batch);
    if (!flow.documents.empty()) {
      args.documents = flow.documents.Rows(samples.begin, shape.batch);
    }
    return args;
  }

  std::string name_;
  int64_t hidden_;
  TensorPart part_;
  int64_t ffn_;  // of this rank
  bool swiglu_, rotary_;
  Again again_;
  bool gathers_ahead_;  // for the block behind
  bool split_;
  bool offload_;
  int context_size_;
  ContextMethod context_method_;
  int context_head_groups_;
  bool deterministic_;
  Dropout attention_dropout_, mlp_dropout_;
  Norm norm1_;
  QkvProjection qkv_;
  Linear output_;
  Norm norm2_;
  Linear up_, down_;
};

// Weights of one block's matrix products.
int64_t BlockWeights(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t qkv = (config.heads + 2 * config.kv_heads) * depth;
  return qkv * c + c * c + (config.mlp == MlpKind::kSwiglu ? 3 : 2) * config.ffn * c;
}

// What each of the rank's `blocks` transformer blocks computes again. Where only some are to
// (recompute_blocks), kSelective gives up as many bytes as that in as many blocks as it takes,
// activations first: they come with their gradient for next to nothing, norms cost a pass each.
std::vector<Again> AgainOf(const ModelParallel& parallel, const TransformerConfig& config,
                           const TensorPart& part, int64_t blocks) {
  std::vector<Again> again(blocks);
  const int64_t wanted =
      parallel.recompute_blocks > 0 ? std::min<int64_t>(parallel.recompute_blocks, blocks) : blocks;
  if (parallel.recompute == Recompute::kFull) {
    std::fill_n(again.begin(), wanted, Again{true, true, true});
  } else if (parallel.recompute == Recompute::kSelective) {
    // Of a token in a block, on all ranks that share it.
    const int64_t activation = config.ffn;
    const int64_t norms = 2 * config.hidden * (part.sequence ? 1 : part.size);
    const int64_t values = wanted * (activation + norms);
    const int64_t activations = std::min(blocks, (values + activation - 1) / activation);
    const int64_t rest = std::max<int64_t>(0, values - activations * activation);
    const int64_t with_norms = std::min(blocks, (rest + norms - 1) / norms);
    for (int64_t i = 0; i < activations; ++i) again[i].activation = true;
    for (int64_t i = 0; i < with_norms; ++i) again[i].norms = true;
  }
  return again;
}

}  // namespace

int64_t ParameterCount(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t norm = config.norm.kind == NormKind::kLayer ? 2 * c : c;
  const int64_t up = config.mlp == MlpKind::kSwiglu ? 2 * config.ffn : config.ffn;
  const int64_t biases =
      config.bias ? (config.heads + 2 * config.kv_heads) * depth + c + up + c : 0;
  const int64_t positions = config.position == PositionKind::kLearned ? config.sequence_length : 0;
  return config.layers * (BlockWeights(config) + 2 * norm + biases) + norm +
         ((config.tied ? 1 : 2) * config.vocab + positions) * c;
}

Model::FlopsPerToken CountFlops(const TransformerConfig& config, int64_t again) {
  const int64_t c = config.hidden;
  // Per block: of products and of attention, forward.
  const int64_t weights = BlockWeights(config), attention = 2 * config.sequence_length * c;
  Model::FlopsPerToken flops;
  flops.model = 6 * (config.layers * weights + config.vocab * c) + 3 * config.layers * attention;
  // A block's last product is not needed again.
  flops.hardware = flops.model + again * (2 * (weights - config.ffn * c) + attention);
  return flops;
}

std::unique_ptr<Model> MakeTransformer(const TransformerConfig& config,
                                       const ModelDescription& description,
                                       const ModelParallel& parallel) {
  CHECK(config.layers > 0 && config.hidden > 0 && config.heads > 0 && config.kv_heads > 0 &&
        config.ffn > 0 && config.vocab > 0 && config.sequence_length > 0);
  CHECK_EQ(config.hidden % config.heads, 0);
  CHECK_EQ(config.heads % config.kv_heads, 0);
  const int64_t depth = config.hidden / config.heads;
  CHECK(config.position != PositionKind::kRotary || depth % 2 == 0);
  CHECK_OK(CheckTensorParallel(parallel, config.heads, config.ffn, config.vocab));
  CHECK(parallel.dropout >= 0 && parallel.dropout < 1) << parallel.dropout;
  const TensorPart tensor =
      TensorPart::Make(parallel, config.heads, config.kv_heads, config.ffn, config.vocab);
  auto registry = std::make_unique<ParameterRegistry>();
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<BlockRange> parts = parallel.parts;
  if (parts.empty()) parts.push_back({});
  const int head = static_cast<int>(config.layers) + 1;
  std::optional<ParameterId> token;
  int64_t transformers = 0;  // on this rank
  for (const BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    transformers += std::max(0, std::min(end, head) - std::max(part.begin, 1));
  }
  const std::vector<Again> repeats = AgainOf(parallel, config, tensor, transformers);
  int64_t next = 0, again = 0;  // of those; that recompute everything
  const bool has_head = std::any_of(parts.begin(), parts.end(), [&](const BlockRange& part) {
    return part.end < 0 || part.end == head + 1;
  });
  for (BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    CHECK(part.begin >= 0 && part.begin < end && end <= head + 1);
    const int first = static_cast<int>(blocks.size());
    for (int i = part.begin; i < end; ++i) {
      registry->BeginBlock(static_cast<int>(blocks.size()), /*resident=*/i == 0 || i == head);
      if (i == 0) {
        const ParameterId table = AddTokenTable(
            *registry, config, tensor,
            config.tied && !has_head ? TableUse::kEmbeddingOfTwo : TableUse::kOneStage);
        if (config.tied) token = table;
        blocks.push_back(MakeEmbedding(*registry, config, tensor, parallel.context_size, table,
                                       /*shared=*/config.tied && has_head, parallel.dropout));
      } else if (i < head) {
        // The first block of a part has none behind.
        const Again behind = i > part.begin + 1 && next > 0 ? repeats[next - 1] : Again{};
        const Again& repeat = repeats[next++];
        if (repeat.products) ++again;
        blocks.push_back(std::make_unique<TransformerBlock>(*registry, config, parallel, tensor,
                                                            i - 1, repeat, behind));
      } else {
        const bool shared = token.has_value();
        if (!shared) token = AddHeadTable(*registry, config, tensor);
        blocks.push_back(MakeHead(*registry, config.norm, config.hidden, tensor, *token, shared));
      }
    }
    part = {first, static_cast<int>(blocks.size())};
  }
  if (static_cast<int>(blocks.size()) == head + 1 && tensor.size == 1) {
    CHECK_EQ(registry->elements(), ParameterCount(config));
  }
  Model::Shape shape;
  shape.hidden = config.hidden;
  shape.vocab = config.vocab;
  shape.vocab_storage = tensor.vocab_storage;
  shape.sequence_max = config.sequence_length;
  shape.context_size = parallel.context_size;
  if (config.position == PositionKind::kRotary) {
    shape.rotary_width = depth;
    shape.rope_theta = config.rope_theta;
    shape.rope_scaling = config.rope_scaling;
  }
  shape.tensor_size = tensor.size;
  if (tensor.shares_kv) shape.kv_group = static_cast<int>(tensor.kv_heads.begin);
  shape.sequence_parallel = tensor.sequence;
  shape.tensor_overlap = tensor.overlap;
  shape.split_backward = parallel.split_backward;
  shape.documents = parallel.documents;
  shape.context_method = parallel.context_method;
  shape.deterministic = parallel.deterministic;
  shape.dropout = parallel.dropout > 0;
  // What is added to the residual stream has the gradient that its norm leaves: all rows of it,
  // undropped.
  shape.sums_hidden_gradient = config.bias && config.norm.kind == NormKind::kLayer &&
                               tensor.size == 1 && !shape.dropout && !shape.split_backward;
  // The other ranks of a pipeline do as this one.
  const int64_t again_everywhere = again * config.layers / std::max<int64_t>(1, transformers);
  return std::make_unique<Model>(description, shape, std::move(registry), std::move(blocks),
                                 CountFlops(config, again_everywhere), std::move(parts));
}

}  // namespace muster::parallel
