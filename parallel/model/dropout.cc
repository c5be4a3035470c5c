#include "parallel/model/dropout.h"

#include "base/check.h"
#include "kernels/random/dropout.h"
#include "kernels/tensor.h"

namespace muster::parallel {

void Dropout::Apply(const Pass& pass, const ModelBatch& batch, const kernels::Tensor& x,
                    const kernels::Tensor& out, int64_t first) const {
  if (!Drops(pass)) return;
  CHECK(!batch.sample.empty()) << "a pass that drops does not know its samples";
  kernels::Dropout(pass.stream, {.x = x,
                                 .out = out,
                                 .probability = probability,
                                 .seed = *pass.dropout_seed,
                                 .site = site,
                                 .sample = batch.sample,
                                 .sequence = batch.shape.sequence,
                                 .first_row = first,
                                 .positions = batch.positions});
}

}  // namespace muster::parallel
