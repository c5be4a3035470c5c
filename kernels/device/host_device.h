// What host ops need of the host device.
#ifndef MUSTER_KERNELS_DEVICE_HOST_DEVICE_H_
#define MUSTER_KERNELS_DEVICE_HOST_DEVICE_H_

#include <cstdint>
#include <utility>

#include "absl/functional/function_ref.h"
#include "kernels/device/device.h"
#include "kernels/device/thread_pool.h"

namespace muster::kernels {

// Runs `work(pool)` on a host stream, with the threads of its device.
// Requires: the stream's device was made by MakeCpuDevice.
template <typename Work>
void EnqueueOnHost(Stream& stream, Work work);

ThreadPool& PoolOf(Device& device);

template <typename Work>
void EnqueueOnHost(Stream& stream, Work work) {
  ThreadPool& pool = PoolOf(stream.device());
  stream.Enqueue([&pool, work = std::move(work)] { work(pool); });
}

// 64-byte aligned memory of the calling thread, at least `floats` long; its contents last until the
// thread's next call. Grows to the largest size asked for and stays.
float* ThreadScratch(int64_t floats);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_HOST_DEVICE_H_
