#include "parallel/model/dropout.h"

#include "base/check.h"
#include "kernels/random/dropout.h"
#include "kernels/tensor.h"

namespace muster::parallel {

void Dropout::Apply(const Pass& pass, const Flow& flow, const kernels::Tensor& x,
                    const kernels::Tensor& out, int64_t first) const {
  if (!Drops(pass)) return;
  CHECK(!flow.sample.empty()) << "a pass that drops does not know its samples";
  kernels::Dropout(pass.stream, {.x = x,
                                 .out = out,
                                 .probability = probability,
                                 .seed = *pass.dropout_seed,
                                 .site = site,
                                 .sample = flow.sample,
                                 .sequence = flow.shape.sequence,
                                 .first_row = first,
                                 .positions = flow.positions});
}

}  // namespace muster::parallel
