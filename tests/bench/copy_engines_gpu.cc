// Times collectives by copy engines (parallel/comm/peer_group.h) against NCCL's, by the same
// communicator: the former on memory that the ranks share, the latter on memory that they do not.
// One process per GPU, fp32, in place. First alone, on a computing stream; then on a stream of high
// priority beside GEMMs, as in a step: how long both take.
//
// busbw as in nccl-tests (doc/PERFORMANCE.md). Every size is verified first, on integers.
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/file_system.h"
#include "kernels/device/device.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "nlohmann/json.hpp"
#include "parallel/comm/communicator.h"
#include "parallel/comm/peer_memory.h"
#include "tests/bench/collective_calls.h"
#include "tests/gpu/rank_processes.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

struct Flags {
  int ranks = 0;
  int rounds = 9;
  std::vector<int64_t> mib = {8, 64, 256, 1024};
};

// The transport of a collective, and how it waits beside GEMMs.
enum class Way { kNccl, kFrontEnd, kWarp };
constexpr std::array<const char*, 3> kWays = {"NCCL", "copy engines, front end",
                                              "copy engines, warp"};

class Rank {
 public:
  Rank(int rank, int ranks, Communicator& world, int64_t bytes_max)
      : rank_(rank),
        ranks_(ranks),
        world_(world),
        device_(Take(kernels::MakeCudaDevice(rank))),
        compute_(Take(device_->MakeStream())),
        beside_(Take(device_->MakeStream({.high_priority = true}))),
        begin_(Take(device_->MakeEvent(true))),
        end_(Take(device_->MakeEvent(true))),
        ready_(Take(device_->MakeEvent())),
        shared_memory_(Take(device_->Allocate(bytes_max))),
        own_memory_(Take(device_->Allocate(bytes_max))),
        // As much as the largest sum, which then takes one round.
        sums_(Take(device_->Allocate(bytes_max + (1 << 20)))),
        operands_(Take(device_->Allocate(kGemm * kGemm * 2 * 3))) {
    // Below the default size nothing is measured: all calls on shared memory go by copy engines.
    shared_ = Take(world.peer_memory()->Share(
        {Tensor(shared_memory_->data(), DType::kU8, {bytes_max})}, {.least_bytes = 1}));
    world.peer_memory()->UseForSums(Tensor(sums_->data(), DType::kU8, {sums_->bytes()}));
    kernels::Zero(*compute_, Tensor(operands_->data(), DType::kU8, {operands_->bytes()}));
    Gemms(8);  // the first ones measure the algorithm
    CHECK_OK(compute_->Synchronize());
  }

  void Verify(Operation operation, int64_t elements, Way way) {
    const Tensor data = Data(elements, way);
    std::vector<float> host(static_cast<size_t>(elements));
    for (int64_t i = 0; i < elements; ++i) host[i] = ValueOf(rank_, i);
    kernels::Copy(*compute_, Tensor(host.data(), DType::kF32, {elements}), data);
    Issue(world_, *compute_, operation, data);
    kernels::Copy(*compute_, data, Tensor(host.data(), DType::kF32, {elements}));
    CHECK_OK(compute_->Synchronize());
    for (int64_t i = 0; i < elements; ++i) {
      const float expected = ExpectedOf(operation, rank_, ranks_, i, elements);
      if (expected < 0) continue;
      CHECK(host[i] == expected) << NameOf(operation) << ", rank " << rank_ << ", element " << i
                                 << " of " << elements << ": " << host[i] << ", expected "
                                 << expected;
    }
  }

  // Seconds of a call.
  double Alone(Operation operation, int64_t elements, Way way, int calls) {
    const Tensor data = Data(elements, way);
    Start(operation, *compute_, data);
    compute_->Record(*begin_);
    for (int i = 0; i < calls; ++i) Issue(world_, *compute_, operation, data);
    compute_->Record(*end_);
    CHECK_OK(compute_->Synchronize());
    return end_->SecondsSince(*begin_) / calls;
  }

  // Seconds of a call and of a GEMM, both under way all the time; calls 0: of a GEMM alone.
  struct Both {
    double call = 0, gemm = 0;
  };
  Both Beside(Operation operation, int64_t elements, Way way, int calls, int gemms) {
    const Tensor data = Data(elements, way);
    world_.peer_memory()->WaitInWarp(way == Way::kWarp);
    const auto first = Take(device_->MakeEvent(true)), last = Take(device_->MakeEvent(true));
    Start(operation, *beside_, data);
    beside_->Record(*ready_);
    compute_->Wait(*ready_);
    compute_->Record(*begin_);
    beside_->Record(*first);
    // Enqueued alternately, so that neither runs ahead of the other on the host.
    for (int i = 0; i < std::max(calls, gemms); ++i) {
      if (i < gemms) Gemms(1);
      if (i < calls) Issue(world_, *beside_, operation, data);
    }
    beside_->Record(*last);
    compute_->Record(*end_);
    CHECK_OK(beside_->Synchronize());
    CHECK_OK(compute_->Synchronize());
    world_.peer_memory()->WaitInWarp(false);
    return {calls > 0 ? last->SecondsSince(*first) / calls : 0,
            end_->SecondsSince(*begin_) / std::max(1, gemms)};
  }

 private:
  static constexpr int64_t kGemm = 8192;

  void Gemms(int count) {
    const auto matrix = [&](int i) {
      return Tensor(static_cast<char*>(operands_->data()) + i * kGemm * kGemm * 2, DType::kBF16,
                    {kGemm, kGemm});
    };
    for (int i = 0; i < count; ++i) {
      kernels::LinearForwardArgs args;
      args.x = matrix(0);
      args.w = matrix(1);
      args.y = matrix(2);
      kernels::LinearForward(*compute_, args);
    }
  }
  Tensor Data(int64_t elements, Way way) {
    kernels::Buffer& memory = way == Way::kNccl ? *own_memory_ : *shared_memory_;
    return Tensor(memory.data(), DType::kF32, {elements});
  }
  // Ranks begin at the same time.
  void Start(Operation operation, kernels::Stream& stream, const Tensor& data) {
    CHECK_OK(world_.Barrier());
    Issue(world_, stream, operation, data);
  }

  const int rank_, ranks_;
  Communicator& world_;
  const std::unique_ptr<kernels::Device> device_;
  const std::unique_ptr<kernels::Stream> compute_, beside_;
  const std::unique_ptr<kernels::Event> begin_, end_, ready_;
  const std::unique_ptr<kernels::Buffer> shared_memory_, own_memory_, sums_, operands_;
  std::unique_ptr<SharedMemory> shared_;  // ends before the memory
};

using Times = std::map<std::string, std::vector<double>>;

Times Measure(Rank& self, const Flags& flags, int ranks) {
  Times times;
  for (const int64_t mib : flags.mib) {
    const int64_t elements = (mib << 20) / 4 / ranks * ranks;
    const int calls = static_cast<int>(std::clamp<int64_t>(2048 / mib, 4, 100));
    for (int i = 0; i < 3; ++i) {
      const auto operation = kOperations[i];
      for (const Way way : {Way::kNccl, Way::kWarp}) {
        if (mib <= 64) self.Verify(operation, elements, way);
        self.Alone(operation, elements, way, calls);
      }
      for (int round = 0; round < flags.rounds; ++round) {
        for (const Way way : {Way::kNccl, Way::kWarp}) {
          times[absl::StrCat(mib, " ", i, " alone ", static_cast<int>(way))].push_back(
              self.Alone(operation, elements, way, calls));
        }
      }
    }
  }
  constexpr int kGemms = 24;  // 36 ms
  for (const int64_t mib : flags.mib) {
    const int64_t elements = (mib << 20) / 4 / ranks * ranks;
    const int calls = static_cast<int>(std::clamp<int64_t>(6144 / mib, 4, 64));
    for (int round = 0; round < flags.rounds; ++round) {
      times["gemm"].push_back(
          self.Beside(Operation::kAllGather, elements, Way::kNccl, 0, kGemms).gemm);
      for (const Way way : {Way::kNccl, Way::kFrontEnd, Way::kWarp}) {
        for (const int i : {1, 2}) {
          const auto both = self.Beside(kOperations[i], elements, way, calls, kGemms);
          const std::string name = absl::StrCat(mib, " ", i, " beside ", static_cast<int>(way));
          times[name].push_back(both.call);
          times[absl::StrCat(name, " gemm")].push_back(both.gemm);
        }
      }
    }
  }
  return times;
}

int Run(const Flags& flags) {
  const testing::TemporaryDirectory directory;
  CHECK_OK(PosixFileSystem()->MakeDirectory(directory / "store"));
  const int ranks = flags.ranks;
  const int64_t bytes_max = *std::max_element(flags.mib.begin(), flags.mib.end()) << 20;
  testing::RankProcesses processes(
      ranks, kernels::DeviceKind::kCuda, directory / "store",
      [&](testing::RankProcess& self, int) -> absl::StatusOr<std::string> {
        Communicator& world = *Take(self.World(ranks));
        Rank rank(self.rank(), ranks, world, bytes_max);
        const Times times = Measure(rank, flags, ranks);
        CHECK_OK(world.Barrier());  // a rank that left would fail the calls of the others
        return nlohmann::json(times).dump();
      });
  const auto texts = Take(processes.Run(0, ranks, absl::Minutes(5)));
  // A round takes as long as its slowest rank.
  Times slowest;
  for (const std::string& text : texts) {
    for (const auto& [name, rounds] : nlohmann::json::parse(text).get<Times>()) {
      std::vector<double>& all = slowest[name];
      all.resize(rounds.size());
      for (size_t i = 0; i < rounds.size(); ++i) all[i] = std::max(all[i], rounds[i]);
    }
  }
  const auto median = [&](const std::string& name) { return Median(slowest.at(name)); };
  std::printf(
      "%d GPUs, fp32, in place, alone; median of %d rounds, slowest rank of each\n\n"
      "| call | size | copy engines | NCCL | ratio |\n|---|---|---|---|---|\n",
      ranks, flags.rounds);
  for (const int64_t mib : flags.mib) {
    for (int i = 0; i < 3; ++i) {
      const double steps = i == 0 ? 2 : 1;
      const double moved = static_cast<double>(mib << 20) * steps * (ranks - 1) / ranks * 1e-9;
      const double engines = median(absl::StrCat(mib, " ", i, " alone 2"));
      const double nccl = median(absl::StrCat(mib, " ", i, " alone 0"));
      std::printf("| %s | %d MiB | %.1f us, %.1f GB/s | %.1f us, %.1f GB/s | %.3f |\n",
                  NameOf(kOperations[i]), static_cast<int>(mib), engines * 1e6, moved / engines,
                  nccl * 1e6, moved / nccl, nccl / engines);
    }
  }
  const double gemm = median("gemm");
  std::printf(
      "\nBeside GEMMs of 8192^3 in bf16, which take %.1f us alone\n\n"
      "| call | size | by | call | GEMM | slower |\n|---|---|---|---|---|---|\n",
      gemm * 1e6);
  for (const int64_t mib : flags.mib) {
    for (const int i : {1, 2}) {
      for (int way = 0; way < 3; ++way) {
        const std::string name = absl::StrCat(mib, " ", i, " beside ", way);
        const double beside = median(absl::StrCat(name, " gemm"));
        std::printf("| %s | %d MiB | %s | %.1f us | %.1f us | %.1f %% |\n", NameOf(kOperations[i]),
                    static_cast<int>(mib), kWays[way], median(name) * 1e6, beside * 1e6,
                    100 * (beside / gemm - 1));
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace muster::parallel

int main(int argc, char** argv) {
  CLI::App app("Collectives through copy engines against NCCL, alone and beside GEMMs.");
  muster::parallel::Flags flags;
  app.add_option("--ranks", flags.ranks, "GPUs of this machine")
      ->required()
      ->check(CLI::Range(2, 64));
  app.add_option("--rounds", flags.rounds)->check(CLI::Range(3, 1000))->capture_default_str();
  app.add_option("--mib", flags.mib, "sizes")->delimiter(',')->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  muster::parallel::SetNcclEnvironment({});
  return muster::parallel::Run(flags);
}
