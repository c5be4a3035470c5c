// Threads of one host device, for parallel loops whose results do not depend on their number.
#ifndef MUSTER_KERNELS_DEVICE_THREAD_POOL_H_
#define MUSTER_KERNELS_DEVICE_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/device/device.h"

namespace muster::kernels {

// Owns threads - 1 threads; the caller of Run is one more. A pool per device rather than OpenMP's
// one team per calling thread: several devices (local ranks) share a process, each with its own
// width, and ThreadSanitizer can follow every hand-over.
// Thread-safe; a second caller, or a loop inside a loop, runs alone in its own thread.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  // body(chunk) for every chunk in [0, chunks), each once, in any order and on any thread; returns
  // when all are done. What a chunk is must not depend on threads().
  void Run(int64_t chunks, absl::FunctionRef<void(int64_t chunk)> body);
  // Run over [0, n) in ranges of `range` elements, of which the last may be shorter:
  // body(begin, count). `range` must not depend on threads().
  template <typename Body>
  void RunRanges(int64_t n, int64_t range, Body body) {
    Run((n + range - 1) / range, [&](int64_t i) {
      const int64_t begin = i * range;
      body(begin, n - begin < range ? n - begin : range);
    });
  }

 private:
  void Work();
  void TakeChunks();

  std::mutex caller_;  // held by the one caller whose loop is shared out
  // The open loop. Written by the caller only while open_ is false and active_ is 0.
  const absl::FunctionRef<void(int64_t)>* body_ = nullptr;
  int64_t chunks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> open_{false};
  std::atomic<int> active_{0};  // workers that may be looking at the loop
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_THREAD_POOL_H_
