// The inner loops of the host ops, on plain fp32 arrays. They are compiled once per instruction set
// from loops.cc and chosen at run time. Each loop is single-threaded and has a fixed order of
// additions per instruction set. Arrays need no alignment.
//
// Accuracy: exp is within 2 ulp of the real function on [-86.6, 88.7], 0 below, infinite above;
// NaN stays NaN. Sums of rows are fp32 in four vector accumulators.
#ifndef MUSTER_KERNELS_SIMD_LOOPS_H_
#define MUSTER_KERNELS_SIMD_LOOPS_H_

#include <cstdint>

namespace muster::kernels {

struct AdamWStep {
  float beta1, beta2, epsilon;
  float gradient_scale;
  float step_size;    // learning rate / (1 - beta1^t)
  float v_scale;      // 1 / sqrt(1 - beta2^t)
  float decay_scale;  // 1 - learning rate x weight decay
};

struct Loops {
  const char* name;  // "avx512", "avx2", "generic"

  void (*exp)(int64_t n, const float* x, float* y);
  void (*add)(int64_t n, const float* a, const float* b, float* out);  // out may alias
  void (*axpy)(int64_t n, float alpha, const float* x, float* y);      // y += alpha x
  void (*scale)(int64_t n, float alpha, float* x);
  double (*sum)(int64_t n, const float* x);
  double (*sum_squares)(int64_t n, const float* x);
  float (*dot)(int64_t n, const float* a, const float* b);

  // One row; branch and sum may be null.
  void (*layer_norm_forward)(int64_t c, const float* residual, const float* branch, float* sum,
                             const float* gamma, const float* beta, float epsilon, float* y,
                             float* mean, float* rstd);
  // One row: dx +=.
  void (*layer_norm_backward_row)(int64_t c, const float* dy, const float* x, const float* gamma,
                                  float mean, float rstd, float* dx);
  // Columns [0, n) of rows [0, t) that are `stride` apart: dgamma +=, dbeta +=.
  void (*layer_norm_backward_columns)(int64_t t, int64_t n, int64_t stride, const float* dy,
                                      const float* x, const float* mean, const float* rstd,
                                      float* dgamma, float* dbeta);
  // out[0, n) += the sums of the columns.
  void (*add_column_sums)(int64_t t, int64_t n, int64_t stride, const float* x, float* out);

  void (*gelu_forward)(int64_t n, const float* x, float* y);
  void (*gelu_backward)(int64_t n, const float* x, const float* dy, float* dx);  // dx may alias dy
  // y[0, n) is a row without its bias, which may be null. gelu: pre = y + bias, y = gelu(pre).
  void (*add_bias)(int64_t n, const float* bias, float* y);
  void (*add_bias_gelu)(int64_t n, const float* bias, float* y, float* pre);

  // Online softmax of one row of scores s[0, n), of which [0, valid) are seen: s becomes
  // exp(scale * s - m), and 0 from `valid` on; m and l are updated. Returns the factor that earlier
  // sums must be multiplied by.
  float (*softmax_block)(int64_t n, int64_t valid, float scale, float* s, float* m, float* l);
  // p[0, n) = exp(scale * s - lse), 0 from `valid` on; may alias.
  void (*softmax_probabilities)(int64_t n, int64_t valid, float scale, float lse, const float* s,
                                float* p);
  // ds = scale * p * (dp - delta); may alias dp.
  void (*softmax_backward)(int64_t n, float scale, float delta, const float* p, const float* dp,
                           float* ds);

  // Largest of z[0, n), n >= 1.
  float (*max)(int64_t n, const float* z);
  // Sum of exp(z - shift); with `store` z is overwritten by the terms.
  double (*sum_exp)(int64_t n, float shift, bool store, float* z);

  // These use no fused multiply-adds: every set, and a GPU, gives the same bits.
  void (*adamw)(int64_t n, const AdamWStep& step, const float* gradient, float* parameter, float* m,
                float* v);
  // SplitMaster and JoinMaster (optimizer/optimizer.h); `lower` of the former may be null.
  void (*split_master)(int64_t n, const float* master, uint16_t* upper, uint16_t* lower);
  void (*join_master)(int64_t n, const uint16_t* upper, const uint16_t* lower, float* master);
  // Normals 4 block to 4 (block + blocks) - 1 of FillNormal, of mean 0 and deviation 1.
  void (*normals)(int64_t block, int64_t blocks, uint64_t seed, uint64_t stream_id, float* out);
};

// The widest set that this CPU runs.
const Loops& ChooseLoops();
// By name, for tests; null when it is not built in or the CPU lacks it.
const Loops* LoopsNamed(const char* name);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_SIMD_LOOPS_H_
