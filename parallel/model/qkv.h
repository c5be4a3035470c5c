// The projection to queries, keys and values, and the layout of its output.
//
// In the whole model it is one matrix [(H+2G)D, C]: the rows of all query heads, then of the key
// heads, then of the value heads. A rank of a tensor-parallel group holds some key/value heads with
// their query heads, packed the same way. Where ranks share a key/value head (tensor_parallel.h)
// each holds two parameters of the one matrix: its query heads, and the keys and values of the
// shared head. The gradient of the second is summed over the sharing ranks
// (TensorSharing::kShared).
#ifndef MUSTER_PARALLEL_MODEL_QKV_H_
#define MUSTER_PARALLEL_MODEL_QKV_H_

#include <cstdint>
#include <string>

#include "kernels/arena.h"
#include "kernels/tensor.h"
#include "parallel/model/linear.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

class QkvProjection {
 public:
  struct Spec {
    std::string name;
    int64_t hidden = 0;
    int64_t heads = 0;  // of the whole model, like kv_heads
    int64_t kv_heads = 0;
    int64_t head_width = 0;
    float stddev = 0;
    bool bias = true;
  };
  // The output, or its gradient; H and G are this rank's.
  struct Output {
    kernels::Tensor packed;  // [T,(H+2G)D]; with a shared key/value head the queries alone, [T,HD]
    kernels::Tensor pairs;   // with a shared key/value head: keys, then values, [T,2GD]

    Output Rows(int64_t first, int64_t count) const;
  };

  QkvProjection(ParameterRegistry& registry, const Spec& spec, const TensorShard& shard);

  int64_t heads() const { return heads_; }  // of this rank
  int64_t kv_heads() const { return kv_heads_; }
  int64_t depth() const { return depth_; }

  Output Take(kernels::Arena& arena, const std::string& category, kernels::DType dtype,
              int64_t tokens) const;
  // Scratch of BackwardInput, [T,C]; empty when it needs none.
  kernels::Tensor TakeScratch(kernels::Arena& arena, kernels::DType dtype, int64_t tokens) const;

  // Views of an output as [B,S,heads,D].
  kernels::Tensor Queries(const Output& output, const BatchShape& shape) const;
  kernels::Tensor Keys(const Output& output, const BatchShape& shape) const;
  kernels::Tensor Values(const Output& output, const BatchShape& shape) const;
  // Applies rotary positions to queries and keys in place (kernels::Rotary).
  void Rotate(const Pass& pass, const ModelBatch& batch, const Output& output, bool inverse) const;

  // As those of a linear layer (linear.h). With `rotary`, a table of angles, x is whole sequences
  // and rotary positions are applied to queries and keys.
  void Forward(const Pass& pass, kernels::Tensor x, const Output& output,
               kernels::Tensor rotary) const;
  void BackwardInput(const Pass& pass, const Output& d_output, kernels::Tensor dx,
                     kernels::Tensor scratch) const;
  void BackwardWeights(const Pass& pass, const Output& d_output, kernels::Tensor x) const;

 private:
  // Heads [first, first + count) of rows of heads.
  kernels::Tensor Heads(kernels::Tensor rows, const BatchShape& shape, int64_t first,
                        int64_t count) const;

  int64_t hidden_, heads_, kv_heads_, depth_;
  bool shares_;
  Linear packed_, pairs_;
};

void Copy(kernels::Stream& stream, const QkvProjection::Output& from,
          const QkvProjection::Output& to);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_QKV_H_
