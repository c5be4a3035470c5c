#include "parallel/model/tensor_parallel.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "kernels/ops.h"

namespace muster::parallel {

using kernels::Tensor;

std::vector<Span> SplitUnits(int64_t units, int ranks, const std::vector<double>& weights) {
  CHECK(ranks > 0 && units >= ranks) << units << " units for " << ranks << " ranks";
  CHECK(weights.empty() || static_cast<int>(weights.size()) == ranks);
  // One each, the others by weight.
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> claim(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const double share = weights.empty() ? 1.0 / ranks : weights[rank] / total;
    claim[rank] = share * static_cast<double>(units);
  }
  std::vector<int64_t> count(ranks, 1);
  for (int64_t left = units - ranks; left > 0; --left) {
    int best = 0;
    for (int rank = 1; rank < ranks; ++rank) {
      const double need = claim[rank] - static_cast<double>(count[rank]);
      // Shares that differ by rounding only are equal.
      if (need > claim[best] - static_cast<double>(count[best]) + 1e-9) best = rank;
    }
    ++count[best];
  }
  std::vector<Span> spans(ranks);
  int64_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    spans[rank] = {begin, begin + count[rank]};
    begin = spans[rank].end;
  }
  return spans;
}

int64_t UnitSize(int64_t size, int ranks) {
  int64_t unit = 128;
  while (unit > 1 && size / unit < 8 * ranks) unit /= 2;
  return unit;
}

namespace {

Span PartOf(int64_t size, int64_t unit, const ModelParallel& parallel) {
  const int64_t units = (size + unit - 1) / unit;
  const Span span =
      SplitUnits(units, parallel.tensor_size, parallel.tensor_weights)[parallel.tensor_rank];
  return {span.begin * unit, std::min(size, span.end * unit)};
}

}  // namespace

TensorPart TensorPart::Make(const ModelParallel& parallel, int64_t kv_heads, int64_t ffn,
                            int64_t vocab) {
  TensorPart part;
  part.rank = parallel.tensor_rank;
  part.size = parallel.tensor_size;
  part.sequence = parallel.sequence_parallel && part.size > 1;
  part.kv_heads = PartOf(kv_heads, 1, parallel);
  part.ffn = PartOf(ffn, UnitSize(ffn, part.size), parallel);
  part.vocab = PartOf(vocab, UnitSize(vocab, part.size), parallel);
  return part;
}

Tensor TensorPart::Enter(const Pass& pass, Tensor rows, Tensor storage) const {
  if (!sequence) return rows;
  const int64_t count = rows.dim(0);
  kernels::Copy(pass.stream, rows, storage.Rows(rank * count, count));
  pass.tensor->AllGather(pass.stream, storage);
  return storage;
}

Tensor TensorPart::Leave(const Pass& pass, Tensor partial) const {
  if (size == 1) return partial;
  if (!sequence) {
    pass.tensor->AllReduce(pass.stream, partial, ReduceOp::kSum);
    return partial;
  }
  pass.tensor->ReduceScatter(pass.stream, partial, ReduceOp::kSum);
  const int64_t count = partial.dim(0) / size;
  return partial.Rows(rank * count, count);
}

absl::Status CheckTensorParallel(const ModelParallel& parallel, int64_t kv_heads, int64_t ffn,
                                 int64_t vocab) {
  const int size = parallel.tensor_size;
  if (size < 1 || parallel.tensor_rank < 0 || parallel.tensor_rank >= size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor rank %d of a tensor-parallel group of %d", parallel.tensor_rank, size));
  }
  if (kv_heads < size || ffn < size || vocab < size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor parallelism over %d ranks leaves some of them without work: the model has %d "
        "key/value heads, an MLP of %d columns and a vocabulary of %d; the tensor degree can be at "
        "most %d",
        size, kv_heads, ffn, vocab, std::min({kv_heads, ffn, vocab})));
  }
  const std::vector<double>& weights = parallel.tensor_weights;
  if (weights.empty()) return absl::OkStatus();
  if (static_cast<int>(weights.size()) != size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d weights for a tensor-parallel group of %d", weights.size(), size));
  }
  for (const double weight : weights) {
    if (!(weight > 0) || !std::isfinite(weight)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("weight %g of a tensor-parallel rank is not positive", weight));
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::parallel
