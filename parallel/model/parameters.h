// The parameters of a model, without their storage: names, shapes, boxes, initial values.
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

enum class Initializer : uint8_t {
  kZeros,
  kOnes,
  kNormal,   // mean 0, Parameter::stddev
  kUniform,  // in [low, high)
  // The logarithm of a uniform value in [low, high), low > 0: Mamba's a_log.
  kLogOfUniform,
  // softplus^-1(step), log(step) uniform in [log(low), log(high)), step >= 1e-4: Mamba's dt_bias.
  kInverseSoftplusOfLogUniform,
};

// How a parameter is held by the ranks of a tensor-parallel group.
enum class TensorSharing : uint8_t {
  kReplicated,  // the same value, and the same gradient
  kSharded,     // each rank has a box of its own
  kPartial,     // the same value; the gradient is the sum of the ranks' gradients
  kShared,      // as kPartial among neighbouring ranks (Model::Shape::kv_group); others differ
};

// Index into a ParameterRegistry.
using ParameterId = int;

// One trainable tensor, or this rank's box of it: of one to kernels::Tensor::kRankMax dimensions.
struct Parameter {
  // The same in every layout: "blocks.3.attention.qkv.weight"; the block index is global.
  std::string name;
  std::vector<int64_t> global_shape;
  // This rank's shard, or the whole tensor. Where the shard is several runs of rows (queries, keys
  // and values; gate and up), `bands` are these in storage order, and `box` has their total rows
  // and begins with the first. Otherwise the registry makes `box` the only band.
  Box box;
  std::vector<Box> bands;
  // Rows of storage, >= box.extent[0]. The rows behind the box are padding, which starts as zero
  // and has no gradient, so it stays zero. Checkpoints do not contain it.
  int64_t storage_rows = 0;
  bool weight_decay = false;  // weights of GEMMs, and tables
  Initializer initializer = Initializer::kZeros;
  float stddev = 0;         // for kNormal
  float low = 0, high = 0;  // for the uniform ones
  // Whether models that compute in 16 bits read it in fp32, as a rule because it is small and feeds
  // an exponential.
  bool full_precision = false;
  TensorSharing sharing = TensorSharing::kReplicated;
  // kShared: whether this is the first rank that holds it, which counts it in the norm and saves
  // it.
  bool first_sharer = false;
  // Whether another parameter of the same name holds other bands of the tensor.
  bool in_two = false;
  // Set by the registry: index of the block within the model, -1 when it belongs to none.
  int block = -1;
  // Whether ZeRO 2 and 3 keep it whole: all parameters of an embedding and a head that are tied.
  bool resident = true;
  // Whether another pipeline stage holds the same tensor (a tied table, in embedding and head). The
  // gradient of both is the sum of the two stages' gradients.
  bool on_two_stages = false;
  // Whether this is the later of the two stages. The other one counts it in the norm and saves it.
  bool duplicate = false;
  // Whether backward writes its gradient in one GEMM, LinearBackwardWeights, and nowhere else.
  bool by_gemm = false;

  // Elements [begin, end) of this rank's storage as boxes of the whole tensor, in order.
  std::vector<Box> Boxes(int64_t begin, int64_t end) const;
  int64_t elements() const;          // of the box, without padding
  int64_t storage_elements() const;  // with padding
  // This rank's tensor in `data`: the box's dimensions, with storage_rows of the first.
  kernels::Tensor StorageIn(void* data, kernels::DType dtype) const;
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
  // Fills in box, bands and storage_rows when empty. Requires: the name is new, or `in_two` was
  // set.
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

// One tensor per parameter: values, gradients or moments, shaped as stored (Parameter::StorageIn).
// Views; owns nothing.
class ParameterViews {
 public:
  ParameterViews() = default;
  explicit ParameterViews(std::vector<kernels::Tensor> tensors) : tensors_(std::move(tensors)) {}
  const kernels::Tensor& operator[](ParameterId id) const { return tensors_[id]; }

 private:
  std::vector<kernels::Tensor> tensors_;
};

// Writes the initial values of elements [first, first + count) of the parameter's box (row-major,
// band after band, without padding) to host memory. Random values are Philox(seed, hash of the
// name, global element index): the same number for the same element in every layout. Many elements
// are written by several threads, at most `threads` of them; the values do not depend on it.
void Initialize(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                float* values, int threads = 1);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_PARAMETERS_H_
