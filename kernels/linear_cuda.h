// Matrix products through cuBLASLt, with the algorithm of each shape measured, not guessed.
#ifndef MUSTER_KERNELS_LINEAR_CUDA_H_
#define MUSTER_KERNELS_LINEAR_CUDA_H_

#include <cublasLt.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// What is fused behind a product.
enum class GemmEpilogue { kNone, kBias, kGelu, kGeluBias, kGeluGradient };

// d = epilogue(op(a) op(b) + beta d), all in cuBLAS's column-major terms: op(a) is m x k, op(b)
// k x n, d m x n with leading dimension m.
struct Gemm {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  DType input, output;
  const void* a;
  const void* b;
  void* d;
  float beta = 0;  // 0 or 1
  GemmEpilogue epilogue = GemmEpilogue::kNone;
  const void* bias = nullptr;  // kBias, kGeluBias: [m]
  void* pre = nullptr;         // as d: kGelu* write the pre-activation, kGeluGradient reads it
};

// The algorithms of one device. The first Run of a problem times cuBLASLt's candidates on the given
// operands (which waits for the stream) and keeps the fastest, in memory and in the plan cache: one
// text file per device model and cuBLASLt version, appended a line at a time, so that processes of
// one machine share it. A process that loads a plan computes the same bits as the one that measured
// it. Thread-safe; candidates of two streams are not timed at the same time.
class LinearPlans {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;

  static absl::StatusOr<std::unique_ptr<LinearPlans>> Make(const std::string& device_model,
                                                           const CudaOptions& options);
  ~LinearPlans();

  // `workspace`: kWorkspaceBytes. kUnimplemented: no algorithm for this problem.
  absl::Status Run(CudaStream& stream, const Gemm& gemm, void* workspace)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // A way to compute something; `trial`: writes where it may be repeated.
  using Way = std::function<absl::Status(bool trial)>;
  // Runs the fastest of several ways to compute the same thing, which is measured by trials at the
  // first call for `key` and kept like an algorithm. A way whose trial returns an error loses; when
  // all do, and while recording, the first one is taken.
  absl::Status RunFastest(CudaStream& stream, const std::string& key, const std::vector<Way>& ways)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Names a problem in keys: shape, types, alignment.
  std::string KeyOf(const Gemm& gemm) const;

 private:
  LinearPlans(cublasLtHandle_t handle, const CudaOptions& options, std::string file);

  absl::StatusOr<cublasLtMatmulAlgo_t> Measure(CudaStream& stream, const Gemm& gemm,
                                               void* workspace);
  void Load() ABSL_LOCKS_EXCLUDED(mutex_);
  void Keep(const std::string& key, const std::string& value) ABSL_LOCKS_EXCLUDED(mutex_);

  const cublasLtHandle_t handle_;
  const bool tf32_;
  const std::string file_;  // empty: memory only
  Mutex measuring_;
  Mutex mutex_;
  std::map<std::string, std::string> plans_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_LINEAR_CUDA_H_
