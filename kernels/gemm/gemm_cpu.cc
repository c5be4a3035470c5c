#include "kernels/gemm/gemm_cpu.h"

#include "base/check.h"
#include "kernels/device/gnu_openmp.h"
#include "oneapi/dnnl/dnnl.h"

namespace muster::kernels {

void Gemm(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, float beta, float* c,
          int64_t c_stride) {
  const char transpose_a = a.transpose == Transpose::kYes ? 'T' : 'N';
  const char transpose_b = b.transpose == Transpose::kYes ? 'T' : 'N';
  const dnnl_status_t status = dnnl_sgemm(transpose_a, transpose_b, m, n, k, 1.0f, a.data, a.stride,
                                          b.data, b.stride, beta, c, c_stride);
  CHECK(status == dnnl_success) << "oneDNN sgemm " << m << "x" << n << "x" << k << ": status "
                                << status;
}

SingleThreadedScope::SingleThreadedScope() : before_(omp_get_max_threads()) {
  omp_set_num_threads(1);
}

SingleThreadedScope::~SingleThreadedScope() { omp_set_num_threads(before_); }

}  // namespace muster::kernels
