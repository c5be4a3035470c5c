// Dropout of what a block adds to the residual stream, in training only.
#ifndef MUSTER_PARALLEL_MODEL_DROPOUT_H_
#define MUSTER_PARALLEL_MODEL_DROPOUT_H_

#include <cstdint>

#include "kernels/tensor.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Dropout at one place of the model. Value type.
struct Dropout {
  double probability = 0;
  int64_t site = 0;  // the same in every layout

  static constexpr int64_t kEmbedding = 0;
  // Sites of the layers of a block of the whole model.
  static int64_t FirstLayerSite(int64_t block) { return 1 + 2 * block; }
  static int64_t SecondLayerSite(int64_t block) { return 2 + 2 * block; }

  bool Drops(const Pass& pass) const { return probability > 0 && pass.dropout_seed.has_value(); }
  // out = x with dropout, or a gradient with the same mask. x has the tokens [first, first +
  // x.dim(0)) of `batch`; `out` may be x. Does nothing unless Drops(pass).
  void Apply(const Pass& pass, const ModelBatch& batch, const kernels::Tensor& x,
             const kernels::Tensor& out, int64_t first) const;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_DROPOUT_H_
