// GEMMs through cuBLASLt, with the algorithm for each shape chosen by measurement.
#ifndef MUSTER_KERNELS_GEMM_LINEAR_CUDA_H_
#define MUSTER_KERNELS_GEMM_LINEAR_CUDA_H_

#include <cublasLt.h>

#include <atomic>
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
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// Epilogues of cuBLASLt.
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
  float beta = 0;           // 0 or 1
  const void* c = nullptr;  // multiplied by beta; same shape as d; null: d itself
  GemmEpilogue epilogue = GemmEpilogue::kNone;
  const void* bias = nullptr;  // kBias, kGeluBias: [m]
  void* pre = nullptr;         // as d: kGelu* write the pre-activation, kGeluGradient reads it
};

// The algorithms of one device. The first Run of a problem times cuBLASLt's candidates on the given
// operands, which waits for the stream, and keeps the fastest in memory and in the plan cache: one
// text file per device model and cuBLASLt version, appended a line at a time, so that processes of
// one machine share it. The first line of a problem is valid, also for processes that measured it
// at the same time, so that all of them compute the same bits from then on.
//
// Candidates take turns of a few runs each. For problems that are long enough, the fastest ones
// then run for 50 ms each, in turns, too: a device that trains is at its power limit, where the
// energy of a GEMM decides how fast it is, and shorter runs do not reach that limit. Thread-safe;
// candidates of two streams are not timed at the same time.
class LinearPlans {
 public:
  static constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
  // The time that sustained runs of one instance may take; after that the short turns decide.
  static constexpr int64_t kSustainedMillisecondsMax = 15'000;

  static absl::StatusOr<std::unique_ptr<LinearPlans>> Make(const std::string& device_model,
                                                           const CudaOptions& options);
  ~LinearPlans();

  // `workspace` has kWorkspaceBytes. kUnimplemented: cuBLASLt has no algorithm for this problem.
  absl::Status Run(CudaStream& stream, const Gemm& gemm, void* workspace)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // A way to compute something. A trial writes only what may be written repeatedly.
  using Way = std::function<absl::Status(bool trial)>;
  // Runs the fastest of several ways to compute the same thing. The first call for `key` measures
  // them by trials, and the result is kept like an algorithm. A way whose trial returns an error
  // loses; when all do, and while recording, the first way is taken.
  absl::Status RunFastest(CudaStream& stream, const std::string& key, const std::vector<Way>& ways)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Names a problem in keys: shape, types, alignment.
  std::string KeyOf(const Gemm& gemm) const;

 private:
  LinearPlans(cublasLtHandle_t handle, const CudaOptions& options, std::string file);

  absl::StatusOr<cublasLtMatmulAlgo_t> Measure(CudaStream& stream, const Gemm& gemm,
                                               void* workspace);
  // The plan of `key`, also one that another process has kept meanwhile; "" where there is none.
  std::string Find(const std::string& key) ABSL_LOCKS_EXCLUDED(mutex_);
  // `times` are those of short turns. Where sustained runs are worth it and time is left, returns
  // their times for the fastest ways, and infinity for the others; else `times`.
  std::vector<float> Sustained(CudaStream& stream,
                               const std::vector<std::function<absl::Status()>>& ways,
                               std::vector<float> times);
  void Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Keeps a plan and returns the valid one: what another process kept first, unless it is `unfit`.
  std::string Keep(const std::string& key, const std::string& value, const std::string& unfit)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const cublasLtHandle_t handle_;
  const bool tf32_;
  const std::string file_;  // empty: memory only
  const std::function<void()> on_measuring_;
  std::atomic<int64_t> sustained_milliseconds_left_ = kSustainedMillisecondsMax;
  Mutex measuring_;
  Mutex mutex_;
  int64_t loaded_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the file, whole lines
  std::map<std::string, std::string> plans_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_GEMM_LINEAR_CUDA_H_
