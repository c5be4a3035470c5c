#include "kernels/device/thread_pool.h"

#include "base/check.h"
#include "kernels/device/gnu_openmp.h"

namespace muster::kernels {
namespace {

// About 20 us: longer than the gap between two ops of a step, and short enough not to disturb other
// processes.
constexpr int kSpins = 2000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  CHECK_GE(threads, 1);
  workers_.reserve(threads - 1);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::TakeChunks() {
  for (;;) {
    const int64_t chunk = next_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= chunks_) return;
    (*body_)(chunk);
  }
}

void ThreadPool::Run(int64_t chunks, absl::FunctionRef<void(int64_t)> body) {
  std::unique_lock<std::mutex> lock(caller_, std::defer_lock);
  if (workers_.empty() || chunks <= 1 || !lock.try_lock()) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
    return;
  }
  body_ = &body;
  chunks_ = chunks;
  next_.store(0, std::memory_order_relaxed);
  open_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  TakeChunks();
  // A worker either registers in active_ before it reads open_ == true, and is waited for, or it
  // reads false. So a worker that the system has not scheduled yet does not delay the caller.
  open_ = false;
  for (int spins = 0; active_ != 0; ++spins) {
    if (spins < kSpins) {
      Pause();
    } else {
      const int active = active_;
      if (active != 0) active_.wait(active);
    }
  }
}

void ThreadPool::Work() {
  // oneDNN calls of this thread stay in it.
  omp_set_num_threads(1);
  uint32_t seen = 0;
  while (!stop_) {
    for (int spins = 0; generation_ == seen && spins < kSpins; ++spins) Pause();
    generation_.wait(seen);
    seen = generation_;
    ++active_;
    if (open_) TakeChunks();
    if (--active_ == 0) active_.notify_one();
  }
}

}  // namespace muster::kernels
