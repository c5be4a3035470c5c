#include "parallel/model/qkv.h"

#include "kernels/attention/rotary.h"
#include "kernels/device/device.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::Tensor;

QkvProjection::QkvProjection(ParameterRegistry& registry, const Spec& spec,
                             const TensorShard& shard)
    : hidden_(spec.hidden),
      heads_(shard.heads().size()),
      kv_heads_(shard.kv_heads().size()),
      depth_(spec.head_width),
      shares_(shard.share(SplitKind::kHeads).shares) {
  const int64_t keys = spec.heads * depth_, values = keys + spec.kv_heads * depth_;
  const LinearSpec whole = {spec.name, values + spec.kv_heads * depth_, spec.hidden, spec.stddev,
                            spec.bias};
  const Span q = {shard.heads().begin * depth_, shard.heads().end * depth_};
  const Span k = {keys + shard.kv_heads().begin * depth_, keys + shard.kv_heads().end * depth_};
  const Span v = {values + shard.kv_heads().begin * depth_, values + shard.kv_heads().end * depth_};
  if (shares_) {
    packed_ = AddColumnParallel(registry, whole, {q}, shard, TensorSharing::kSharded,
                                /*in_two=*/true);
    pairs_ = AddColumnParallel(registry, whole, {k, v}, shard, TensorSharing::kShared,
                               /*in_two=*/true);
  } else {
    packed_ = AddColumnParallel(registry, whole, {q, k, v}, shard);
  }
}

QkvProjection::Output QkvProjection::Output::Rows(int64_t first, int64_t count) const {
  return {packed.Rows(first, count), pairs.empty() ? pairs : pairs.Rows(first, count)};
}

QkvProjection::Output QkvProjection::Take(kernels::Arena& arena, const std::string& category,
                                          kernels::DType dtype, int64_t tokens) const {
  Output output;
  output.packed =
      arena.Take(category, dtype, {tokens, (heads_ + (shares_ ? 0 : 2 * kv_heads_)) * depth_});
  if (shares_) output.pairs = arena.Take(category, dtype, {tokens, 2 * kv_heads_ * depth_});
  return output;
}

Tensor QkvProjection::TakeScratch(kernels::Arena& arena, kernels::DType dtype,
                                  int64_t tokens) const {
  return shares_ ? arena.Take("scratch", dtype, {tokens, hidden_}) : Tensor();
}

Tensor QkvProjection::Heads(Tensor rows, const BatchShape& shape, int64_t first,
                            int64_t count) const {
  const int64_t width = rows.dim(1);
  auto* data = static_cast<char*>(rows.data()) + first * depth_ * SizeOf(rows.dtype());
  return Tensor(data, rows.dtype(), {shape.batch, shape.sequence, count, depth_},
                {shape.sequence * width, width, depth_, 1});
}
Tensor QkvProjection::Queries(const Output& output, const BatchShape& shape) const {
  return Heads(output.packed, shape, 0, heads_);
}
Tensor QkvProjection::Keys(const Output& output, const BatchShape& shape) const {
  return shares_ ? Heads(output.pairs, shape, 0, kv_heads_)
                 : Heads(output.packed, shape, heads_, kv_heads_);
}
Tensor QkvProjection::Values(const Output& output, const BatchShape& shape) const {
  return shares_ ? Heads(output.pairs, shape, kv_heads_, kv_heads_)
                 : Heads(output.packed, shape, heads_ + kv_heads_, kv_heads_);
}

void QkvProjection::Rotate(const Pass& pass, const ModelBatch& batch, const Output& output,
                           bool inverse) const {
  if (shares_) {
    kernels::Rotary(pass.stream, Queries(output, batch.shape), batch.rotary, inverse);
    kernels::Rotary(pass.stream, Keys(output, batch.shape), batch.rotary, inverse);
    return;
  }
  // Queries and keys are adjacent, so one call handles both.
  kernels::Rotary(pass.stream, Heads(output.packed, batch.shape, 0, heads_ + kv_heads_),
                  batch.rotary, inverse);
}

void QkvProjection::Forward(const Pass& pass, Tensor x, const Output& output, Tensor rotary) const {
  const auto forward = [&](const Linear& linear, Tensor y, int64_t turned) {
    if (rotary.empty()) {
      LinearForward(pass, linear, x, y);
    } else {
      LinearForwardThroughRotary(pass, linear, x, y, rotary, turned);
    }
  };
  // Queries and keys come before the values.
  forward(packed_, output.packed, shares_ ? heads_ : heads_ + kv_heads_);
  if (shares_) forward(pairs_, output.pairs, kv_heads_);
}

void QkvProjection::BackwardInput(const Pass& pass, const Output& d_output, Tensor dx,
                                  Tensor scratch) const {
  LinearBackwardInput(pass, packed_, d_output.packed, dx);
  if (!shares_) return;
  LinearBackwardInput(pass, pairs_, d_output.pairs, scratch);
  kernels::Add(pass.stream, dx, scratch, dx);
}

void QkvProjection::BackwardWeights(const Pass& pass, const Output& d_output, Tensor x) const {
  if (shares_) LinearBackwardWeights(pass, pairs_, d_output.pairs, x);
  LinearBackwardWeights(pass, packed_, d_output.packed, x);
}

void Copy(kernels::Stream& stream, const QkvProjection::Output& from,
          const QkvProjection::Output& to) {
  kernels::Copy(stream, from.packed, to.packed);
  if (!from.pairs.empty()) kernels::Copy(stream, from.pairs, to.pairs);
}

}  // namespace muster::parallel
