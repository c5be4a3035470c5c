// Tensor parallelism (Megatron-LM, arXiv 1909.08053; with sequence parallelism, arXiv 2205.05198):
// the shard of every matrix that a rank of the tensor group holds, and the collectives in front of
// column-parallel and behind row-parallel GEMMs.
//
// Matrices come in pairs. The first is column-parallel (a rank has some of its outputs), the second
// row-parallel (a rank has some of its inputs), so what lies between them stays on the rank:
// attention's heads, the MLP's inner columns. Shards are whole units: a key/value head with its
// query heads, a block of the MLP's columns, a block of the vocabulary. They need not be equal:
// ranks get units in proportion to their weights.
//
// With fewer key/value heads than ranks, neighbouring ranks share one: each holds some of its query
// heads, and all of them the rows of its keys and values, whose gradients are summed over these
// ranks once a step.
//
// State-space heads are shared out like query heads, by the groups that share B and C, where that
// is nearly as fast as by single heads. Elsewhere, and always with fewer groups than ranks, all
// ranks hold the rows of all groups' B and C (TensorSharing::kPartial), and a rank's heads are of
// one group or of several, of which it has the first and the last in part.
//
// Outside of the pairs, hidden states [T,C] are the same on all ranks. With sequence parallelism
// each rank has T/ranks rows of them: the norms, the residual stream and their activations shrink,
// for the same bytes on the wire and one more all-gather per pair in backward.
//
// With TensorOverlap::kHalves the tokens are two half-batches, and a rank's rows are its rows of
// the first, then its rows of the second.
#ifndef MUSTER_PARALLEL_MODEL_TENSOR_PARALLEL_H_
#define MUSTER_PARALLEL_MODEL_TENSOR_PARALLEL_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/tensor.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

// What the ranks of a tensor group share out.
enum class SplitKind : uint8_t {
  kHeads,       // query heads of attention, in groups of a key/value head each
  kScanHeads,   // state-space heads, in groups that share B and C
  kMlpColumns,  // of the MLP's inner width
  kVocabulary,  // rows of the token table and of the head
};
const char* Name(SplitKind kind);  // "attention heads"

// One of them, of the whole model.
struct SplitUnit {
  SplitKind kind;
  int64_t size = 0;  // > 0
  // How many groups of equal size it is made of, which stay whole where each rank can have one; 0:
  // none, it is cut into blocks of UnitSize.
  int64_t groups = 0;
  // What a group costs every rank that has a part of it, beside the work of its units, of which
  // each counts 1. Positive: a rank may have parts of several groups (SplitShare::shares), and has
  // where that makes the slowest rank faster by a twentieth. kScanHeads.
  double group_work = 0;
};
// A model has each kind at most once, and always a vocabulary.
using SplitList = std::vector<SplitUnit>;

// [begin, end) of some dimension.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Span&, const Span&) = default;
};

// Distributes `units` in order over `ranks`, in proportion to `weights` (empty: equally) by largest
// remainder, at least one each; the lower rank wins ties. Requires: units >= ranks, one positive
// weight per rank or none.
std::vector<Span> SplitUnits(int64_t units, int ranks, const std::vector<double>& weights);

// The ranks that share each key/value head, in order, where there are fewer heads than ranks. Ranks
// are cut into runs of at most `group` (the query heads of one key/value head) such that the
// longest time of any rank, work over weight, is as short as possible; of equal cuts, the one with
// more ranks for the lower head is taken. Requires: kv_heads <= ranks <= kv_heads x group, weights
// as in SplitUnits.
std::vector<Span> SplitRanks(int64_t kv_heads, int64_t group, int ranks,
                             const std::vector<double>& weights);

// Elements per unit of a dimension of `size`: the largest power of two up to 128 that leaves every
// rank eight units, else 1. A smaller one, of at least 16, is taken if it divides the units evenly
// among the ranks and the largest does not.
int64_t UnitSize(int64_t size, int ranks);

// Rows of the token table as stored: a multiple of 128 for large vocabularies (whole GEMM tiles),
// of 16 for small ones. The padding rows are zero.
int64_t VocabStorage(int64_t vocab);

// Units that follow each other: all of some groups, or a part of one.
struct GroupPart {
  Span units;
  Span groups;
  friend bool operator==(const GroupPart&, const GroupPart&) = default;
};
// `units` of groups of `each`, in as few parts as can be: at most three.
std::vector<GroupPart> PartsByGroup(Span units, int64_t each);

// What one rank of the tensor group holds of a SplitUnit.
struct SplitShare {
  SplitKind kind;
  Span span;                          // of its size
  Span groups = {};                   // that the span lies in; empty without groups
  std::vector<GroupPart> parts = {};  // PartsByGroup of the span; empty without groups
  bool shares = false;                // whether ranks have parts of groups, so that some share one
  Span sharers = {};  // of kHeads, the ranks with parts of the same group, including itself
};

// What one rank of the tensor group holds, and its collectives.
struct TensorShard {
  int rank = 0;
  int size = 1;
  bool sequence = false;                         // false when size is 1
  TensorOverlap overlap = TensorOverlap::kNone;  // kNone when size is 1
  std::vector<SplitShare> shares;                // of every kind that the model has
  // VocabStorage of the rank's shard of the vocabulary; with equal weights, of the largest shard,
  // so that memory is laid out alike on all ranks of the group.
  int64_t vocab_storage = 0;

  // Of a kind that the model lacks, an empty one.
  const SplitShare& share(SplitKind kind) const;
  Span heads() const { return share(SplitKind::kHeads).span; }
  Span kv_heads() const { return share(SplitKind::kHeads).groups; }
  Span ssm_heads() const { return share(SplitKind::kScanHeads).span; }
  Span ssm_groups() const { return share(SplitKind::kScanHeads).groups; }
  Span ffn() const { return share(SplitKind::kMlpColumns).span; }
  Span vocab() const { return share(SplitKind::kVocabulary).span; }

  // Requires: CheckTensorParallel.
  static TensorShard Make(const ModelParallel& parallel, const SplitList& units);
  // The same by the sizes of the model. Requires: a description that MakeModel takes.
  static TensorShard Of(const ModelDescription& model, const ModelParallel& parallel);

  TensorSharing sharded() const {
    return size > 1 ? TensorSharing::kSharded : TensorSharing::kReplicated;
  }
  // How parameters are held that are applied to this rank's rows of the hidden states only.
  TensorSharing by_rows() const {
    return sequence ? TensorSharing::kPartial : TensorSharing::kReplicated;
  }
  int64_t rows(const BatchShape& shape) const { return shape.tokens() / (sequence ? size : 1); }
  // Slices of the tokens in all passes of a workspace: 2 half-batches where kHalves takes effect,
  // else 1.
  int slices(const BatchShape& shape) const;
  // The first token of this rank's rows of a slice.
  int64_t FirstToken(const BatchShape& shape, int slice) const;

  // In front of a column-parallel GEMM (in backward: behind a row-parallel one): all-gathers this
  // rank's rows to all rows in `storage` [T,C]. Without sequence parallelism it returns `rows`,
  // which are all rows already.
  kernels::Tensor GatherRows(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage) const;
  // The same for each of `slices` of the tokens.
  kernels::Tensor GatherRows(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage,
                             int slices) const;
  // Behind a row-parallel GEMM (in backward: in front of a column-parallel one): sums `partial`
  // [T,C] over the ranks in place, by a reduce-scatter with sequence parallelism and an all-reduce
  // without. Returns this rank's rows of the sum. `gather_follows`: the group's next collective is
  // an all-gather, and nobody writes to `partial` before that has been enqueued
  // (Communicator::ReduceScatterBeforeGather).
  kernels::Tensor ReduceRows(const Pass& pass, kernels::Tensor partial,
                             bool gather_follows = false) const;

  // Sums fp32 numbers over the ranks in place, before the compute stream goes on. It runs on
  // pass.tensor_stream if the group's other collectives do, because the ranks of a group have one
  // order of collectives.
  void SumInPlace(const Pass& pass, kernels::Tensor numbers) const;

  // The same on pass.tensor_stream, where the model overlaps and the pass has one. Work that is
  // enqueued on the compute stream before Await() overlaps with it, and must not touch its tensors.
  Started StartGatherRows(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage) const;
  InSlices StartGatherRows(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage,
                           int slices) const;
  Started StartReduceRows(const Pass& pass, kernels::Tensor partial,
                          bool gather_follows = false) const;
  static kernels::Tensor Await(const Pass& pass, const Started& started);
  static kernels::Tensor Await(const Pass& pass, const InSlices& started);  // of all slices
  // Waits until what the collective sends is complete, so that the collective overlaps with the
  // next GEMM of the compute stream rather than following it.
  static void AwaitInput(const Pass& pass, const Started& started);
  // Marks the current end of the tensor stream in work that Start() runs, `on` being the pass that
  // the work got; null in a pass without a tensor stream.
  static kernels::Event* InputReady(const Pass& on);
  // Runs `work` on the tensor stream: it gets a pass with that stream. Time spent in awaiting it is
  // attributed to `collective`.
  kernels::Event* Start(const Pass& pass, Collective collective,
                        absl::FunctionRef<void(const Pass& on)> work) const;

  // GatherRows together with the GEMM behind it. `gemm` is called with rows [first, first +
  // x.dim(0)): once with all, or, with TensorOverlap::kChunked, once with the rows of each rank.
  // All rows are in `storage` afterwards, except that with kChunked this rank's own are only there
  // if `keeps_all`.
  using WithRows = absl::FunctionRef<void(kernels::Tensor x, int64_t first)>;
  void GatherRowsThrough(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage,
                         WithRows gemm, bool keeps_all = true) const;
  // The GEMM that computes partial sums together with ReduceRows. `gemm` is called to write y, rows
  // [first, first + y.dim(0)) of the partial sum. `storage` and `received` are [T,C]; `received` is
  // used with kChunked only.
  using FillRows = absl::FunctionRef<void(int64_t first, kernels::Tensor y)>;
  kernels::Tensor ReduceRowsThrough(const Pass& pass, kernels::Tensor storage,
                                    kernels::Tensor received, FillRows gemm) const;

 private:
  bool Overlaps(const Pass& pass) const;
  void Sum(Communicator& group, kernels::Stream& stream, const kernels::Tensor& partial,
           bool gather_follows = false) const;
  kernels::Tensor OwnRows(const kernels::Tensor& all) const;
};

// Slice `slice` of `slices` equal ones of the rows of x.
kernels::Tensor SliceOf(const kernels::Tensor& x, int slices, int slice);

// kInvalidArgument, with all numbers, when a rank would have no unit or `parallel` contradicts
// itself.
absl::Status CheckTensorParallel(const ModelParallel& parallel, const SplitList& units);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_TENSOR_PARALLEL_H_
