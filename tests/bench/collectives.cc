// Times collectives of the host communicators among ranks that are threads of this process: `local`
// (shared memory) and TCP (over loopback), by operation, ranks and size. Each result is verified,
// then timed: the median of several rounds, each as slow as its slowest rank.
//
// The bus bandwidth is what every rank must take in from others at least, per second: (n-1)/n of
// the data, for an all-reduce twice. The ceiling is measured in the same run with as many threads
// at once: for `local` memcpy between two buffers of that size, for TCP a stream from each rank to
// the next through a loopback TCP connection. With more ranks than cores, both share the cores.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/check.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "tests/support/key_value_store.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr int kRounds = 15;
constexpr int kTouch = 2;  // rounds before the timed ones, which touch memory and connections

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Median over the rounds of the time from the common start to the last thread's end.
double MedianSeconds(int threads, const std::function<void(int thread)>& round) {
  std::vector<double> seconds;
  double begin = 0;
  std::barrier start(threads + 1), end(threads + 1);
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      for (int i = 0; i < kTouch + kRounds; ++i) {
        start.arrive_and_wait();
        round(t);
        end.arrive_and_wait();
      }
    });
  }
  for (int i = 0; i < kTouch + kRounds; ++i) {
    begin = Now();
    start.arrive_and_wait();
    end.arrive_and_wait();
    if (i >= kTouch) seconds.push_back(Now() - begin);
  }
  for (std::thread& thread : running) thread.join();
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

// Bytes per second and thread.
double MemcpyCeiling(int threads, size_t bytes) {
  std::vector<std::vector<char>> from(static_cast<size_t>(threads), std::vector<char>(bytes, 1));
  std::vector<std::vector<char>> to(static_cast<size_t>(threads), std::vector<char>(bytes));
  return static_cast<double>(bytes) / MedianSeconds(threads, [&](int t) {
           std::memcpy(to[static_cast<size_t>(t)].data(), from[static_cast<size_t>(t)].data(),
                       bytes);
         });
}

// A connected pair: {sends, receives}.
std::pair<int, int> Loopback() {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in here = {};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(here);
  CHECK_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&here), size), 0);
  CHECK_EQ(::listen(listener, 1), 0);
  CHECK_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&here), &size), 0);
  const int sends = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_EQ(::connect(sends, reinterpret_cast<sockaddr*>(&here), size), 0);
  const int receives = ::accept(listener, nullptr, nullptr);
  CHECK(receives >= 0);
  ::close(listener);
  return {sends, receives};
}

double LoopbackCeiling(int ranks, size_t bytes) {
  std::vector<std::pair<int, int>> links;
  for (int i = 0; i < ranks; ++i) links.push_back(Loopback());
  std::vector<std::vector<char>> memory(static_cast<size_t>(2 * ranks), std::vector<char>(bytes));
  // Threads 0..n-1 send, n..2n-1 receive: a rank does both at once.
  const double seconds = MedianSeconds(2 * ranks, [&](int t) {
    const bool sends = t < ranks;
    const auto& link = links[static_cast<size_t>(t % ranks)];
    char* data = memory[static_cast<size_t>(t)].data();
    for (size_t done = 0; done < bytes;) {
      const ssize_t moved = sends ? ::send(link.first, data + done, bytes - done, MSG_NOSIGNAL)
                                  : ::recv(link.second, data + done, bytes - done, 0);
      CHECK(moved > 0);
      done += static_cast<size_t>(moved);
    }
  });
  for (const auto& [sends, receives] : links) {
    ::close(sends);
    ::close(receives);
  }
  return static_cast<double>(bytes) / seconds;
}

std::vector<std::unique_ptr<Communicator>> MakeRanks(bool tcp, int size) {
  if (!tcp) return MakeLocalCommunicators(size, absl::Minutes(5));
  testing::MemoryKeyValueStore store;
  std::vector<std::unique_ptr<Communicator>> ranks(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto made = MakeTcpCommunicator(store, rank, size, TcpOptions());
      CHECK_OK(made);
      ranks[static_cast<size_t>(rank)] = *std::move(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

struct Operation {
  const char* name;
  double volume;  // in units of (n-1)/n of the data
  void (*run)(Communicator&, kernels::Stream&, Tensor);
};

constexpr Operation kOperations[] = {
    {"all-reduce", 2,
     [](Communicator& c, kernels::Stream& s, Tensor t) { c.AllReduce(s, t, ReduceOp::kSum); }},
    {"reduce-scatter", 1,
     [](Communicator& c, kernels::Stream& s, Tensor t) { c.ReduceScatter(s, t, ReduceOp::kSum); }},
    {"all-gather", 1, [](Communicator& c, kernels::Stream& s, Tensor t) { c.AllGather(s, t); }},
};

class Ranks {
 public:
  Ranks(bool tcp, int size, int64_t elements)
      : elements_(elements), communicators_(MakeRanks(tcp, size)) {
    for (int rank = 0; rank < size; ++rank) {
      devices_.push_back(kernels::MakeCpuDevice(1));
      auto stream = devices_.back()->MakeStream();
      CHECK_OK(stream);
      streams_.push_back(*std::move(stream));
      data_.emplace_back(static_cast<size_t>(elements));
    }
  }

  void Run(const Operation& operation, int rank) {
    const auto r = static_cast<size_t>(rank);
    operation.run(*communicators_[r], *streams_[r],
                  Tensor(data_[r].data(), DType::kF32, {elements_}));
    CHECK_OK(streams_[r]->Synchronize());
  }

  // Rank r's data are r + 1 everywhere.
  void Verify(const Operation& operation) {
    const int size = static_cast<int>(data_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<float>& data = data_[static_cast<size_t>(rank)];
        std::fill(data.begin(), data.end(), static_cast<float>(rank + 1));
        Run(operation, rank);
        const int64_t part = elements_ / size;
        const float sum = static_cast<float>(size * (size + 1) / 2);
        const bool gathers = operation.name == std::string("all-gather");
        const bool scatters = operation.name == std::string("reduce-scatter");
        for (int64_t i = 0; i < elements_; ++i) {
          if (scatters && i / part != rank) continue;
          const float expected = gathers ? static_cast<float>(i / part + 1) : sum;
          CHECK(data[static_cast<size_t>(i)] == expected) << operation.name << " at " << i;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const int64_t elements_;
  std::vector<std::unique_ptr<kernels::Device>> devices_;
  std::vector<std::unique_ptr<kernels::Stream>> streams_;
  std::vector<std::vector<float>> data_;
  std::vector<std::unique_ptr<Communicator>> communicators_;  // destroyed first
};

void Report(bool tcp, int size, int64_t bytes) {
  const int64_t elements = bytes / static_cast<int64_t>(sizeof(float)) / size * size;
  const double ceiling = tcp ? LoopbackCeiling(size, static_cast<size_t>(bytes))
                             : MemcpyCeiling(size, static_cast<size_t>(bytes));
  for (const Operation& operation : kOperations) {
    Ranks ranks(tcp, size, elements);
    ranks.Verify(operation);
    const double seconds = MedianSeconds(size, [&](int rank) { ranks.Run(operation, rank); });
    const double volume = operation.volume * static_cast<double>(elements * 4) * (size - 1) / size;
    const double rate = volume / seconds;
    std::printf("| %-5s | %-14s | %5d | %8.2f | %10.3f | %8.2f | %8.2f | %5.2f |\n",
                tcp ? "tcp" : "local", operation.name, size, static_cast<double>(bytes) / (1 << 20),
                1e3 * seconds, rate / 1e9, ceiling / 1e9, rate / ceiling);
    std::fflush(stdout);
  }
}

int Main() {
  std::printf("%d cores; GB/s per rank; median of %d rounds\n",
              static_cast<int>(std::thread::hardware_concurrency()), kRounds);
  std::printf("| %-5s | %-14s | %5s | %8s | %10s | %8s | %8s | %5s |\n", "", "operation", "ranks",
              "MiB", "ms", "bus GB/s", "ceiling", "ratio");
  std::printf(
      "|-------|----------------|-------|----------|------------|----------|----------|-------|\n");
  for (const bool tcp : {false, true}) {
    for (const int size : {2, 3, 4}) {
      for (const int64_t bytes : {int64_t{64} << 10, int64_t{1} << 20, int64_t{16} << 20}) {
        Report(tcp, size, bytes);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace muster::parallel

int main() { return muster::parallel::Main(); }
