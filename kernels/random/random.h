// Random numbers for initial weights.
#ifndef MUSTER_KERNELS_RANDOM_RANDOM_H_
#define MUSTER_KERNELS_RANDOM_RANDOM_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace muster::kernels {

// out[i] = mean + stddev * normal(seed, stream_id, first + i): Philox4x32-10 (Salmon et al., SC
// 2011) by global element index, and Box-Muller. The value of an element depends neither on the
// layout nor on the machine: fp32 without fused multiply-adds. Values reach up to 5.77 deviations.
// out: fp32 in host memory; filled when the call returns, by the calling thread.
void FillNormal(Tensor out, uint64_t seed, uint64_t stream_id, int64_t first, float mean,
                float stddev);

// out[i] = uniform(seed, stream_id, first + i) in [0, 1), a multiple of 2^-24. Otherwise as
// FillNormal.
void FillUniform(Tensor out, uint64_t seed, uint64_t stream_id, int64_t first);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_RANDOM_RANDOM_H_
