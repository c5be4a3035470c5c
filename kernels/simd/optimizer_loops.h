// Loops that are compiled without fused multiply-adds: the optimizer rounds as
// kernels/optimizer/optimizer.cu does, and random numbers are the same on every machine. Compiled
// once per instruction set, for loops.cc.
#ifndef MUSTER_KERNELS_SIMD_OPTIMIZER_LOOPS_H_
#define MUSTER_KERNELS_SIMD_OPTIMIZER_LOOPS_H_

#include <cstdint>

#include "kernels/simd/loops.h"

#define MUSTER_CONCAT_INNER(a, b) a##_##b
#define MUSTER_CONCAT(a, b) MUSTER_CONCAT_INNER(a, b)
#define MUSTER_STRING_INNER(a) #a
#define MUSTER_STRING(a) MUSTER_STRING_INNER(a)
#define MUSTER_SIMD_SYMBOL(name) MUSTER_CONCAT(name, MUSTER_SIMD_NAME)

namespace muster::kernels {

void MUSTER_SIMD_SYMBOL(AdamW)(int64_t n, const AdamWStep& step, const float* gradient,
                               float* parameter, float* m, float* v);
void MUSTER_SIMD_SYMBOL(SplitMaster)(int64_t n, const float* master, uint16_t* upper,
                                     uint16_t* lower);
void MUSTER_SIMD_SYMBOL(JoinMaster)(int64_t n, const uint16_t* upper, const uint16_t* lower,
                                    float* master);
void MUSTER_SIMD_SYMBOL(Normals)(int64_t block, int64_t blocks, uint64_t seed, uint64_t stream_id,
                                 float* out);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_SIMD_OPTIMIZER_LOOPS_H_
