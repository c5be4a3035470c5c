// Times collectives of Communicator against the same calls of NCCL itself, one thread per GPU of
// this machine.
//
// Both enqueue the same call on equal streams, alternately, in batches between two events; the time
// of a round is that of its slowest rank. busbw as in nccl-tests (doc/PERFORMANCE.md): algorithm
// bandwidth times 2(n-1)/n for all-reduce, (n-1)/n for the others, so that it compares with a link.
// Every size is verified first, on integers in fp32, whose sums are exact in any order.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/time/time.h"
#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/device_cuda.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/nccl_library.h"
#include "tests/bench/collective_calls.h"
#include "tests/support/key_value_store.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

// One GPU, with a communicator of each kind.
class Rank {
 public:
  Rank(KeyValueStore& store, int rank, int ranks, int64_t bytes_max, int thread_blocks)
      : rank_(rank),
        ranks_(ranks),
        device_(Take(kernels::MakeCudaDevice(rank))),
        stream_(Take(device_->MakeStream({.high_priority = true}))),
        begin_(Take(device_->MakeEvent(true))),
        end_(Take(device_->MakeEvent(true))),
        memory_(Take(device_->Allocate(bytes_max))),
        nccl_(Take(NcclLibrary::Load())) {
    NcclOptions options;
    options.thread_blocks_max = thread_blocks;
    ours_ = Take(MakeNcclCommunicator(store, rank, ranks, *device_, options));
    MakeRaw(store, thread_blocks);
  }
  ~Rank() { nccl_.CommAbort(raw_); }

  Communicator& ours() { return *ours_; }

  void Verify(Operation operation, int64_t elements, bool raw) {
    std::vector<float> host(static_cast<size_t>(elements));
    for (int64_t i = 0; i < elements; ++i) host[static_cast<size_t>(i)] = ValueOf(rank_, i);
    kernels::Copy(*stream_, Tensor(host.data(), DType::kF32, {elements}), Whole(elements));
    Issue(operation, elements, raw);
    kernels::Copy(*stream_, Whole(elements), Tensor(host.data(), DType::kF32, {elements}));
    CHECK_OK(stream_->Synchronize());
    for (int64_t i = 0; i < elements; ++i) {
      const float expected = ExpectedOf(operation, rank_, ranks_, i, elements);
      if (expected < 0) continue;
      CHECK(host[static_cast<size_t>(i)] == expected)
          << NameOf(operation) << (raw ? " raw" : " ours") << ", rank " << rank_ << ", element "
          << i << " of " << elements << ": " << host[static_cast<size_t>(i)] << ", expected "
          << expected;
    }
  }

  // Seconds of one call, over `calls` of them.
  double Time(Operation operation, int64_t elements, bool raw, int calls) {
    CHECK_OK(ours_->Barrier());
    Issue(operation, elements, raw);  // a barrier
    stream_->Record(*begin_);
    for (int i = 0; i < calls; ++i) Issue(operation, elements, raw);
    stream_->Record(*end_);
    CHECK_OK(stream_->Synchronize());
    return end_->SecondsSince(*begin_) / calls;
  }

 private:
  void MakeRaw(KeyValueStore& store, int thread_blocks) {
    ncclUniqueId id;
    if (rank_ == 0) {
      CHECK_EQ(nccl_.GetUniqueId(&id), ncclSuccess);
      CHECK_OK(store.Put("raw", std::string(id.internal, sizeof(id.internal))));
    } else {
      Take(store.Get("raw", absl::Minutes(1))).copy(id.internal, sizeof(id.internal));
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (thread_blocks > 0) config.maxCTAs = thread_blocks;
    CHECK_EQ(cudaSetDevice(rank_), cudaSuccess);
    CHECK_EQ(nccl_.CommInitRankConfig(&raw_, ranks_, id, rank_, &config), ncclSuccess);
  }
  Tensor Whole(int64_t elements) { return Tensor(memory_->data(), DType::kF32, {elements}); }

  void Issue(Operation operation, int64_t elements, bool raw) {
    const Tensor data = Whole(elements);
    if (!raw) return parallel::Issue(*ours_, *stream_, operation, data);
    const cudaStream_t stream = kernels::cuda::CudaStream::Of(*stream_).handle();
    float* const whole = data.f32();
    float* const own = whole + rank_ * (elements / ranks_);
    const auto all = static_cast<size_t>(elements);
    const size_t part = all / static_cast<size_t>(ranks_);
    ncclResult_t result = ncclSuccess;
    if (operation == Operation::kAllReduce) {
      result = nccl_.AllReduce(whole, whole, all, ncclFloat32, ncclSum, raw_, stream);
    } else if (operation == Operation::kAllGather) {
      result = nccl_.AllGather(own, whole, part, ncclFloat32, raw_, stream);
    } else {
      result = nccl_.ReduceScatter(whole, own, part, ncclFloat32, ncclSum, raw_, stream);
    }
    CHECK_EQ(result, ncclSuccess);
  }

  const int rank_;
  const int ranks_;
  const std::unique_ptr<kernels::Device> device_;
  const std::unique_ptr<kernels::Stream> stream_;
  const std::unique_ptr<kernels::Event> begin_, end_;
  const std::unique_ptr<kernels::Buffer> memory_;
  const NcclLibrary nccl_;
  std::unique_ptr<Communicator> ours_;
  ncclComm_t raw_ = nullptr;
};

struct Flags {
  int ranks = 0;
  int rounds = 20;
  int thread_blocks = 0;
  std::vector<int64_t> mib = {1, 8, 64, 1024};
};

// times[rank][raw] of one round.
void Report(Operation operation, int64_t bytes, int ranks,
            const std::vector<std::vector<std::vector<double>>>& by_rank, int rounds) {
  double seconds[2];
  double spread[2];
  for (int raw = 0; raw < 2; ++raw) {
    std::vector<double> slowest(static_cast<size_t>(rounds));
    for (const auto& times : by_rank) {
      for (size_t round = 0; round < slowest.size(); ++round) {
        slowest[round] = std::max(slowest[round], times[static_cast<size_t>(raw)][round]);
      }
    }
    seconds[raw] = Median(slowest);
    spread[raw] = (*std::max_element(slowest.begin(), slowest.end()) -
                   *std::min_element(slowest.begin(), slowest.end())) /
                  seconds[raw];
  }
  const double steps = operation == Operation::kAllReduce ? 2 : 1;
  const double moved = static_cast<double>(bytes) * steps * (ranks - 1) / ranks;
  std::printf(
      "| %s | %lld MiB | %.1f us, %.1f GB/s | %.1f us, %.1f GB/s | **%.3f** | %.1f / %.1f %% |\n",
      NameOf(operation), static_cast<long long>(bytes >> 20), seconds[0] * 1e6,
      moved / seconds[0] * 1e-9, seconds[1] * 1e6, moved / seconds[1] * 1e-9,
      seconds[1] / seconds[0], spread[0] * 100, spread[1] * 100);
  std::fflush(stdout);
}

int Run(const Flags& flags) {
  int ranks = flags.ranks;
  if (ranks == 0) {
    while (kernels::MakeCudaDevice(ranks).ok()) ++ranks;
  }
  if (ranks < 2) {
    std::printf("NO TWO GPUS, NOTHING MEASURED\n");
    return 0;
  }
  SetNcclEnvironment({});
  const int64_t bytes_max = *std::max_element(flags.mib.begin(), flags.mib.end()) << 20;
  testing::MemoryKeyValueStore store;
  std::printf(
      "%d GPUs, fp32, in place; median of %d rounds, slowest rank of each; spread = (max - "
      "min) / median\n\n| call | size | ours | NCCL raw | ratio | spread "
      "|\n|---|---|---|---|---|---|\n",
      ranks, flags.rounds);
  std::vector<std::vector<std::vector<double>>> times(static_cast<size_t>(ranks),
                                                      std::vector<std::vector<double>>(2));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank self(store, rank, ranks, bytes_max, flags.thread_blocks);
      for (const int64_t mib : flags.mib) {
        const int64_t elements = (mib << 20) / 4 / ranks * ranks;
        // About 20 ms a round, so that the launches do not count.
        const int calls = static_cast<int>(std::clamp<int64_t>(2048 / mib, 4, 200));
        for (const Operation operation : kOperations) {
          for (const bool raw : {false, true}) {
            if (mib <= 64) self.Verify(operation, elements, raw);
            self.Time(operation, elements, raw, calls);
          }
          auto& mine = times[static_cast<size_t>(rank)];
          mine = {{}, {}};
          for (int round = 0; round < flags.rounds; ++round) {
            for (const bool raw : {false, true}) {
              mine[raw].push_back(self.Time(operation, elements, raw, calls));
            }
          }
          CHECK_OK(self.ours().Barrier());
          if (rank == 0) Report(operation, mib << 20, ranks, times, flags.rounds);
          CHECK_OK(self.ours().Barrier());
        }
      }
      // A rank that left would fail the calls of the others.
      CHECK_OK(self.ours().Barrier());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace
}  // namespace muster::parallel

int main(int argc, char** argv) {
  CLI::App app("Collectives through our Communicator against NCCL called raw.");
  muster::parallel::Flags flags;
  app.add_option("--ranks", flags.ranks, "GPUs; 0 = all")->capture_default_str();
  app.add_option("--rounds", flags.rounds)->check(CLI::Range(3, 1000))->capture_default_str();
  app.add_option("--thread-blocks", flags.thread_blocks, "most CTAs of a collective; 0 = NCCL's")
      ->capture_default_str();
  app.add_option("--mib", flags.mib, "sizes")->delimiter(',')->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return muster::parallel::Run(flags);
}
