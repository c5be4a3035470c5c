// The device seam: memory, streams and events, on the host or on a CUDA GPU. All of the engine
// above is written once against these types.
#ifndef MUSTER_KERNELS_DEVICE_DEVICE_H_
#define MUSTER_KERNELS_DEVICE_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::kernels {

enum class DeviceKind { kCpu, kCuda };

class Device;
class Stream;

// Owned device memory, 256-byte aligned. Freed with the object; never inside a step.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() = 0;
  virtual int64_t bytes() const = 0;
};

// A point in a stream. Record, then wait on another stream or on the host. Re-recordable.
class Event {
 public:
  virtual ~Event() = default;
  // Blocks the host until the work recorded before it has finished.
  virtual void Synchronize() = 0;
  // Whether that work has finished; never blocks.
  virtual bool finished() = 0;
  // Seconds between two recorded, finished events of timing streams.
  virtual double SecondsSince(const Event& earlier) const = 0;
};

// Work of one stream that was recorded and can run again by one call: a CUDA graph. It refers to
// the memory that the work uses, and is destroyed before its stream.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
};

// In-order queue of work. One thread enqueues at a time.
// A host stream is either eager (work runs inside the call) or threaded (a thread of its own runs
// it in order), so that paths which overlap on a GPU overlap on CPU ranks and in tests too.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual Device& device() = 0;
  // Host streams: runs `work` in order. CUDA streams: runs it on the host when the stream gets
  // there.
  virtual void Enqueue(absl::AnyInvocable<void()> work) = 0;
  virtual void Record(Event& event) = 0;
  // Later work on this stream starts after what `event` last recorded.
  virtual void Wait(Event& event) = 0;
  // Blocks the host until all work is done; the first error of asynchronous work since the last
  // call.
  virtual absl::Status Synchronize() = 0;
  // Makes a later Synchronize return `status` (the first one wins). Thread-safe.
  virtual void Fail(absl::Status status) = 0;
  virtual absl::Status status() const = 0;

  // What is enqueued from here to EndRecording is recorded and does not run. False, and nothing is
  // recorded, on streams that cannot record (the host's). See replay.h.
  virtual bool BeginRecording() { return false; }
  // nullptr when something in between cannot be recorded: an allocation, or a wait of the host.
  // Then the stream is as before BeginRecording, and has not failed.
  virtual std::unique_ptr<RecordedWork> EndRecording() { return nullptr; }
  // Enqueues recorded work as a whole. False, and nothing runs, when the stream's scratch memory
  // has moved since it was recorded.
  virtual bool Run(RecordedWork&) { return false; }
};

// The memory of a device, in bytes.
struct DeviceMemory {
  int64_t total = 0;
  int64_t free = 0;  // to any process, at this moment
};

struct StreamOptions {
  bool threaded = false;       // host only
  bool high_priority = false;  // CUDA only
};

// Thread-safe. Outlives everything it made.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual std::string name() const = 0;  // "cpu", "cuda:3 NVIDIA H200 GPU-<UUID>"
  // Threads that a host op may use; 1 on CUDA.
  virtual int threads() const = 0;
  // kResourceExhausted with the sizes asked for and free. Contents are undefined.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(int64_t bytes) = 0;
  // Host memory that copies fast and asynchronously (pinned on CUDA).
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t bytes) = 0;
  // The whole device's memory; for a CPU device the machine's, or its control group's where that is
  // less. kUnavailable when the system does not say.
  virtual absl::StatusOr<DeviceMemory> Memory() = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> MakeStream(StreamOptions options = {}) = 0;
  virtual absl::StatusOr<std::unique_ptr<Event>> MakeEvent(bool timing = false) = 0;
  // Bytes in buffers from Allocate() that still exist.
  int64_t allocated_bytes() const { return allocated_bytes_; }
  // Bytes in buffers from AllocateHost() that still exist.
  int64_t host_allocated_bytes() const { return host_allocated_bytes_; }

 protected:
  std::atomic<int64_t> allocated_bytes_ = 0, host_allocated_bytes_ = 0;  // kept by the buffers
};

// `threads` >= 1: how many host threads one op may use. Ops split work by index ranges that do not
// depend on `threads`, so results do not either.
std::unique_ptr<Device> MakeCpuDevice(int threads);

struct CudaOptions {
  // fp32 linear layers on the tensor cores, with operands rounded to 10 bits of mantissa.
  bool tf32 = false;
  // Attention by our own kernels even where cuDNN has a graph, to compare the two.
  bool own_attention = false;
  // Folder that keeps the algorithms measured for each linear layer, shared by all processes.
  // Empty: every process measures for itself.
  std::string plan_cache;
  // Called before the fastest way to compute a GEMM is measured, which takes up to a second each,
  // on the thread that enqueues the GEMM. It must not enqueue anything itself.
  std::function<void()> on_measuring;
};

// kUnavailable without a driver or device, kFailedPrecondition for a driver older than the runtime
// or an architecture we have no code for, kResourceExhausted when other processes have filled the
// device; messages carry the device's UUID. kUnimplemented in a build without CUDA.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal,
                                                       const CudaOptions& options = {});

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_DEVICE_H_
