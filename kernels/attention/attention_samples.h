// Slices of a problem whose workspace would be too large as a whole.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_SAMPLES_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_SAMPLES_H_

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/tensor.h"

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
