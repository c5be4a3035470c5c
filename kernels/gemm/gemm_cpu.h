// Row-major fp32 GEMM of one thread, for tiles of host ops.
#ifndef MUSTER_KERNELS_GEMM_GEMM_CPU_H_
#define MUSTER_KERNELS_GEMM_GEMM_CPU_H_

#include <cstdint>

namespace muster::kernels {

enum class Transpose { kNo, kYes };

struct Matrix {
  const float* data;
  int64_t stride;  // elements between rows as stored
  Transpose transpose = Transpose::kNo;
};

// c[m,n] = op(a)[m,k] op(b)[k,n] + beta c. With beta 0 the old c is not read. Runs in the calling
// thread; the bits depend on the arguments alone.
void Gemm(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float beta, float* c,
          int64_t c_stride);

// Keeps oneDNN calls of this thread in this thread while it lives.
class SingleThreadedScope {
 public:
  SingleThreadedScope();
  ~SingleThreadedScope();
  SingleThreadedScope(const SingleThreadedScope&) = delete;
  SingleThreadedScope& operator=(const SingleThreadedScope&) = delete;

 private:
  int before_;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_GEMM_GEMM_CPU_H_
