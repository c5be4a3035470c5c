// Parts of a problem that would take too large a workspace as a whole.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_SAMPLES_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_SAMPLES_H_

#include <cstdint>

#include "kernels/ops.h"

namespace muster::kernels::cuda {

// Samples [begin, begin + count).
inline AttentionBackwardArgs SamplesOf(AttentionBackwardArgs args, int64_t begin, int64_t count) {
  AttentionArgs& forward = args.forward;
  for (Tensor* t : {&forward.q, &forward.k, &forward.v, &forward.out, &forward.lse, &args.dout,
                    &args.dq, &args.dk, &args.dv, &args.delta}) {
    *t = t->Rows(begin, count);
  }
  return args;
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_SAMPLES_H_
