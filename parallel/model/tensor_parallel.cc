#include "parallel/model/tensor_parallel.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
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
  // Every rank gets one unit, the others are distributed by weight.
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
      // Shares that differ by rounding only count as equal.
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
  // The time that the slowest of ranks [begin, end) takes for one head's query heads.
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
  // best[begin]: the shortest possible time of ranks [begin, ranks) for the heads behind `head`.
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

std::vector<GroupPart> PartsByGroup(Span units, int64_t each) {
  std::vector<GroupPart> parts;
  for (int64_t begin = units.begin; begin < units.end;) {
    const int64_t group = begin / each, behind = units.end / each;
    const bool whole = begin % each == 0 && behind > group;
    const GroupPart part =
        whole ? GroupPart{{begin, behind * each}, {group, behind}}
              : GroupPart{{begin, std::min(units.end, (group + 1) * each)}, {group, group + 1}};
    parts.push_back(part);
    begin = part.units.end;
  }
  return parts;
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

Span ShardOf(int64_t size, int64_t unit, const ModelParallel& parallel) {
  const int64_t units = (size + unit - 1) / unit;
  const Span span =
      SplitUnits(units, parallel.tensor_size, parallel.tensor_weights)[parallel.tensor_rank];
  return {span.begin * unit, std::min(size, span.end * unit)};
}

// How all ranks share out a unit that is made of groups.
struct GroupSplit {
  std::vector<Span> spans;    // of each rank
  std::vector<Span> sharers;  // of each rank
  bool shares = false;
};

// Whole groups, or, where there are fewer than ranks, a part of one.
GroupSplit ByGroups(const SplitUnit& unit, int ranks, const std::vector<double>& weights) {
  const int64_t each = unit.size / unit.groups;
  GroupSplit split;
  if (unit.groups >= ranks) {
    for (const Span& groups : SplitUnits(unit.groups, ranks, weights)) {
      const int rank = static_cast<int>(split.spans.size());
      split.spans.push_back({each * groups.begin, each * groups.end});
      split.sharers.push_back({rank, rank + 1});
    }
    return split;
  }
  split.shares = true;
  for (const Span& run : SplitRanks(unit.groups, each, ranks, weights)) {
    std::vector<double> own;
    if (!weights.empty()) own.assign(weights.begin() + run.begin, weights.begin() + run.end);
    const int64_t first = split.spans.empty() ? 0 : split.spans.back().end;
    for (const Span& units : SplitUnits(each, static_cast<int>(run.size()), own)) {
      split.spans.push_back({first + units.begin, first + units.end});
      split.sharers.push_back(run);
    }
  }
  return split;
}

GroupSplit ByUnits(const SplitUnit& unit, int ranks, const std::vector<double>& weights) {
  return {.spans = SplitUnits(unit.size, ranks, weights),
          .sharers = std::vector<Span>(ranks, {0, ranks}),
          .shares = true};
}

// Of the slowest rank. Where ranks share groups, each has the work of all groups.
double Time(const SplitUnit& unit, const GroupSplit& split, const std::vector<double>& weights) {
  const int64_t each = unit.size / unit.groups;
  double longest = 0;
  for (size_t rank = 0; rank < split.spans.size(); ++rank) {
    const int64_t units = split.spans[rank].size();
    const int64_t groups = split.shares ? unit.groups : units / each;
    const double work = static_cast<double>(units) + unit.group_work * static_cast<double>(groups);
    longest = std::max(longest, work / (weights.empty() ? 1 : weights[rank]));
  }
  return longest;
}

GroupSplit SplitGroups(const SplitUnit& unit, const ModelParallel& parallel) {
  const int ranks = parallel.tensor_size;
  const std::vector<double>& weights = parallel.tensor_weights;
  const GroupSplit by_groups = ByGroups(unit, ranks, weights);
  // An all-to-all of a scan's heads takes them by groups of equal size.
  const bool by_heads = parallel.context_size > 1 && parallel.scan_method == ScanMethod::kAllToAll;
  if (unit.group_work == 0 || by_heads) return by_groups;
  GroupSplit by_units = ByUnits(unit, ranks, weights);
  constexpr double kWorthwhile = 0.95;
  const bool faster = Time(unit, by_units, weights) < kWorthwhile * Time(unit, by_groups, weights);
  return faster ? by_units : by_groups;
}

SplitShare ShareOf(const SplitUnit& unit, const ModelParallel& parallel) {
  const int rank = parallel.tensor_rank;
  SplitShare share = {.kind = unit.kind, .span = {}, .sharers = {rank, rank + 1}};
  if (unit.groups == 0) {
    share.span = ShardOf(unit.size, UnitSize(unit.size, parallel.tensor_size), parallel);
    return share;
  }
  const GroupSplit split = SplitGroups(unit, parallel);
  share.span = split.spans[rank];
  share.shares = split.shares;
  share.sharers = split.sharers[rank];
  share.parts = PartsByGroup(share.span, unit.size / unit.groups);
  share.groups = {share.parts.front().groups.begin, share.parts.back().groups.end};
  return share;
}

}  // namespace

TensorShard TensorShard::Of(const ModelDescription& model, const ModelParallel& parallel) {
  return Make(parallel, SplitOf(ConfigOf(model)));
}

const char* Name(SplitKind kind) {
  switch (kind) {
    case SplitKind::kHeads:
      return "attention heads";
    case SplitKind::kScanHeads:
      return "state-space heads";
    case SplitKind::kMlpColumns:
      return "MLP columns";
    case SplitKind::kVocabulary:
      return "rows of the vocabulary";
  }
  return "unknown";
}

const SplitShare& TensorShard::share(SplitKind kind) const {
  static const SplitShare kNone = {.kind = SplitKind::kHeads, .span = {}};
  const auto found = std::find_if(shares.begin(), shares.end(),
                                  [kind](const SplitShare& share) { return share.kind == kind; });
  return found == shares.end() ? kNone : *found;
}

TensorShard TensorShard::Make(const ModelParallel& parallel, const SplitList& units) {
  TensorShard shard;
  shard.rank = parallel.tensor_rank;
  shard.size = parallel.tensor_size;
  shard.sequence = parallel.sequence_parallel && shard.size > 1;
  if (shard.size > 1) shard.overlap = parallel.tensor_overlap;
  // BackwardInput and BackwardWeights work on all rows at once.
  if (shard.overlap == TensorOverlap::kHalves && parallel.split_backward) {
    shard.overlap = TensorOverlap::kBackward;
  }
  ModelParallel first = parallel;
  first.tensor_rank = 0;
  Span most;
  for (const SplitUnit& unit : units) {
    shard.shares.push_back(ShareOf(unit, parallel));
    if (unit.kind != SplitKind::kVocabulary) continue;
    most = parallel.tensor_weights.empty() ? ShareOf(unit, first).span : shard.vocab();
  }
  shard.vocab_storage = VocabStorage(most.size());
  return shard;
}

Tensor TensorShard::GatherRows(const Pass& pass, Tensor rows, Tensor storage) const {
  if (!sequence) return rows;
  pass.tensor->AllGatherFrom(pass.stream, rows, storage);
  return storage;
}

int TensorShard::slices(const BatchShape& shape) const {
  const bool halves = overlap == TensorOverlap::kHalves && shape.batch % 2 == 0 &&
                      (!sequence || shape.tokens() % (2 * size) == 0);
  return halves ? 2 : 1;
}

int64_t TensorShard::FirstToken(const BatchShape& shape, int slice) const {
  const int64_t tokens = shape.tokens() / slices(shape);
  return slice * tokens + (sequence ? rank * (tokens / size) : 0);
}

Tensor SliceOf(const Tensor& x, int slices, int slice) {
  const int64_t rows = x.dim(0) / slices;
  return x.Rows(slice * rows, rows);
}

Tensor TensorShard::GatherRows(const Pass& pass, Tensor rows, Tensor storage, int slices) const {
  if (!sequence) return rows;
  for (int slice = 0; slice < slices; ++slice) {
    GatherRows(pass, SliceOf(rows, slices, slice), SliceOf(storage, slices, slice));
  }
  return storage;
}

Tensor TensorShard::ReduceRows(const Pass& pass, Tensor partial, bool gather_follows) const {
  if (size == 1) return partial;
  Sum(*pass.tensor, pass.stream, partial, gather_follows);
  return OwnRows(partial);
}

void TensorShard::SumInPlace(const Pass& pass, Tensor numbers) const {
  kernels::Event* const done = Start(pass, Collective::kAllReduce, [&](const Pass& on) {
    on.tensor->AllReduce(on.stream, numbers, ReduceOp::kSum);
  });
  Await(pass, {numbers, done});
}

Started TensorShard::StartGatherRows(const Pass& pass, Tensor rows, Tensor storage) const {
  if (!sequence || !Overlaps(pass)) return {GatherRows(pass, rows, storage)};
  kernels::Event* const done = pass.tensor_stream->Start(
      pass.stream, Collective::kAllGather,
      [&](kernels::Stream& stream) { pass.tensor->AllGatherFrom(stream, rows, storage); });
  return {storage, done};
}

InSlices TensorShard::StartGatherRows(const Pass& pass, Tensor rows, Tensor storage,
                                      int slices) const {
  InSlices started = {.all = sequence ? storage : rows, .count = slices};
  for (int slice = 0; slice < slices; ++slice) {
    started.slices[slice] =
        StartGatherRows(pass, SliceOf(rows, slices, slice), SliceOf(storage, slices, slice));
  }
  return started;
}

Started TensorShard::StartReduceRows(const Pass& pass, Tensor partial, bool gather_follows) const {
  if (!Overlaps(pass)) return {ReduceRows(pass, partial, gather_follows)};
  kernels::Event* const done = pass.tensor_stream->Start(
      pass.stream, sequence ? Collective::kReduceScatter : Collective::kAllReduce,
      [&](kernels::Stream& stream) { Sum(*pass.tensor, stream, partial, gather_follows); });
  return {OwnRows(partial), done};
}

Tensor TensorShard::Await(const Pass& pass, const Started& started) {
  if (started.done != nullptr) pass.tensor_stream->Await(pass.stream, *started.done);
  return started.tensor;
}

Tensor TensorShard::Await(const Pass& pass, const InSlices& started) {
  for (int slice = 0; slice < started.count; ++slice) Await(pass, started.slices[slice]);
  return started.all;
}

void TensorShard::AwaitInput(const Pass& pass, const Started& started) {
  if (started.input_ready != nullptr) pass.tensor_stream->Await(pass.stream, *started.input_ready);
}

kernels::Event* TensorShard::InputReady(const Pass& on) {
  return on.tensor_stream == nullptr ? nullptr : on.tensor_stream->Mark(Collective::kReduceScatter);
}

kernels::Event* TensorShard::Start(const Pass& pass, Collective collective,
                                   absl::FunctionRef<void(const Pass& on)> work) const {
  if (!Overlaps(pass)) {
    work(pass);
    return nullptr;
  }
  return pass.tensor_stream->Start(pass.stream, collective,
                                   [&](kernels::Stream& stream) { work(pass.On(stream)); });
}

void TensorShard::GatherRowsThrough(const Pass& pass, Tensor rows, Tensor storage, WithRows gemm,
                                    bool keeps_all) const {
  if (!sequence || overlap != TensorOverlap::kChunked) {
    gemm(GatherRows(pass, rows, storage), 0);
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
  // Enqueued after the exchanges, so that they do not wait for it on the device.
  if (keeps_all) kernels::Copy(pass.stream, rows, storage.Rows(rank * count, count));
  gemm(rows, rank * count);
  for (int step = 1; step < size; ++step) {
    const int from = (rank + size - step) % size;
    const Tensor x = storage.Rows(from * count, count);
    gemm(Await(pass, {x, arrived[from]}), from * count);
  }
  // Waits until the other ranks have read `rows`.
  Await(pass, {storage, end});
}

// Slice p of `received` is rank p's partial sum of this rank's rows.
Tensor TensorShard::ReduceRowsThrough(const Pass& pass, Tensor storage, Tensor received,
                                      FillRows gemm) const {
  if (!sequence || overlap != TensorOverlap::kChunked) {
    gemm(0, storage);
    return ReduceRows(pass, storage);
  }
  const int64_t count = storage.dim(0) / size;
  TensorStream* const beside = pass.tensor_stream;
  const auto exchange = [&](kernels::Stream& stream) {
    pass.tensor->AllToAllInSteps(stream, storage, received, [&](int to) {
      gemm(to * count, storage.Rows(to * count, count));
      if (beside != nullptr) beside->Follow(pass.stream);
    });
  };
  kernels::Event* arrived = nullptr;
  if (beside != nullptr) {
    arrived = beside->Start(pass.stream, Collective::kReduceScatter, exchange);
  } else {
    exchange(pass.stream);
  }
  gemm(rank * count, received.Rows(rank * count, count));
  kernels::SumParts(pass.stream, Await(pass, {received, arrived}), OwnRows(storage));
  return OwnRows(storage);
}

bool TensorShard::Overlaps(const Pass& pass) const {
  return overlap != TensorOverlap::kNone && pass.tensor_stream != nullptr;
}

void TensorShard::Sum(Communicator& group, kernels::Stream& stream, const Tensor& partial,
                      bool gather_follows) const {
  if (sequence && gather_follows) {
    group.ReduceScatterBeforeGather(stream, partial, ReduceOp::kSum);
  } else if (sequence) {
    group.ReduceScatter(stream, partial, ReduceOp::kSum);
  } else {
    group.AllReduce(stream, partial, ReduceOp::kSum);
  }
}

Tensor TensorShard::OwnRows(const Tensor& all) const {
  if (!sequence) return all;
  const int64_t count = all.dim(0) / size;
  return all.Rows(rank * count, count);
}

absl::Status CheckTensorParallel(const ModelParallel& parallel, const SplitList& units) {
  const int size = parallel.tensor_size;
  if (size < 1 || parallel.tensor_rank < 0 || parallel.tensor_rank >= size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor rank %d of a tensor-parallel group of %d", parallel.tensor_rank, size));
  }
  int64_t most = std::numeric_limits<int64_t>::max();
  std::vector<std::string> has;
  for (const SplitUnit& unit : units) {
    most = std::min(most, unit.size);
    has.push_back(absl::StrCat(unit.size, " ", Name(unit.kind)));
  }
  if (most < size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "tensor parallelism over %d ranks leaves some of them without work: the model has %s; the "
        "tensor degree can be at most %d",
        size, absl::StrJoin(has, ", "), most));
  }
  if (parallel.tensor_overlap == TensorOverlap::kChunked && !parallel.sequence_parallel) {
    return absl::InvalidArgumentError(
        "tensor_overlap chunked cuts GEMMs by the rows that ranks have with sequence "
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
