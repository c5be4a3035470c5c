// What a model asks to be stored, without saying where: names, shapes, boxes, initial values.
#ifndef MUSTER_PARALLEL_MODEL_PARAMETERS_H_
#define MUSTER_PARALLEL_MODEL_PARAMETERS_H_

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/tensor.h"
#include "parallel/checkpoint/box.h"

namespace muster::parallel {

enum class Initializer : uint8_t { kZeros, kOnes, kNormal };

// What the ranks of a tensor-parallel group hold of a parameter.
enum class TensorSharing : uint8_t {
  kReplicated,  // the same value, and the same gradient
  kSharded,     // another box each
  kPartial,     // the same value, each a part of the gradient: to be summed over the group
  kShared,      // as kPartial among some neighbours (Model::Shape::kv_group); others, another box
};

// Index into a ParameterRegistry.
using ParameterId = int;

// One trainable tensor, or this rank's box of it. One or two dimensions.
struct Parameter {
  // The same in every layout: "blocks.3.attention.qkv.weight"; the block index is global.
  std::string name;
  std::vector<int64_t> global_shape;
  // This rank's part of it; all of it unless a dimension is sharded. Where the part is several runs
  // of rows (queries, keys and values; gate and up), `bands` are these in storage order, and box is
  // of their common shape and begins with the first. Otherwise the registry makes box the one band.
  Box box;
  std::vector<Box> bands;
  // Rows of storage, >= box.extent[0]: the rows behind are padding, which starts as zero and has no
  // gradient, so it stays zero. It is not part of a checkpoint.
  int64_t storage_rows = 0;
  bool weight_decay = false;  // 2-D weights only
  Initializer initializer = Initializer::kZeros;
  float stddev = 0;  // of kNormal
  TensorSharing sharing = TensorSharing::kReplicated;
  // kShared: the first rank of those that hold it, which counts it in the norm and saves it.
  bool first_sharer = false;
  // Another parameter of the same name holds other bands of the tensor.
  bool in_two = false;
  // Set by the registry. Index of the block within the model, -1 when it belongs to none.
  int block = -1;
  // Whether it is kept whole where blocks are sharded (ZeRO-3): embeddings, head, what is tied.
  bool resident = true;
  // Another pipeline stage holds the same tensor (a tied table: the embedding's and the head's).
  // The gradient of both is the sum of what the two stages find.
  bool on_two_stages = false;
  // The later of the two. The other one has the say: it counts it in the norm and saves it.
  bool duplicate = false;
  // A backward writes its gradient in one product, LinearBackwardWeights, and nowhere else.
  bool by_product = false;

  // Elements [begin, end) of this rank's storage as boxes of the whole tensor, in order.
  std::vector<Box> Boxes(int64_t begin, int64_t end) const;
  int64_t elements() const;          // of the box, without padding
  int64_t storage_elements() const;  // with padding
};

// Parameters in forward order of first use. Backward completes their gradients in about the
// reverse order, which is the order of the flat buckets. Filled while the model is built, read
// only afterwards.
class ParameterRegistry {
 public:
  // Parameters added from now on belong to `block`. Those of a block that is not resident are used
  // by that block alone.
  void BeginBlock(int block, bool resident) {
    block_ = block;
    resident_ = resident;
  }
  // Fills in box, bands and storage_rows when empty. Requires: the name is new, or that of a
  // parameter in two.
  ParameterId Add(Parameter parameter);
  const Parameter& at(ParameterId id) const { return parameters_[id]; }
  int size() const { return static_cast<int>(parameters_.size()); }
  // Trainable elements of this rank, without padding.
  int64_t elements() const;

 private:
  std::vector<Parameter> parameters_;
  std::set<std::string> names_;
  int block_ = -1;
  bool resident_ = true;
};

// One tensor per parameter: their values, or their gradients, or moments. Shaped as stored:
// [storage_rows, columns] or [storage_rows]. Views, owns nothing.
class ParameterViews {
 public:
  ParameterViews() = default;
  explicit ParameterViews(std::vector<kernels::Tensor> tensors) : tensors_(std::move(tensors)) {}
  const kernels::Tensor& operator[](ParameterId id) const { return tensors_[id]; }

 private:
  std::vector<kernels::Tensor> tensors_;
};

// Writes the initial values of elements [first, first + count) of the parameter's box (row-major,
// band after band, without padding) to host memory. Normal values are Philox(seed, hash of the
// name, global element index): the same number for the same element in every layout. Many elements
// are written by several threads, at most `threads` of them; the values do not depend on it.
void Initialize(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                float* values, int threads = 1);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_PARAMETERS_H_
