#include "kernels/device/device_trace.h"

#include "absl/status/status.h"

#if defined(MUSTER_KERNELS_CUDA) && __has_include(<cupti.h>)

#include <cupti.h>
#include <cxxabi.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/shared_library.h"
#include "base/status_macros.h"

namespace muster::kernels {
namespace {

constexpr size_t kBufferBytes = size_t{4} << 20;
// MEMCPY2: copies between devices, which MEMCPY leaves out.
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
                                         CUPTI_ACTIVITY_KIND_MEMSET};

struct Cupti {
  decltype(cuptiActivityRegisterCallbacks)* RegisterCallbacks = nullptr;
  decltype(cuptiActivityEnable)* Enable = nullptr;
  decltype(cuptiActivityDisable)* Disable = nullptr;
  decltype(cuptiActivityFlushAll)* FlushAll = nullptr;
  decltype(cuptiActivityGetNextRecord)* GetNextRecord = nullptr;
  decltype(cuptiGetTimestamp)* GetTimestamp = nullptr;
};

absl::StatusOr<Cupti> Load() {
  const std::string name = absl::StrCat("libcupti.so.", CUPTI_API_VERSION >= 130000 ? 13 : 12);
  auto library = SharedLibrary::Open(name, NvidiaLibraryDirectories());
  if (!library.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat(library.status().message(), ". Install nvidia-cuda-cupti (pip) or CUDA"));
  }
  Cupti cupti;
  RETURN_IF_ERROR(library->Resolve("cuptiActivityRegisterCallbacks", cupti.RegisterCallbacks));
  RETURN_IF_ERROR(library->Resolve("cuptiActivityEnable", cupti.Enable));
  RETURN_IF_ERROR(library->Resolve("cuptiActivityDisable", cupti.Disable));
  RETURN_IF_ERROR(library->Resolve("cuptiActivityFlushAll", cupti.FlushAll));
  RETURN_IF_ERROR(library->Resolve("cuptiActivityGetNextRecord", cupti.GetNextRecord));
  RETURN_IF_ERROR(library->Resolve("cuptiGetTimestamp", cupti.GetTimestamp));
  return cupti;
}

// CUPTI's callbacks carry no context of ours, and it may call them after a recording has ended.
// Hence this state belongs to the process: CUPTI's functions, and the trace that is being recorded.
struct Session {
  Mutex mutex;
  Cupti cupti ABSL_GUARDED_BY(mutex);
  std::shared_ptr<Trace> trace ABSL_GUARDED_BY(mutex);  // null: none
  int64_t to_unix ABSL_GUARDED_BY(mutex) = 0;           // from CUPTI's nanoseconds
};
Session& TheSession() {
  static Session& session = *new Session;
  return session;
}

std::string Demangled(const char* name) {
  int failed = 0;
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &failed);
  if (failed != 0 || plain == nullptr) return name;
  std::string text = plain;
  std::free(plain);
  return text;
}

// `muster profile` recognises copies by these names.
std::string CopyName(uint64_t bytes, uint8_t kind) {
  const char* where = kind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? ", host to device"
                      : kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? ", device to host"
                      : kind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD ? ", device to device"
                      : kind == CUPTI_ACTIVITY_MEMCPY_KIND_PTOP ? ", between devices"
                                                                : "";
  return absl::StrCat("copy of ", bytes, " bytes", where);
}

void CUPTIAPI GiveBuffer(uint8_t** buffer, size_t* size, size_t* records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *records = 0;
}

void CUPTIAPI TakeBuffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  Session& session = TheSession();
  MutexLock lock(&session.mutex);
  const auto add = [&session](uint32_t stream, const std::string& name, uint64_t begin,
                              uint64_t end) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (begin == 0 || end == 0) return;  // it had not run when the records were flushed
    session.trace->Add(absl::StrCat("device, stream ", stream), name,
                       static_cast<int64_t>(begin) + session.to_unix,
                       static_cast<int64_t>(end) + session.to_unix);
  };
  CUpti_Activity* activity = nullptr;
  while (session.trace != nullptr &&
         session.cupti.GetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
    // The fields that are read have the same offsets in every version of a record.
    if (activity->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(activity);
      add(kernel->streamId, Demangled(kernel->name), kernel->start, kernel->end);
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(activity);
      add(copy->streamId, CopyName(copy->bytes, copy->copyKind), copy->start, copy->end);
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(activity);
      add(copy->streamId, CopyName(copy->bytes, CUPTI_ACTIVITY_MEMCPY_KIND_PTOP), copy->start,
          copy->end);
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* fill = reinterpret_cast<const CUpti_ActivityMemset4*>(activity);
      add(fill->streamId, absl::StrCat("fill of ", fill->bytes, " bytes"), fill->start, fill->end);
    }
  }
  std::free(buffer);
}

class CuptiTrace : public DeviceTrace {
 public:
  explicit CuptiTrace(const Cupti& cupti) : cupti_(cupti) {}
  ~CuptiTrace() override {
    // Without the session's lock, which TakeBuffer takes: the flush calls it.
    cupti_.FlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    for (const CUpti_ActivityKind kind : kKinds) cupti_.Disable(kind);
    Session& session = TheSession();
    MutexLock lock(&session.mutex);
    session.trace = nullptr;
  }

 private:
  const Cupti cupti_;
};

absl::Status Refused(const char* what, CUptiResult result) {
  return absl::FailedPreconditionError(
      absl::StrCat("CUPTI refuses ", what, " (error ", static_cast<int>(result),
                   "): another profiler may have the device, or its driver may allow profiling to "
                   "administrators alone (NVreg_RestrictProfilingToAdminUsers)"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceTrace>> DeviceTrace::Start(std::shared_ptr<Trace> trace) {
  ASSIGN_OR_RETURN(const Cupti cupti, Load());
  {
    Session& session = TheSession();
    MutexLock lock(&session.mutex);
    if (session.trace != nullptr) {
      return absl::FailedPreconditionError("another trace of this process is under way");
    }
    uint64_t now = 0;
    const CUptiResult result = cupti.GetTimestamp(&now);
    if (result != CUPTI_SUCCESS) return Refused("its clock", result);
    session.to_unix = absl::GetCurrentTimeNanos() - static_cast<int64_t>(now);
    session.cupti = cupti;
    session.trace = std::move(trace);
  }
  auto started = std::make_unique<CuptiTrace>(cupti);  // its destructor undoes what follows
  const CUptiResult registered = cupti.RegisterCallbacks(GiveBuffer, TakeBuffer);
  if (registered != CUPTI_SUCCESS) return Refused("to give records", registered);
  for (const CUpti_ActivityKind kind : kKinds) {
    const CUptiResult enabled = cupti.Enable(kind);
    if (enabled != CUPTI_SUCCESS) return Refused("to record", enabled);
  }
  return started;
}

}  // namespace muster::kernels

#else

namespace muster::kernels {

absl::StatusOr<std::unique_ptr<DeviceTrace>> DeviceTrace::Start(std::shared_ptr<Trace>) {
  return absl::UnimplementedError("this build has no CUPTI");
}

}  // namespace muster::kernels

#endif
