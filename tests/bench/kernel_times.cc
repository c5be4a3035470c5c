#include "tests/bench/kernel_times.h"

#include <cupti.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

namespace muster {
namespace {

struct Record {
  uint64_t begin, end;
  std::string name;
};

// CUPTI's callbacks carry no context of ours.
std::vector<Record>* g_records = nullptr;

constexpr size_t kBufferBytes = size_t{4} << 20;

void CUPTIAPI Request(uint8_t** buffer, size_t* size, size_t* records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *records = 0;
}

void CUPTIAPI Complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* activity = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
    if (g_records == nullptr) continue;
    if (activity->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      // The fields that are read stand at the same place in every version of the record.
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(activity);
      g_records->push_back({kernel->start, kernel->end, kernel->name});
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(activity);
      g_records->push_back({copy->start, copy->end, "copy"});
    } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* set = reinterpret_cast<const CUpti_ActivityMemset4*>(activity);
      g_records->push_back({set->start, set->end, "zero"});
    }
  }
  std::free(buffer);
}

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};

bool Contains(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return name.find(part) != std::string::npos; });
}

KernelTimes Summarise(std::vector<Record> records) {
  std::sort(records.begin(), records.end(),
            [](const Record& a, const Record& b) { return a.begin < b.begin; });
  KernelTimes times;
  times.kernels = static_cast<int>(records.size());
  if (records.empty()) return times;
  uint64_t busy_until = records.front().begin;
  uint64_t idle = 0;
  for (const Record& record : records) {
    if (record.begin > busy_until) idle += record.begin - busy_until;
    busy_until = std::max(busy_until, record.end);
    const double seconds = static_cast<double>(record.end - record.begin) * 1e-9;
    times.seconds_by_kernel[record.name] += seconds;
    if (Contains(record.name, {"fmha", "sdpa", "flash", "Attention", "cudnn"})) {
      times.attention += seconds;
    } else if (Contains(record.name, {"nvjet", "gemm", "Gemm", "cutlass", "splitK", "cublas"})) {
      times.product += seconds;
    } else {
      times.bandwidth += seconds;
    }
  }
  times.idle = static_cast<double>(idle) * 1e-9;
  times.wall = static_cast<double>(busy_until - records.front().begin) * 1e-9;
  return times;
}

}  // namespace

bool MeasureKernels(const std::function<void()>& work, KernelTimes* times) {
  std::vector<Record> records;
  g_records = &records;
  bool ok = cuptiActivityRegisterCallbacks(Request, Complete) == CUPTI_SUCCESS;
  for (CUpti_ActivityKind kind : kKinds) ok = ok && cuptiActivityEnable(kind) == CUPTI_SUCCESS;
  if (ok) {
    work();
    ok = cuptiActivityFlushAll(1) == CUPTI_SUCCESS;
  }
  for (CUpti_ActivityKind kind : kKinds) cuptiActivityDisable(kind);
  g_records = nullptr;
  if (ok) *times = Summarise(std::move(records));
  return ok;
}

}  // namespace muster
