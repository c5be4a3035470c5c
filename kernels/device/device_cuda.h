// What the CUDA ops need of devices and streams beyond device.h. For CUDA code only.
#ifndef MUSTER_KERNELS_DEVICE_DEVICE_CUDA_H_
#define MUSTER_KERNELS_DEVICE_DEVICE_CUDA_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "kernels/device/device.h"

namespace muster::kernels::cuda {

class LinearPlans;
class AttentionPlans;

class CudaDevice : public Device {
 public:
  // As MakeCudaDevice.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Make(int ordinal, const CudaOptions& options);
  ~CudaDevice() override;

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override;
  int threads() const override { return 1; }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t bytes) override;
  absl::StatusOr<DeviceMemory> Memory() override;
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream(StreamOptions options) override;
  absl::StatusOr<std::unique_ptr<Event>> MakeEvent(bool timing) override;

  // Makes this the current device of the calling thread.
  cudaError_t Select() const { return cudaSetDevice(ordinal_); }
  int ordinal() const { return ordinal_; }
  const std::string& uuid() const { return uuid_; }
  int multiprocessors() const { return multiprocessors_; }
  // Of the architecture: 9 is Hopper.
  int compute_major() const { return compute_major_; }
  int shared_bytes_per_block() const { return shared_bytes_per_block_; }
  const CudaOptions& options() const { return options_; }
  LinearPlans& linear_plans() { return *linear_plans_; }

 private:
  CudaDevice(int ordinal, const CudaOptions& options, const cudaDeviceProp& properties);

  const int ordinal_;
  const CudaOptions options_;
  const std::string model_;
  const std::string uuid_;
  const int multiprocessors_;
  const int shared_bytes_per_block_;
  const int compute_major_;
  std::unique_ptr<LinearPlans> linear_plans_;
};

class CudaStream : public Stream {
 public:
  // The stream of an op, with its device selected. Requires: `stream` is a CUDA stream.
  static CudaStream& Of(Stream& stream);

  CudaStream(CudaDevice& device, cudaStream_t handle);
  ~CudaStream() override;

  Device& device() override { return device_; }
  void Enqueue(absl::AnyInvocable<void()> work) override;
  void Record(Event& event) override;
  void Wait(Event& event) override;
  absl::Status Synchronize() override;
  void Fail(absl::Status status) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status status() const override ABSL_LOCKS_EXCLUDED(mutex_);
  bool BeginRecording() override;
  std::unique_ptr<RecordedWork> EndRecording() override;
  bool Run(RecordedWork& work) override;

  // True between BeginRecording and EndRecording, when nothing may be measured, allocated or waited
  // for.
  bool recording() const { return recording_; }
  CudaDevice& cuda_device() { return device_; }
  cudaStream_t handle() const { return handle_; }
  // Fails the stream when `error` is not success; true when it is.
  bool Check(cudaError_t error, absl::string_view what);
  // Called after every launch: a launch that fails is reported by name at the next Synchronize.
  bool CheckLaunch(absl::string_view op) { return Check(cudaGetLastError(), op); }
  // At least `bytes` of device memory, 256-byte aligned, for the op being enqueued: the next op on
  // this stream gets the same bytes. The memory grows, which waits for the stream, only when an op
  // asks for more than any before it; that ends with the first step. nullptr after failing the
  // stream, or the recording.
  void* Scratch(int64_t bytes);
  // cuDNN's handle and graphs, made at first use; they belong to one stream.
  AttentionPlans& attention_plans();

 private:
  CudaDevice& device_;
  const cudaStream_t handle_;
  std::unique_ptr<Buffer> scratch_;
  std::unique_ptr<AttentionPlans> attention_plans_;
  std::atomic<bool> recording_ = false;
  std::thread::id recorder_;  // the thread that records
  bool recording_failed_ = false;
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Whether this build has code with wgmma (sm_90a) and the device can run it.
bool HasWarpgroups(const CudaDevice& device);

// kFailedPrecondition when this build has no code for the selected device. (memory.cu)
cudaError_t ProbeArchitecture();
// The architectures this build has code for, e.g. "sm_90a".
std::string BuiltArchitectures();

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_DEVICE_DEVICE_CUDA_H_
