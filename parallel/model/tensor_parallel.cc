#include "parallel/model/tensor_parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::Tensor;

const char* Name(TensorOverlap overlap) {
  switch (overlap) {
    case TensorOverlap::kNone:
      return "none";
    case TensorOverlap::kBackward:
      return "backward";
    case TensorOverlap::kChunked:
      return "chunked";
    case TensorOverlap::kHalves:
      return "halves";
  }
  return "unknown";
}

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

std::vector<Span> SplitRanks(int64_t kv_heads, int64_t group, int ranks,
                             const std::vector<double>& weights) {
  CHECK(kv_heads > 0 && kv_heads <= ranks && ranks <= kv_heads * group)
      << kv_heads << " key/value heads of " << group << " query heads for " << ranks << " ranks";
  // How long the slowest of ranks [begin, end) takes for one head's query heads.
  const auto time = [&](int begin, int end) {
    std::vector<double> own;
    if (!weights.empty()) own.assign(weights.begin() + begin, weights.begin() + end);
    const std::vector<Span> spans = SplitUnits(group, end - begin, own);
    double longest = 0;
    for (int i = 0; i < end - begin; ++i) {
      longest =
          std::max(longest, static_cast<double>(spans[i].size()) / (own.empty() ? 1 : own[i]));
    }
    return longest;
  };
  // best[begin]: over the heads not yet given ranks, from the last one backwards.
  std::vector<double> best(ranks + 1, std::numeric_limits<double>::infinity());
  best[ranks] = 0;
  std::vector<std::vector<int>> ends(kv_heads, std::vector<int>(ranks + 1, 0));
  for (int64_t head = kv_heads - 1; head >= 0; --head) {
    std::vector<double> longer(ranks + 1, std::numeric_limits<double>::infinity());
    for (int begin = 0; begin < ranks; ++begin) {
      for (int end = static_cast<int>(std::min<int64_t>(ranks, begin + group)); end > begin;
           --end) {
        if (std::isinf(best[end])) continue;
        const double longest = std::max(time(begin, end), best[end]);
        if (longest >= longer[begin]) continue;
        longer[begin] = longest;
        ends[head][begin] = end;
      }
    }
    best = std::move(longer);
  }
  std::vector<Span> runs(kv_heads);
  int64_t begin = 0;
  for (int64_t head = 0; head < kv_heads; ++head) {
    runs[head] = {begin, ends[head][begin]};
    begin = runs[head].end;
  }
  CHECK_EQ(begin, ranks);
  return runs;
}

int64_t UnitSize(int64_t size, int ranks) {
  int64_t unit = 128;
  while (unit > 1 && size / unit < 8 * ranks) unit /= 2;
  for (int64_t even = unit; even >= 16; even /= 2) {
    if ((size + even - 1) / even % ranks == 0) return even;
  }
  return unit;
}

int64_t VocabStorage(int64_t vocab) {
  const int64_t multiple = vocab >= 4096 ? 128 : 16;
  return (vocab + multiple - 1) / multiple * multiple;
}

namespace {

Span PartOf(int64_t size, int64_t unit, const ModelParallel& parallel) {
  const int64_t units = (size + unit - 1) / unit;
  const Span span =
      SplitUnits(units, parallel.tensor_size, parallel.tensor_weights)[parallel.tensor_rank];
  return {span.begin * unit, std::min(size, span.end * unit)};
}

// More ranks than key/value heads: one of them, and some of its query heads.
void ShareHeads(const ModelParallel& parallel, int64_t kv_heads, int64_t group, TensorPart& part) {
  part.shares_kv = true;
  const std::vector<Span> runs =
      SplitRanks(kv_heads, group, parallel.tensor_size, parallel.tensor_weights);
  int64_t head = 0;
  while (runs[head].end <= part.rank) ++head;
  part.kv_heads = {head, head + 1};
  part.kv_sharers = runs[head];
  std::vector<double> weights;
  for (int64_t i = runs[head].begin; i < runs[head].end && !parallel.tensor_weights.empty(); ++i) {
    weights.push_back(parallel.tensor_weights[i]);
  }
  const Span own =
      SplitUnits(group, static_cast<int>(runs[head].size()), weights)[part.rank - runs[head].begin];
  part.heads = {head * group + own.begin, head * group + own.end};
}

}  // namespace

TensorPart TensorPart::Make(const ModelParallel& parallel, int64_t heads, int64_t kv_heads,
                            int64_t ffn, int64_t vocab) {
  TensorPart part;
  part.rank = parallel.tensor_rank;
  part.size = parallel.tensor_size;
  part.sequence = parallel.sequence_parallel && part.size > 1;
  if (part.size > 1) part.overlap = parallel.tensor_overlap;
  // Two calls of backward work on all rows.
  if (part.overlap == TensorOverlap::kHalves && parallel.split_backward) {
    part.overlap = TensorOverlap::kBackward;
  }
  const int64_t group = heads / kv_heads;
  if (kv_heads < part.size) {
    ShareHeads(parallel, kv_heads, group, part);
  } else {
    part.kv_heads = PartOf(kv_heads, 1, parallel);
    part.kv_sharers = {part.rank, part.rank + 1};
    part.heads = {group * part.kv_heads.begin, group * part.kv_heads.end};
  }
  part.ffn = PartOf(ffn, UnitSize(ffn, part.size), parallel);
  const int64_t unit = UnitSize(vocab, part.size);
  part.vocab = PartOf(vocab, unit, parallel);
  ModelParallel first = parallel;
  first.tensor_rank = 0;
  const Span most = parallel.tensor_weights.empty() ? PartOf(vocab, unit, first) : part.vocab;
  part.vocab_storage = VocabStorage(most.size());
  return part;
}

Tensor TensorPart::Enter(const Pass& pass, Tensor rows, Tensor storage) const {
  if (!sequence) return rows;
  pass.tensor->AllGatherFrom(pass.stream, rows, storage);
  return storage;
}

int TensorPart::pieces(const BatchShape& shape) const {
  const bool halves = overlap == TensorOverlap::kHalves && shape.batch % 2 == 0 &&
                      (!sequence || shape.tokens() % (2 * size) == 0);
  return halves ? 2 : 1;
}

int64_t TensorPart::FirstToken(const BatchShape& shape, int piece) const {
  const int64_t tokens = shape.tokens() / pieces(shape);
  return piece * tokens + (sequence ? rank * (tokens / size) : 0);
}

Tensor PieceOf(const Tensor& x, int pieces, int piece) {
  const int64_t rows = x.dim(0) / pieces;
  return x.Rows(piece * rows, rows);
}

Tensor TensorPart::Enter(const Pass& pass, Tensor rows, Tensor storage, int pieces) const {
  if (!sequence) return rows;
  for (int piece = 0; piece < pieces; ++piece) {
    Enter(pass, PieceOf(rows, pieces, piece), PieceOf(storage, pieces, piece));
  }
  return storage;
}

Tensor TensorPart::Leave(const Pass& pass, Tensor partial, bool gather_follows) const {
  if (size == 1) return partial;
  Sum(*pass.tensor, pass.stream, partial, gather_follows);
  return OwnRows(partial);
}

Started TensorPart::StartEnter(const Pass& pass, Tensor rows, Tensor storage) const {
  if (!sequence || !Overlaps(pass)) return {Enter(pass, rows, storage)};
  kernels::Event* const done = pass.tensor_stream->Start(
      pass.stream, Collective::kAllGather,
      [&](kernels::Stream& stream) { pass.tensor->AllGatherFrom(stream, rows, storage); });
  return {storage, done};
}

InPieces TensorPart::StartEnter(const Pass& pass, Tensor rows, Tensor storage, int pieces) const {
  InPieces started = {.all = sequence ? storage : rows, .count = pieces};
  for (int piece = 0; piece < pieces; ++piece) {
    started.pieces[piece] =
        StartEnter(pass, PieceOf(rows, pieces, piece), PieceOf(storage, pieces, piece));
  }
  return started;
}

Started TensorPart::StartLeave(const Pass& pass, Tensor partial, bool gather_follows) const {
  if (!Overlaps(pass)) return {Leave(pass, partial, gather_follows)};
  kernels::Event* const done = pass.tensor_stream->Start(
      pass.stream, sequence ? Collective::kReduceScatter : Collective::kAllReduce,
      [&](kernels::Stream& stream) { Sum(*pass.tensor, stream, partial, gather_follows); });
  return {OwnRows(partial), done};
}

Tensor TensorPart::Await(const Pass& pass, const Started& started) {
  if (started.done != nullptr) pass.tensor_stream->Await(pass.stream, *started.done);
  return started.tensor;
}

Tensor TensorPart::Await(const Pass& pass, const InPieces& started) {
  for (int piece = 0; piece < started.count; ++piece) Await(pass, started.pieces[piece]);
  return started.all;
}

void TensorPart::AwaitSent(const Pass& pass, const Started& started) {
  if (started.sent != nullptr) pass.tensor_stream->Await(pass.stream, *started.sent);
}

kernels::Event* TensorPart::Sends(const Pass& on) {
  return on.tensor_stream == nullptr ? nullptr : on.tensor_stream->Mark(Collective::kReduceScatter);
}

kernels::Event* TensorPart::Start(const Pass& pass, Collective collective,
                                  absl::FunctionRef<void(const Pass& on)> work) const {
  if (!Overlaps(pass)) {
    work(pass);
    return nullptr;
  }
  return pass.tensor_stream->Start(pass.stream, collective,
                                   [&](kernels::Stream& stream) { work(pass.On(stream)); });
}

void TensorPart::EnterThrough(const Pass& pass, Tensor rows, Tensor storage, RowsIn product,
                              bool keeps_all) const {
  if (!sequence || overlap != TensorOverlap::kChunked) {
    product(Enter(pass, rows, storage), 0);
    return;
  }
  const int64_t count = rows.dim(0);
  TensorStream* const beside = pass.tensor_stream;
  std::vector<kernels::Event*> arrived(size);
  const auto gather = [&](kernels::Stream& stream) {
    pass.tensor->AllGatherInSteps(stream, rows, storage, [&](int from) {
      if (beside != nullptr) arrived[from] = beside->Mark(Collective::kAllGather);
    });
  };
  kernels::Event* end = nullptr;
  if (beside != nullptr) {
    end = beside->Start(pass.stream, Collective::kAllGather, gather);
  } else {
    gather(pass.stream);
  }
  // Behind the exchanges on the host, so that they are not behind it on the device.
  if (keeps_all) kernels::Copy(pass.stream, rows, storage.Rows(rank * count, count));
  product(rows, rank * count);
  for (int step = 1; step < size; ++step) {
    const int from = (rank + size - step) % size;
    const Tensor x = storage.Rows(from * count, count);
    product(Await(pass, {x, arrived[from]}), from * count);
  }
  // The other ranks have read `rows`.
  Await(pass, {storage, end});
}

// Part p of `received` is what rank p has found of this rank's rows.
Tensor TensorPart::LeaveThrough(const Pass& pass, Tensor storage, Tensor received,
                                RowsOut product) const {
  if (!sequence || overlap != TensorOverlap::kChunked) {
    product(0, storage);
    return Leave(pass, storage);
  }
  const int64_t count = storage.dim(0) / size;
  TensorStream* const beside = pass.tensor_stream;
  const auto exchange = [&](kernels::Stream& stream) {
    pass.tensor->AllToAllInSteps(stream, storage, received, [&](int to) {
      product(to * count, storage.Rows(to * count, count));
      if (beside != nullptr) beside->Follow(pass.stream);
    });
  };
  kernels::Event* arrived = nullptr;
  if (beside != nullptr) {
    arrived = beside->Start(pass.stream, Collective::kReduceScatter, exchange);
  } else {
    exchange(pass.stream);
  }
  product(rank * count, received.Rows(rank * count, count));
  kernels::SumParts(pass.stream, Await(pass, {received, arrived}), OwnRows(storage));
  return OwnRows(storage);
}

bool TensorPart::Overlaps(const Pass& pass) const {
  return overlap != TensorOverlap::kNone && pass.tensor_stream != nullptr;
}

void TensorPart::Sum(Communicator& group, kernels::Stream& stream, const Tensor& partial,
                     bool gather_follows) const {
  if (sequence && gather_follows) {
    group.ReduceScatterBeforeGather(stream, partial, ReduceOp::kSum);
  } else if (sequence) {
    group.ReduceScatter(stream, partial, ReduceOp::kSum);
  } else {
    group.AllReduce(stream, partial, ReduceOp::kSum);
  }
}

Tensor TensorPart::OwnRows(const Tensor& all) const {
  if (!sequence) return all;
  const int64_t count = all.dim(0) / size;
  return all.Rows(rank * count, count);
}

absl::Status CheckTensorParallel(const ModelParallel& parallel, int64_t heads, int64_t ffn,
                                 int64_t vocab) {
  const int size = parallel.tensor_size;
  if (size < 1 || parallel.tensor_rank < 0 || parallel.tensor_rank >= size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor rank %d of a tensor-parallel group of %d", parallel.tensor_rank, size));
  }
  if (heads < size || ffn < size || vocab < size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor parallelism over %d ranks leaves some of them without work: the model has %d "
        "attention heads, an MLP of %d columns and a vocabulary of %d; the tensor degree can be at "
        "most %d",
        size, heads, ffn, vocab, std::min({heads, ffn, vocab})));
  }
  if (parallel.tensor_overlap == TensorOverlap::kChunked && !parallel.sequence_parallel) {
    return absl::InvalidArgumentError(
        "tensor_overlap chunked cuts products by the rows that ranks have with sequence "
        "parallelism, which is off; use backward");
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
