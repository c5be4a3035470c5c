// How NCCL communicators are aborted, tested without a GPU.
#include <gtest/gtest.h>

#include <vector>

#include "base/mutex.h"
#include "parallel/comm/nccl_library.h"

namespace muster::parallel {
namespace {

// Simulates a device on which the kernels of `expected` communicators wait for a dead peer. An
// abort ends by freeing memory, which waits until all communicators have been told to end.
struct StuckDevice {
  Mutex mutex;
  int expected ABSL_GUARDED_BY(mutex) = 0;
  int told ABSL_GUARDED_BY(mutex) = 0;
  int freed ABSL_GUARDED_BY(mutex) = 0;
};

ncclResult_t AbortOnStuckDevice(ncclComm_t comm) {
  auto& device = *reinterpret_cast<StuckDevice*>(comm);
  MutexLock lock(&device.mutex);
  ++device.told;
  auto drained = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return device.told == device.expected; };
  if (device.mutex.AwaitWithTimeout(Condition(&drained), absl::Seconds(30))) ++device.freed;
  return ncclSuccess;
}

TEST(NcclLibrary, AbortAll_TellsEveryCommunicatorToEndBeforeItWaitsForAny) {
  NcclLibrary nccl;
  nccl.CommAbort = AbortOnStuckDevice;
  StuckDevice device;
  {
    MutexLock lock(&device.mutex);
    device.expected = 3;
  }
  nccl.AbortAll(std::vector<ncclComm_t>(3, reinterpret_cast<ncclComm_t>(&device)));
  MutexLock lock(&device.mutex);
  EXPECT_EQ(device.freed, 3);
}

}  // namespace
}  // namespace muster::parallel
