// The host device: buffers from the heap, eager and threaded streams, events.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/device/thread_pool.h"

namespace muster::kernels {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kHugePage = int64_t{2} << 20;

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

class HostBuffer : public Buffer {
 public:
  HostBuffer(void* memory, int64_t bytes, std::atomic<int64_t>& counter)
      : memory_(memory), bytes_(bytes), counter_(counter) {
    counter_ += bytes_;
  }
  ~HostBuffer() override { counter_ -= bytes_; }
  void* data() override { return memory_.get(); }
  int64_t bytes() const override { return bytes_; }

 private:
  std::unique_ptr<void, FreeDeleter> memory_;
  int64_t bytes_;
  std::atomic<int64_t>& counter_;
};

// A line of /proc/meminfo in bytes, or the largest int64_t when the system does not say.
int64_t MemoryInfo(absl::string_view line) {
  std::ifstream file("/proc/meminfo");
  std::string key;
  int64_t kib = 0;
  while (file >> key >> kib) {
    if (key == line) return kib * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::numeric_limits<int64_t>::max();
}

int64_t AvailableBytes() { return MemoryInfo("MemAvailable:"); }

// Lowers `memory` to what this process's control group (version 2) allows.
void ApplyControlGroup(DeviceMemory& memory) {
  std::ifstream membership("/proc/self/cgroup");
  std::string line;
  while (std::getline(membership, line) && line.rfind("0::", 0) != 0) {
  }
  if (!membership) return;
  const std::string folder = "/sys/fs/cgroup" + line.substr(3) + "/";
  int64_t limit = 0, used = 0;
  if (!(std::ifstream(folder + "memory.max") >> limit) || limit >= memory.total ||
      !(std::ifstream(folder + "memory.current") >> used)) {
    return;
  }
  // Cached files count as used, but give way.
  std::ifstream statistics(folder + "memory.stat");
  std::string key;
  for (int64_t bytes = 0; statistics >> key >> bytes;) {
    if (key == "active_file" || key == "inactive_file") used -= bytes;
  }
  memory.total = limit;
  memory.free = std::clamp<int64_t>(limit - used, 0, memory.free);
}

// Linux promises more memory than it has and kills a process that uses it. Refusing here reports
// the error where it is caused.
absl::StatusOr<std::unique_ptr<Buffer>> AllocateHostMemory(int64_t bytes,
                                                           std::atomic<int64_t>& counter) {
  CHECK_GE(bytes, 0);
  const int64_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const int64_t available = bytes >= kHugePage ? AvailableBytes() : bytes;
  void* memory = nullptr;
  if (bytes > available || posix_memalign(&memory, alignment, std::max(bytes, kAlignment)) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host memory: asked for ", bytes, " bytes, available ", AvailableBytes()));
  }
  // Huge pages mean fewer TLB misses in the GEMMs; the result is the same without them.
  if (bytes >= kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return std::make_unique<HostBuffer>(memory, bytes, counter);
}

class HostEvent : public Event {
 public:
  using Clock = std::chrono::steady_clock;

  // Shared with the streams that still have to reach it.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    uint64_t finished = 0;
    Clock::time_point finished_at;

    uint64_t Record() {
      std::lock_guard<std::mutex> lock(mutex);
      return ++recorded;
    }
    uint64_t LastRecorded() {
      std::lock_guard<std::mutex> lock(mutex);
      return recorded;
    }
    void Finish(uint64_t ticket) {
      std::lock_guard<std::mutex> lock(mutex);
      if (ticket <= finished) return;
      finished = ticket;
      finished_at = Clock::now();
      changed.notify_all();
    }
    void WaitFor(uint64_t ticket) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return finished >= ticket; });
    }
  };

  void Synchronize() override { state_->WaitFor(state_->LastRecorded()); }
  bool finished() override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->finished == state_->recorded;
  }
  double SecondsSince(const Event& earlier) const override {
    const auto& other = static_cast<const HostEvent&>(earlier);
    return std::chrono::duration<double>(FinishedAt() - other.FinishedAt()).count();
  }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  Clock::time_point FinishedAt() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    CHECK(state_->finished == state_->recorded && state_->finished > 0)
        << "the event has not been recorded and finished";
    return state_->finished_at;
  }
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class HostStream : public Stream {
 public:
  explicit HostStream(Device& device) : device_(device) {}
  Device& device() override { return device_; }
  void Record(Event& event) override {
    std::shared_ptr<HostEvent::State> state = static_cast<HostEvent&>(event).state();
    const uint64_t ticket = state->Record();
    Enqueue([state = std::move(state), ticket] { state->Finish(ticket); });
  }
  void Wait(Event& event) override {
    std::shared_ptr<HostEvent::State> state = static_cast<HostEvent&>(event).state();
    const uint64_t ticket = state->LastRecorded();
    Enqueue([state = std::move(state), ticket] { state->WaitFor(ticket); });
  }
  void Fail(absl::Status status) override {
    std::lock_guard<std::mutex> lock(status_mutex_);
    if (status_.ok()) status_ = std::move(status);
  }
  absl::Status status() const override {
    std::lock_guard<std::mutex> lock(status_mutex_);
    return status_;
  }

 protected:
  absl::Status TakeStatus() {
    std::lock_guard<std::mutex> lock(status_mutex_);
    return std::exchange(status_, absl::OkStatus());
  }

 private:
  Device& device_;
  mutable std::mutex status_mutex_;
  absl::Status status_;
};

class EagerStream : public HostStream {
 public:
  using HostStream::HostStream;
  void Enqueue(absl::AnyInvocable<void()> work) override { work(); }
  absl::Status Synchronize() override { return TakeStatus(); }
};

class ThreadedStream : public HostStream {
 public:
  explicit ThreadedStream(Device& device) : HostStream(device), thread_([this] { Work(); }) {}
  // Finishes what was enqueued.
  ~ThreadedStream() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Enqueue(absl::AnyInvocable<void()> work) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  absl::Status Synchronize() override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return queue_.empty() && !running_; });
    }
    return TakeStatus();
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      absl::AnyInvocable<void()> work = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      lock.unlock();
      work();
      work = nullptr;  // what it captured is freed before anyone learns that it is done
      lock.lock();
      running_ = false;
      if (queue_.empty()) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<absl::AnyInvocable<void()>> queue_;
  bool running_ = false;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the members above
};

class HostDevice : public Device {
 public:
  explicit HostDevice(int threads) : pool_(threads) {}
  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string name() const override { return "cpu"; }
  int threads() const override { return pool_.threads(); }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(int64_t bytes) override {
    return AllocateHostMemory(bytes, allocated_bytes_);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t bytes) override {
    return AllocateHostMemory(bytes, host_allocated_bytes_);
  }
  absl::StatusOr<DeviceMemory> Memory() override {
    DeviceMemory memory = {MemoryInfo("MemTotal:"), AvailableBytes()};
    if (memory.total == std::numeric_limits<int64_t>::max()) {
      return absl::UnavailableError("/proc/meminfo does not say how much memory there is");
    }
    ApplyControlGroup(memory);
    return memory;
  }
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream(StreamOptions options) override {
    if (options.threaded) return std::make_unique<ThreadedStream>(*this);
    return std::make_unique<EagerStream>(*this);
  }
  absl::StatusOr<std::unique_ptr<Event>> MakeEvent(bool timing) override {
    return std::make_unique<HostEvent>();
  }
  ThreadPool& pool() { return pool_; }

 private:
  ThreadPool pool_;
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(int threads) { return std::make_unique<HostDevice>(threads); }

ThreadPool& PoolOf(Device& device) {
  CHECK(device.kind() == DeviceKind::kCpu) << "a host op on " << device.name();
  return static_cast<HostDevice&>(device).pool();
}

float* ThreadScratch(int64_t floats) {
  struct Memory {
    std::unique_ptr<float, FreeDeleter> data;
    int64_t floats = 0;
  };
  thread_local Memory memory;
  if (memory.floats < floats) {
    void* data = nullptr;
    CHECK(posix_memalign(&data, 64, floats * sizeof(float)) == 0) << floats << " floats of scratch";
    memory.data.reset(static_cast<float*>(data));
    memory.floats = floats;
  }
  return memory.data.get();
}

#ifndef MUSTER_KERNELS_CUDA
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal, const CudaOptions&) {
  return absl::UnimplementedError(absl::StrCat(
      "cuda:", ordinal, ": this build has no CUDA engine (configure with MUSTER_CUDA=ON)"));
}
#endif

}  // namespace muster::kernels
