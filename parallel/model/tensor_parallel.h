// Tensor parallelism: which part of every matrix a rank of the tensor group holds, and the
// collectives where its part of the work begins and ends (Megatron-LM, arXiv 1909.08053; with
// sequence parallelism, arXiv 2205.05198).
//
// The first of two matrices is cut by rows (its outputs), the second by columns (its inputs), so
// what is between them stays on the rank: attention's heads, the MLP's inner columns. Parts are
// whole units: a key/value head with its query heads, a block of the MLP's columns, a block of the
// vocabulary. They need not be equal: ranks get units in proportion to their weights.
//
// With fewer key/value heads than ranks, neighbours share one: each holds some of its query heads,
// and all of them the rows of its keys and values, whose gradients are summed over them once a
// step.
//
// Hidden states [T,C] outside of these pairs are the same on all ranks, or, with sequence
// parallelism, each rank has T/ranks rows of them: the norms, the residual stream and what they
// keep shrink, for the same bytes on the wire, and one more gather per pair in backward.
//
// With TensorOverlap::kHalves the tokens come in two pieces, each of half the samples: a rank's
// rows are its rows of the first piece, then its rows of the second.
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

// [begin, end) of some dimension.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Span&, const Span&) = default;
};

// `units` in order among `ranks`, in proportion to `weights` (empty: equally) by largest remainder,
// but at least one each; of equal claims the lower rank's comes first. Requires: units >= ranks,
// one positive weight per rank or none.
std::vector<Span> SplitUnits(int64_t units, int ranks, const std::vector<double>& weights);

// The ranks that share each key/value head, in order, where there are fewer heads than ranks: the
// ranks cut into runs of at most `group` (a head's query heads), so that the rank that works
// longest for its weight does so least; of equal cuts, the one with more ranks for the lower head.
// Requires: kv_heads <= ranks <= kv_heads x group, weights as in SplitUnits.
std::vector<Span> SplitRanks(int64_t kv_heads, int64_t group, int ranks,
                             const std::vector<double>& weights);

// Elements per unit of a dimension of `size`: the largest power of two up to 128 that leaves every
// rank eight units, else 1; a smaller one, but at least 16, if that gives all ranks as many and the
// largest does not.
int64_t UnitSize(int64_t size, int ranks);

// Rows of the token table as stored: a multiple of 128 for large vocabularies (whole GEMM tiles),
// of 16 for small ones. The rows behind the vocabulary are zero.
int64_t VocabStorage(int64_t vocab);

// What one rank holds.
struct TensorPart {
  int rank = 0;
  int size = 1;
  bool sequence = false;                         // false when size is 1
  TensorOverlap overlap = TensorOverlap::kNone;  // kNone when size is 1
  Span heads, kv_heads, ffn, vocab;
  // VocabStorage of the rank's tokens, or, of ranks without weights, of those of the rank that has
  // most: what the ranks of a group have in memory is then in the same places on all of them.
  int64_t vocab_storage = 0;
  // Fewer key/value heads in the model than ranks: those that share this rank's, maybe it alone.
  bool shares_kv = false;
  Span kv_sharers;

  // Requires: CheckTensorParallel.
  static TensorPart Make(const ModelParallel& parallel, int64_t heads, int64_t kv_heads,
                         int64_t ffn, int64_t vocab);

  TensorSharing sharded() const {
    return size > 1 ? TensorSharing::kSharded : TensorSharing::kReplicated;
  }
  // Of parameters that are used on this rank's rows of the hidden states only.
  TensorSharing by_rows() const {
    return sequence ? TensorSharing::kPartial : TensorSharing::kReplicated;
  }
  int64_t rows(const BatchShape& shape) const { return shape.tokens() / (sequence ? size : 1); }
  // That the tokens come in, the same for all passes of a workspace: 2 where kHalves takes effect.
  int pieces(const BatchShape& shape) const;
  // The first token of this rank's rows of one.
  int64_t FirstToken(const BatchShape& shape, int piece) const;

  // Where a pair begins (backward: ends): this rank's rows become all rows, in `storage` [T,C].
  // Without sequence parallelism `rows` is what is returned, and nothing happens.
  kernels::Tensor Enter(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage) const;
  // The same of tokens that come in `pieces`.
  kernels::Tensor Enter(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage,
                        int pieces) const;
  // Where it ends (backward: begins): `partial` [T,C] is summed over the ranks in place. Returns
  // this rank's rows of it: all, without sequence parallelism.
  // `gather_follows`: the group's next collective is an all-gather, and nobody writes to `partial`
  // before that has been enqueued (Communicator::ReduceScatterBeforeGather).
  kernels::Tensor Leave(const Pass& pass, kernels::Tensor partial,
                        bool gather_follows = false) const;

  // The same beside the computing stream, if the pass has a stream for that, of a model that
  // overlaps: what is enqueued until Await() runs under it, and must leave its tensors alone.
  Started StartEnter(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage) const;
  InPieces StartEnter(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage,
                      int pieces) const;
  Started StartLeave(const Pass& pass, kernels::Tensor partial, bool gather_follows = false) const;
  static kernels::Tensor Await(const Pass& pass, const Started& started);
  static kernels::Tensor Await(const Pass& pass, const InPieces& started);  // all of it
  static void AwaitSent(const Pass& pass, const Started& started);
  // Of work on pass.tensor_stream, `on` the pass that it got: where it is now; null in a pass
  // without.
  static kernels::Event* Sends(const Pass& on);
  // And whatever goes with them: `work` gets a pass whose stream is that one. `collective` is what
  // whoever awaits it is said to wait for.
  kernels::Event* Start(const Pass& pass, Collective collective,
                        absl::FunctionRef<void(const Pass& on)> work) const;

  // Enter, with what is made of all rows: `product` is called for rows [first, first + x.dim(0)),
  // of which x is all there is, once, or, with TensorOverlap::kChunked, once for every rank's. All
  // rows stand in `storage` afterwards; in chunks, this rank's only if `keeps_all`.
  using RowsIn = absl::FunctionRef<void(kernels::Tensor x, int64_t first)>;
  void EnterThrough(const Pass& pass, kernels::Tensor rows, kernels::Tensor storage, RowsIn product,
                    bool keeps_all = true) const;
  // Leave, with what makes the partial sum: `product` is called for y, rows [first, first +
  // y.dim(0)) of it. `storage` and `received` [T,C]; the latter is not used without kChunked.
  using RowsOut = absl::FunctionRef<void(int64_t first, kernels::Tensor y)>;
  kernels::Tensor LeaveThrough(const Pass& pass, kernels::Tensor storage, kernels::Tensor received,
                               RowsOut product) const;

 private:
  bool Overlaps(const Pass& pass) const;
  void Sum(Communicator& group, kernels::Stream& stream, const kernels::Tensor& partial,
           bool gather_follows = false) const;
  kernels::Tensor OwnRows(const kernels::Tensor& all) const;
};

// One of `pieces` of the rows of x, all of one size.
kernels::Tensor PieceOf(const kernels::Tensor& x, int pieces, int piece);

// kInvalidArgument with all numbers when a rank would be left without a unit, or `parallel` makes
// no sense.
absl::Status CheckTensorParallel(const ModelParallel& parallel, int64_t heads, int64_t ffn,
                                 int64_t vocab);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_TENSOR_PARALLEL_H_
