#include "kernels/device/device_cuda.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/attention/attention_cudnn.h"
#include "kernels/device/cuda_status.h"
#include "kernels/device/nvidia_libraries.h"
#include "kernels/gemm/linear_cuda.h"

namespace muster::kernels::cuda {
namespace {

class CudaBuffer : public Buffer {
 public:
  enum class Place { kDevice, kHost };

  CudaBuffer(void* data, int64_t bytes, Place place, std::atomic<int64_t>& counter)
      : data_(data), bytes_(bytes), place_(place), counter_(counter) {
    counter_ += bytes_;
  }
  ~CudaBuffer() override {
    // The error of a free is the sticky error of earlier work, which its stream reports.
    if (place_ == Place::kHost) {
      cudaFreeHost(data_);
    } else {
      cudaFree(data_);
    }
    counter_ -= bytes_;
  }
  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* const data_;
  const int64_t bytes_;
  const Place place_;
  std::atomic<int64_t>& counter_;
};

class CudaEvent : public Event {
 public:
  CudaEvent(cudaEvent_t handle, bool timing) : handle_(handle), timing_(timing) {}
  ~CudaEvent() override { cudaEventDestroy(handle_); }
  // A failure of the work itself is reported by Synchronize of the stream it ran on.
  void Synchronize() override { cudaEventSynchronize(handle_); }
  bool finished() override { return cudaEventQuery(handle_) != cudaErrorNotReady; }
  double SecondsSince(const Event& earlier) const override {
    const auto& from = static_cast<const CudaEvent&>(earlier);
    CHECK(timing_ && from.timing_) << "made without timing";
    float milliseconds = 0;
    const cudaError_t error = cudaEventElapsedTime(&milliseconds, from.handle_, handle_);
    CHECK(error == cudaSuccess) << cudaGetErrorString(error);
    return milliseconds * 1e-3;
  }
  cudaEvent_t handle() const { return handle_; }

 private:
  const cudaEvent_t handle_;
  const bool timing_;
};

class CudaGraph : public RecordedWork {
 public:
  CudaGraph(cudaGraphExec_t handle, const void* scratch) : handle_(handle), scratch_(scratch) {}
  ~CudaGraph() override { cudaGraphExecDestroy(handle_); }
  cudaGraphExec_t handle() const { return handle_; }
  const void* scratch() const { return scratch_; }

 private:
  const cudaGraphExec_t handle_;
  const void* const scratch_;  // the scratch memory that the work writes to
};

std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

std::string Describe(int ordinal, const cudaDeviceProp& properties) {
  return absl::StrCat("cuda:", ordinal, " ", properties.name, " ", FormatUuid(properties.uuid));
}

// cudaDriverGetVersion reports a missing driver as version 0.
absl::Status CheckDriver(int ordinal) {
  int driver = 0;
  int runtime = 0;
  RETURN_IF_ERROR(CudaStatus(cudaDriverGetVersion(&driver), "reading the driver's version"));
  RETURN_IF_ERROR(CudaStatus(cudaRuntimeGetVersion(&runtime), "reading the runtime's version"));
  if (driver == 0) {
    return absl::UnavailableError(
        "no CUDA driver is loaded on this machine; check that nvidia-smi runs, and that a "
        "container "
        "was started with its GPUs");
  }
  if (driver / 1000 < runtime / 1000) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the CUDA driver supports %d.%d, older than the runtime %d.%d of this build; update the "
        "driver",
        driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10));
  }
  int count = 0;
  RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "counting CUDA devices"));
  if (ordinal < 0 || ordinal >= count) {
    return absl::UnavailableError(absl::StrCat("no CUDA device ", ordinal, ": ", count,
                                               " visible (see CUDA_VISIBLE_DEVICES)"));
  }
  return absl::OkStatus();
}

// Makes the calls that fail on a full or broken device.
absl::Status CheckUsable(int ordinal, const cudaDeviceProp& properties) {
  const std::string device = Describe(ordinal, properties);
  if (const cudaError_t error = cudaSetDevice(ordinal); error != cudaSuccess) {
    return Annotate(CudaStatus(error, "making a context"),
                    absl::StrCat(device,
                                 ": is another process holding the device or its memory? "
                                 "nvidia-smi shows who"));
  }
  if (const cudaError_t error = ProbeArchitecture(); error != cudaSuccess) {
    cudaGetLastError();
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: compute capability %d.%d, but this build has code for %s; rebuild with "
        "-DMUSTER_CUDA_ARCHITECTURES=%d%d",
        device, properties.major, properties.minor, BuiltArchitectures(), properties.major,
        properties.minor));
  }
  size_t free = 0;
  size_t total = 0;
  RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), device));
  constexpr size_t kLeastFree = size_t{512} << 20;
  if (free < kLeastFree) {
    return absl::ResourceExhaustedError(
        absl::StrCat(device, ": ", free >> 20, " of ", total >> 20,
                     " MiB free; another process holds the rest (nvidia-smi shows who)"));
  }
  return absl::OkStatus();
}

}  // namespace

CudaDevice::CudaDevice(int ordinal, const CudaOptions& options, const cudaDeviceProp& properties)
    : ordinal_(ordinal),
      options_(options),
      model_(properties.name),
      uuid_(FormatUuid(properties.uuid)),
      multiprocessors_(properties.multiProcessorCount),
      shared_bytes_per_block_(static_cast<int>(properties.sharedMemPerBlockOptin)),
      compute_major_(properties.major) {}

CudaDevice::~CudaDevice() = default;

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Make(int ordinal,
                                                             const CudaOptions& options) {
  RETURN_IF_ERROR(CheckDriver(ordinal));
  cudaDeviceProp properties;
  RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, ordinal),
                             absl::StrCat("reading the properties of cuda:", ordinal)));
  RETURN_IF_ERROR(CheckUsable(ordinal, properties));
  RETURN_IF_ERROR(Annotate(LoadCublasLt(), "cuBLASLt"));
  LoadCudnn().IgnoreError();  // faster where it is
  auto device = std::unique_ptr<CudaDevice>(new CudaDevice(ordinal, options, properties));
  ASSIGN_OR_RETURN(device->linear_plans_, LinearPlans::Make(device->model_, options));
  return device;
}

std::string CudaDevice::name() const {
  return absl::StrCat("cuda:", ordinal_, " ", model_, " ", uuid_);
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaDevice::Allocate(int64_t bytes) {
  RETURN_IF_ERROR(CudaStatus(Select(), name()));
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, bytes > 0 ? bytes : 1); error != cudaSuccess) {
    cudaGetLastError();  // clears it: the next launch check must not see it
    size_t free = 0;
    size_t total = 0;
    cudaMemGetInfo(&free, &total);
    return CudaStatus(error, absl::StrCat(name(), ": allocating ", bytes, " bytes, ", free, " of ",
                                          total, " free"));
  }
  return std::make_unique<CudaBuffer>(data, bytes, CudaBuffer::Place::kDevice, allocated_bytes_);
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaDevice::AllocateHost(int64_t bytes) {
  RETURN_IF_ERROR(CudaStatus(Select(), name()));
  void* data = nullptr;
  if (const cudaError_t error = cudaMallocHost(&data, bytes > 0 ? bytes : 1);
      error != cudaSuccess) {
    cudaGetLastError();
    return CudaStatus(error, absl::StrCat(name(), ": pinning ", bytes,
                                          " bytes of the host's memory, of which it may have too "
                                          "little"));
  }
  return std::make_unique<CudaBuffer>(data, bytes, CudaBuffer::Place::kHost, host_allocated_bytes_);
}

absl::StatusOr<DeviceMemory> CudaDevice::Memory() {
  RETURN_IF_ERROR(CudaStatus(Select(), name()));
  size_t free = 0;
  size_t total = 0;
  RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), name()));
  return DeviceMemory{static_cast<int64_t>(total), static_cast<int64_t>(free)};
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::MakeStream(StreamOptions options) {
  RETURN_IF_ERROR(CudaStatus(Select(), name()));
  int least = 0;
  int greatest = 0;
  RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading priorities"));
  cudaStream_t handle = nullptr;
  RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking,
                                                          options.high_priority ? greatest : least),
                             "making a stream"));
  return std::make_unique<CudaStream>(*this, handle);
}

absl::StatusOr<std::unique_ptr<Event>> CudaDevice::MakeEvent(bool timing) {
  RETURN_IF_ERROR(CudaStatus(Select(), name()));
  cudaEvent_t handle = nullptr;
  RETURN_IF_ERROR(CudaStatus(
      cudaEventCreateWithFlags(&handle, timing ? cudaEventDefault : cudaEventDisableTiming),
      "making an event"));
  return std::make_unique<CudaEvent>(handle, timing);
}

CudaStream& CudaStream::Of(Stream& stream) {
  CHECK(stream.device().kind() == DeviceKind::kCuda);
  auto& cuda = static_cast<CudaStream&>(stream);
  cuda.Check(cuda.device_.Select(), "selecting the device");
  return cuda;
}

CudaStream::CudaStream(CudaDevice& device, cudaStream_t handle)
    : device_(device), handle_(handle) {}

CudaStream::~CudaStream() {
  cudaStreamSynchronize(handle_);  // scratch must outlive the work that uses it
  attention_plans_.reset();
  cudaStreamDestroy(handle_);
}

void CudaStream::Enqueue(absl::AnyInvocable<void()> work) {
  if (!Check(device_.Select(), "selecting the device")) return;
  auto* boxed = new absl::AnyInvocable<void()>(std::move(work));
  const auto run = [](void* argument) {
    std::unique_ptr<absl::AnyInvocable<void()>> owned(
        static_cast<absl::AnyInvocable<void()>*>(argument));
    (*owned)();
  };
  if (!Check(cudaLaunchHostFunc(handle_, run, boxed), "enqueueing host work")) delete boxed;
}

void CudaStream::Record(Event& event) {
  Check(cudaEventRecord(static_cast<CudaEvent&>(event).handle(), handle_), "recording an event");
}

void CudaStream::Wait(Event& event) {
  Check(cudaStreamWaitEvent(handle_, static_cast<CudaEvent&>(event).handle(), 0),
        "waiting for an event");
}

absl::Status CudaStream::Synchronize() {
  Check(device_.Select(), "selecting the device");
  Check(cudaStreamSynchronize(handle_), device_.name());
  MutexLock lock(&mutex_);
  return std::exchange(status_, absl::OkStatus());
}

void CudaStream::Fail(absl::Status status) {
  // An error that is not due to the recording shows again when the work runs without one.
  if (recording_ && std::this_thread::get_id() == recorder_) {
    recording_failed_ = true;
    return;
  }
  MutexLock lock(&mutex_);
  if (status_.ok()) status_ = std::move(status);
}

absl::Status CudaStream::status() const {
  MutexLock lock(&mutex_);
  return status_;
}

bool CudaStream::Check(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return true;
  Fail(CudaStatus(error, what));
  return false;
}

bool CudaStream::BeginRecording() {
  CHECK(!recording_);
  // Other threads may allocate meanwhile.
  if (!status().ok() || device_.Select() != cudaSuccess ||
      cudaStreamBeginCapture(handle_, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  recorder_ = std::this_thread::get_id();
  recording_failed_ = false;
  recording_ = true;
  return true;
}

std::unique_ptr<RecordedWork> CudaStream::EndRecording() {
  CHECK(recording_);
  recording_ = false;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  const bool made = cudaStreamEndCapture(handle_, &graph) == cudaSuccess && !recording_failed_ &&
                    cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess;
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (!made) {
    cudaGetLastError();  // clears it: the next launch check must not see it
    return nullptr;
  }
  return std::make_unique<CudaGraph>(executable, scratch_ == nullptr ? nullptr : scratch_->data());
}

bool CudaStream::Run(RecordedWork& work) {
  auto& graph = static_cast<CudaGraph&>(work);
  if (scratch_ != nullptr && scratch_->data() != graph.scratch()) return false;
  if (!Check(device_.Select(), "selecting the device")) return true;
  Check(cudaGraphLaunch(graph.handle(), handle_), "running recorded work");
  return true;
}

void* CudaStream::Scratch(int64_t bytes) {
  if (scratch_ != nullptr && scratch_->bytes() >= bytes) return scratch_->data();
  if (recording_) {
    recording_failed_ = true;
    return nullptr;
  }
  if (!Check(cudaStreamSynchronize(handle_), "waiting to grow scratch memory")) return nullptr;
  scratch_.reset();
  absl::StatusOr<std::unique_ptr<Buffer>> grown = device_.Allocate(bytes);
  if (!grown.ok()) {
    Fail(Annotate(grown.status(), "scratch memory of a stream"));
    return nullptr;
  }
  scratch_ = std::move(*grown);
  return scratch_->data();
}

bool HasWarpgroups(const CudaDevice& device) {
  static const bool built = absl::StrContains(MUSTER_CUDA_ARCHITECTURES, "90a");
  return built && device.compute_major() == 9;
}

AttentionPlans& CudaStream::attention_plans() {
  if (attention_plans_ == nullptr) attention_plans_ = std::make_unique<AttentionPlans>(handle_);
  return *attention_plans_;
}

}  // namespace muster::kernels::cuda

namespace muster::kernels {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal, const CudaOptions& options) {
  return cuda::CudaDevice::Make(ordinal, options);
}

}  // namespace muster::kernels
