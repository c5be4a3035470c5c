// What every Communicator promises, checked on all of them.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/comm/collective_plan.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/flight_recorder.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/comm/nccl_peers.h"
#include "parallel/comm/peer_memory.h"
#include "tests/support/key_value_store.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;
using ::muster::testing::IsOk;
using ::muster::testing::MemoryKeyValueStore;
using ::muster::testing::StatusIs;
using ::testing::AnyOf;
using ::testing::HasSubstr;

enum class Kind { kLocal, kTcp, kNccl };

struct Backend {
  const char* name;
  Kind kind;
  bool threaded_streams;
};

// Counted once, because each try makes a context.
int CudaDevices() {
  static const int count = [] {
    int devices = 0;
    while (kernels::MakeCudaDevice(devices).ok()) ++devices;
    return devices;
  }();
  return count;
}

// All ranks of a test, with the device of each.
struct World {
  std::vector<std::unique_ptr<kernels::Device>> devices;
  std::vector<std::unique_ptr<Communicator>> ranks;  // destroyed first

  Communicator& operator[](int rank) { return *ranks[static_cast<size_t>(rank)]; }
  kernels::Device& device(int rank) { return *devices[static_cast<size_t>(rank)]; }
  std::unique_ptr<kernels::Stream> MakeStream(int rank, bool threaded) {
    auto stream = device(rank).MakeStream({.threaded = threaded});
    CHECK_OK(stream);
    return *std::move(stream);
  }
};

// `recorder`, if any, is that of rank 0.
World MakeWorld(const Backend& backend, int size, absl::Duration timeout,
                const std::shared_ptr<FlightRecorder>& recorder = nullptr) {
  World world;
  for (int rank = 0; rank < size; ++rank) {
    if (backend.kind != Kind::kNccl) {
      world.devices.push_back(kernels::MakeCpuDevice(1));
      continue;
    }
    auto device = kernels::MakeCudaDevice(rank);
    CHECK_OK(device);
    world.devices.push_back(*std::move(device));
  }
  if (backend.kind == Kind::kLocal) {
    world.ranks = MakeLocalCommunicators(size, timeout);
    return world;
  }
  MemoryKeyValueStore store;
  world.ranks.resize(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      TcpOptions tcp;
      tcp.operation_timeout = timeout;
      NcclOptions nccl;
      nccl.operation_timeout = timeout;
      if (rank == 0 && recorder != nullptr) {
        nccl.on_failure = [recorder](const absl::Status&) { recorder->Freeze(); };
      }
      auto made = backend.kind == Kind::kNccl
                      ? MakeNcclCommunicator(store, rank, size, world.device(rank), nccl)
                      : MakeTcpCommunicator(store, rank, size, tcp);
      CHECK_OK(made);
      world.ranks[static_cast<size_t>(rank)] = std::move(made).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return world;
}

// What one rank of a test sees.
struct Rank {
  Communicator& world;
  kernels::Device& device;
  kernels::Stream& stream;
  int rank;
};

// Values in the memory of a rank's device: on a host the vector itself.
template <typename T>
class Data {
 public:
  Data(kernels::Device& device, kernels::Stream& stream, std::vector<T> values, DType dtype)
      : stream_(stream), values_(std::move(values)), dtype_(dtype) {
    if (device.kind() == kernels::DeviceKind::kCpu) return;
    auto memory = device.Allocate(bytes());
    CHECK_OK(memory);
    memory_ = *std::move(memory);
    kernels::Copy(stream_, Bytes(values_.data()), Bytes(memory_->data()));
    CHECK_OK(stream_.Synchronize());
  }
  Tensor tensor() {
    return Tensor(memory_ == nullptr ? values_.data() : memory_->data(), dtype_,
                  {static_cast<int64_t>(values_.size())});
  }
  // After the stream was synchronized.
  const std::vector<T>& values() {
    if (memory_ != nullptr) {
      kernels::Copy(stream_, Bytes(memory_->data()), Bytes(values_.data()));
      CHECK_OK(stream_.Synchronize());
    }
    return values_;
  }

 private:
  int64_t bytes() const { return static_cast<int64_t>(values_.size() * sizeof(T)); }
  Tensor Bytes(void* data) { return Tensor(data, DType::kU8, {bytes()}); }

  kernels::Stream& stream_;
  std::vector<T> values_;
  DType dtype_;
  std::unique_ptr<kernels::Buffer> memory_;
};

Data<float> OnDevice(Rank& self, std::vector<float> values) {
  return Data<float>(self.device, self.stream, std::move(values), DType::kF32);
}

Tensor F32(std::vector<float>& data) {
  return Tensor(data.data(), DType::kF32, {static_cast<int64_t>(data.size())});
}

// A CUDA call of one thread, such as the first copy from a peer, may wait for the device of another
// thread, which waits for this one's. Sharing memory is therefore tested between processes.
constexpr char kThreadsOfOneProcess[] =
    "NOT TESTED BETWEEN THREADS: gpu_layouts_test does, on GPUs";

class CommContract : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (GetParam().kind != Kind::kNccl) return;
    SetNcclEnvironment({});
    if (CudaDevices() < 2) {
      GTEST_SKIP() << "NO TWO GPUS, NOT TESTED: NCCL needs one for each rank ("
                   << kernels::MakeCudaDevice(CudaDevices()).status() << ")";
    }
  }
  // Whether sums have the bits of the tree, and volumes are those of collective_plan.h.
  static bool exact() { return GetParam().kind != Kind::kNccl; }
  // As many ranks as wanted, or as there are devices for.
  static int Some(int wanted) { return exact() ? wanted : std::min(wanted, CudaDevices()); }

  // Runs `body` on `size` threads, one per rank; the communicators live until all have finished.
  void OnRanks(int size, const std::function<void(Rank&)>& body,
               absl::Duration timeout = absl::Seconds(60)) {
    World world = MakeWorld(GetParam(), size, timeout);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto stream = world.MakeStream(rank, GetParam().threaded_streams);
        Rank self{world[rank], world.device(rank), *stream, rank};
        body(self);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

// Values whose sum depends on the order of the additions.
std::vector<float> Awkward(int rank, int64_t count) {
  Rng rng(static_cast<uint64_t>(rank) * 7919 + testing::TestSeed());
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = static_cast<float>((rng.Uniform() - 0.5) * std::exp(20 * rng.Uniform()));
  }
  return values;
}

// The sum as a binary tree over ranks [first, first + size): left subtrees are full.
std::vector<float> SumAsTree(int size, int64_t count, int first = 0) {
  if (size == 1) return Awkward(first, count);
  int left = 1;
  while (left * 2 < size) left *= 2;
  std::vector<float> sum = SumAsTree(left, count, first);
  const std::vector<float> right = SumAsTree(size - left, count, first + left);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += right[i];
  return sum;
}

void ExpectSums(const std::vector<float>& sums, int size, bool exact, const std::string& where) {
  const auto count = static_cast<int64_t>(sums.size());
  const std::vector<float> expected = SumAsTree(size, count);
  if (exact) {
    EXPECT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)), 0) << where;
    return;
  }
  std::vector<float> magnitude(sums.size());
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<float> values = Awkward(rank, count);
    for (size_t i = 0; i < sums.size(); ++i) magnitude[i] += std::abs(values[i]);
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    ASSERT_NEAR(sums[i], expected[i], 1e-6f * magnitude[i]) << where << ", element " << i;
  }
}

TEST_P(CommContract, AllReduce_AnySizeOfGroupAndData_SumsAsPromised) {
  for (int size : {1, 2, 3, 4, 7}) {
    if (size != Some(size)) continue;
    OnRanks(size, [&](Rank& self) {
      int64_t sent = 0;
      for (int64_t count : {1, 15, 33, 2049, 700'001}) {
        Data<float> data = OnDevice(self, Awkward(self.rank, count));
        self.world.AllReduce(self.stream, data.tensor(), ReduceOp::kSum);
        ASSERT_OK(self.stream.Synchronize());
        ExpectSums(data.values(), size, exact(),
                   absl::StrCat(size, " ranks, ", count, " elements, rank ", self.rank));
        sent +=
            exact() ? AllReduceBytes(count, 4, size, self.rank) : 2 * count * 4 * (size - 1) / size;
        EXPECT_EQ(self.world.bytes_sent(), sent);
      }
    });
  }
}

TEST_P(CommContract, AllReduce_AllRanksAndAllRuns_HaveTheSameBits) {
  const int size = Some(4);
  std::vector<std::vector<float>> sums(static_cast<size_t>(size * 2));
  for (int run = 0; run < 2; ++run) {
    OnRanks(size, [&](Rank& self) {
      Data<float> data = OnDevice(self, Awkward(self.rank, 300'001));
      self.world.AllReduce(self.stream, data.tensor(), ReduceOp::kSum);
      ASSERT_OK(self.stream.Synchronize());
      sums[static_cast<size_t>(run * size + self.rank)] = data.values();
    });
  }
  for (const std::vector<float>& sum : sums) {
    EXPECT_EQ(std::memcmp(sum.data(), sums[0].data(), sum.size() * sizeof(float)), 0);
  }
}

TEST_P(CommContract, AllReduce_Nothing_IsFine) {
  OnRanks(2, [&](Rank& self) {
    self.world.AllReduce(self.stream, Tensor(&self, DType::kF32, {0}), ReduceOp::kSum);
    EXPECT_OK(self.stream.Synchronize());
    EXPECT_EQ(self.world.bytes_sent(), 0);
  });
}

TEST_P(CommContract, AllReduce_MaxAndMin_LetNaNWin) {
  const int size = Some(3);
  OnRanks(size, [&](Rank& self) {
    // NCCL does not define the maximum of a NaN.
    const float odd = self.rank == 1 && exact() ? NAN : 1.f;
    Data<float> high = OnDevice(self, {static_cast<float>(self.rank), odd});
    Data<float> low = OnDevice(self, {static_cast<float>(self.rank), odd});
    self.world.AllReduce(self.stream, high.tensor(), ReduceOp::kMax);
    self.world.AllReduce(self.stream, low.tensor(), ReduceOp::kMin);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(high.values()[0], static_cast<float>(size - 1));
    EXPECT_EQ(low.values()[0], 0.f);
    EXPECT_EQ(std::isnan(high.values()[1]) && std::isnan(low.values()[1]), exact());
  });
}

TEST_P(CommContract, AllReduce_HalfPrecisionAndIntegers_AccumulateWide) {
  const int size = exact() ? 3 : 2;
  OnRanks(size, [&](Rank& self) {
    // 256 + 1 + 1: in bf16 (8 bits) each single addition would be lost; with two ranks 257 rounds
    // to even. 2048 + 1 + 1 in fp16 (11 bits).
    Data<uint16_t> bf16(self.device, self.stream,
                        std::vector<uint16_t>(5000, self.rank == 0 ? 0x4380 : 0x3F80),
                        DType::kBF16);
    Data<uint16_t> f16(self.device, self.stream,
                       std::vector<uint16_t>(5000, self.rank == 0 ? 0x6800 : 0x3C00), DType::kF16);
    Data<int64_t> i64(self.device, self.stream, {int64_t{1} << 40, self.rank}, DType::kI64);
    Data<int32_t> i32(self.device, self.stream, {1 << 20, self.rank}, DType::kI32);
    self.world.AllReduce(self.stream, bf16.tensor(), ReduceOp::kSum);
    self.world.AllReduce(self.stream, f16.tensor(), ReduceOp::kSum);
    self.world.AllReduce(self.stream, i64.tensor(), ReduceOp::kSum);
    if (!exact()) self.world.AllReduce(self.stream, i32.tensor(), ReduceOp::kSum);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(bf16.values(), std::vector<uint16_t>(5000, size == 3 ? 0x4381 : 0x4380));  // 258
    EXPECT_EQ(f16.values(), std::vector<uint16_t>(5000, size == 3 ? 0x6801 : 0x6800));   // 2050
    EXPECT_EQ(i64.values(),
              (std::vector<int64_t>{size * (int64_t{1} << 40), size * (size - 1) / 2}));
    if (!exact()) {
      EXPECT_EQ(i32.values(), (std::vector<int32_t>{size << 20, 1}));
    }
  });
}

TEST_P(CommContract, ReduceScatterThenAllGather_EqualsAllReduce) {
  for (int size : {2, 4}) {
    if (size != Some(size)) continue;
    const int64_t count = size * 300'000;
    OnRanks(size, [&](Rank& self) {
      Data<float> data = OnDevice(self, Awkward(self.rank, count));
      self.world.ReduceScatter(self.stream, data.tensor(), ReduceOp::kSum);
      self.world.AllGather(self.stream, data.tensor());
      ASSERT_OK(self.stream.Synchronize());
      ExpectSums(data.values(), size, exact(), absl::StrCat("rank ", self.rank));
      EXPECT_EQ(self.world.bytes_sent(), 2 * count * 4 * (size - 1) / size);
    });
  }
}

// With two tensors, whose calls alternate.
TEST_P(CommContract, ReduceScatterBeforeGather_ThenAllGatherFrom_EqualsAllReduce) {
  for (int size : {2, 3, 4}) {
    if (size != Some(size)) continue;
    const int64_t part = 300'000, count = size * part;
    OnRanks(size, [&](Rank& self) {
      std::vector<Data<float>> data, rows;
      for (int i : {0, 1}) {
        data.push_back(OnDevice(self, Awkward(self.rank, count)));
        rows.push_back(OnDevice(self, std::vector<float>(static_cast<size_t>(part), i)));
      }
      for (int i : {0, 1}) {
        const Tensor all = data[i].tensor();
        self.world.ReduceScatterBeforeGather(self.stream, all, ReduceOp::kSum);
        kernels::Copy(self.stream, all.Rows(self.rank * part, part), rows[i].tensor());
        self.world.AllGatherFrom(self.stream, rows[i].tensor(), all);
      }
      ASSERT_OK(self.stream.Synchronize());
      for (int i : {0, 1}) {
        ExpectSums(data[i].values(), size, exact(), absl::StrCat("rank ", self.rank));
        const std::vector<float> own = rows[i].values(), all = data[i].values();
        EXPECT_TRUE(std::equal(own.begin(), own.end(), all.begin() + self.rank * part));
      }
      EXPECT_EQ(self.world.bytes_sent(), 2 * 2 * count * 4 * (size - 1) / size);
    });
  }
}

TEST_P(CommContract, WritingToOtherPartsBeforeTheGather_FailsTheNextCallBetweenThreads) {
  if (GetParam().kind != Kind::kLocal) GTEST_SKIP() << "only the local communicator checks this";
  for (const bool own : {true, false}) {
    OnRanks(2, [&](Rank& self) {
      std::vector<float> data(64, 1), sums(64, 1);
      self.world.ReduceScatterBeforeGather(self.stream, F32(data), ReduceOp::kSum);
      kernels::Zero(self.stream, F32(data).Rows(32 * (own ? self.rank : 1 - self.rank), 32));
      self.world.AllReduce(self.stream, F32(sums), ReduceOp::kSum);
      const absl::Status status = self.stream.Synchronize();
      EXPECT_EQ(status.ok(), own) << status;
      if (own) return;
      EXPECT_THAT(std::string(status.message()),
                  AnyOf(HasSubstr("somebody has written to that"), HasSubstr("has stopped")));
    });
  }
}

TEST_P(CommContract, Broadcast_FromEveryRoot_FillsEveryRank) {
  for (int size : {2, 3, 4}) {
    if (size != Some(size)) continue;
    for (int64_t count : {3, 50'001}) {
      OnRanks(size, [&](Rank& self) {
        int64_t sent = 0;
        for (int root = 0; root < size; ++root) {
          Data<float> data = OnDevice(self, Awkward(self.rank, count));
          self.world.Broadcast(self.stream, data.tensor(), root);
          ASSERT_OK(self.stream.Synchronize());
          EXPECT_EQ(data.values(), Awkward(root, count));
          const bool last = (self.rank - root + size) % size == size - 1;
          sent += exact() ? BroadcastBytes(count, 4, size, self.rank, root) : last ? 0 : count * 4;
        }
        EXPECT_EQ(self.world.bytes_sent(), sent);
      });
    }
  }
}

TEST_P(CommContract, AllToAll_Transposes) {
  const int size = Some(4);
  OnRanks(size, [&](Rank& self) {
    std::vector<float> values;
    for (int to = 0; to < size; ++to) {
      values.insert(values.end(), 1000, static_cast<float>(10 * self.rank + to));
    }
    Data<float> in = OnDevice(self, values);
    Data<float> out = OnDevice(self, std::vector<float>(values.size()));
    self.world.AllToAll(self.stream, in.tensor(), out.tensor());
    ASSERT_OK(self.stream.Synchronize());
    for (int from = 0; from < size; ++from) {
      EXPECT_EQ(out.values()[static_cast<size_t>(from * 1000 + 999)], 10 * from + self.rank);
    }
  });
}

TEST_P(CommContract, AllToAllBatch_TakesAndPutsPartsWhereEachSays) {
  for (int size : {1, 2, 3, 4}) {
    if (size != Some(size)) continue;
    OnRanks(size, [&](Rank& self) {
      std::vector<int> reversed, turned;
      for (int rank = 0; rank < size; ++rank) {
        reversed.push_back(size - 1 - rank);
        turned.push_back((rank + 1) % size);
      }
      struct Places {
        std::vector<int> in, out;
        int64_t part;
      };
      const std::vector<Places> kinds = {
          {{}, {}, 1001}, {{}, reversed, 37}, {reversed, {}, 1001}, {turned, reversed, 64}};
      const auto at = [](const std::vector<int>& places, int rank) {
        return places.empty() ? rank : places[static_cast<size_t>(rank)];
      };
      const auto value = [](int from, int to, size_t kind, int64_t i) {
        return static_cast<float>(((from * 4 + to) * 4 + static_cast<int>(kind)) * 2000 + i);
      };
      std::vector<Data<float>> ins, outs;
      std::vector<AllToAllItem> items;
      int64_t bytes = 0;
      for (size_t kind = 0; kind < kinds.size(); ++kind) {
        const auto& [in, out, part] = kinds[kind];
        std::vector<float> values(static_cast<size_t>(size * part));
        for (int to = 0; to < size; ++to) {
          for (int64_t i = 0; i < part; ++i) {
            values[at(in, to) * part + i] = value(self.rank, to, kind, i);
          }
        }
        ins.push_back(OnDevice(self, values));
        outs.push_back(OnDevice(self, std::vector<float>(values.size(), -1)));
        items.push_back({ins.back().tensor(), outs.back().tensor(), in, out});
        bytes += (size - 1) * part * int64_t{sizeof(float)};
      }
      self.world.AllToAllBatch(self.stream, items);
      // The next call takes what this one has brought: the first item goes back.
      Data<float> back = OnDevice(self, std::vector<float>(static_cast<size_t>(size) * 1001));
      self.world.AllToAllBatch(self.stream, {{items[0].out, back.tensor()}});
      ASSERT_OK(self.stream.Synchronize());
      EXPECT_EQ(self.world.bytes_sent(), bytes + (size - 1) * 1001 * int64_t{sizeof(float)});
      EXPECT_EQ(back.values(), ins[0].values());
      for (size_t kind = 0; kind < kinds.size(); ++kind) {
        const auto& [in, out, part] = kinds[kind];
        const std::vector<float>& values = outs[kind].values();
        for (int from = 0; from < size; ++from) {
          for (int64_t i = 0; i < part; ++i) {
            ASSERT_EQ(values[at(out, from) * part + i], value(from, self.rank, kind, i))
                << "item " << kind << " from " << from << ", " << i;
          }
        }
      }
    });
  }
}

TEST_P(CommContract, GatherAndAllToAllInSteps_BringThePartsOfTheOthers) {
  const int64_t part = 1001;
  for (int size : {1, 2, 4}) {
    if (size != Some(size)) continue;
    OnRanks(size, [&](Rank& self) {
      const auto value = [](int rank, int64_t i) { return static_cast<float>(rank * 10'000 + i); };
      std::vector<float> mine(static_cast<size_t>(part)), all(static_cast<size_t>(part * size));
      for (int64_t i = 0; i < part; ++i) mine[i] = value(self.rank, i);
      for (int64_t i = 0; i < part * size; ++i) all[i] = value(self.rank, i);
      const std::vector<float> unset(all.size(), -1);
      Data<float> in = OnDevice(self, mine), gathered = OnDevice(self, unset);
      std::vector<int> arrived, sent;
      self.world.AllGatherInSteps(self.stream, in.tensor(), gathered.tensor(),
                                  [&](int from) { arrived.push_back(from); });
      // Each part is written just before it is sent.
      Data<float> source = OnDevice(self, all), late = OnDevice(self, unset);
      Data<float> out = OnDevice(self, unset);
      self.world.AllToAllInSteps(self.stream, late.tensor(), out.tensor(), [&](int to) {
        sent.push_back(to);
        kernels::Copy(self.stream, source.tensor().Rows(to * part, part),
                      late.tensor().Rows(to * part, part));
      });
      ASSERT_OK(self.stream.Synchronize());
      std::vector<int> before, behind;
      for (int step = 1; step < size; ++step) {
        before.push_back((self.rank + size - step) % size);
        behind.push_back((self.rank + step) % size);
      }
      EXPECT_EQ(arrived, before);
      EXPECT_EQ(sent, behind);
      const std::vector<float> everything = gathered.values(), transposed = out.values();
      for (int64_t i = 0; i < part * size; ++i) {
        const int from = static_cast<int>(i / part);
        const bool own = from == self.rank;
        ASSERT_EQ(everything[i], own ? -1 : value(from, i % part)) << i;
        ASSERT_EQ(transposed[i], own ? -1 : value(from, self.rank * part + i % part)) << i;
      }
      EXPECT_EQ(self.world.bytes_sent(), 2 * (size - 1) * part * int64_t{sizeof(float)});
    });
  }
}

TEST_P(CommContract, SendsAndReceives_KeepTheirOrder) {
  OnRanks(2, [&](Rank& self) {
    Data<float> data =
        OnDevice(self, self.rank == 0 ? std::vector<float>{1, 2, 3} : std::vector<float>{0, 0, 0});
    for (int i = 0; i < 3; ++i) {
      Tensor one(data.tensor().as<float>() + i, DType::kF32, {1});
      if (self.rank == 0) {
        self.world.Send(self.stream, one, 1);
      } else {
        self.world.Receive(self.stream, one, 0);
      }
    }
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(data.values(), (std::vector<float>{1, 2, 3}));
  });
}

TEST_P(CommContract, Group_EveryoneSendsFirst_NobodyWaitsForEver) {
  const int size = Some(3);
  OnRanks(size, [&](Rank& self) {
    const int left = (self.rank + size - 1) % size;
    Data<float> out = OnDevice(self, Awkward(self.rank, 200'000));
    Data<float> in = OnDevice(self, std::vector<float>(200'000));
    self.world.GroupBegin();
    self.world.Send(self.stream, out.tensor(), (self.rank + 1) % size);
    self.world.Receive(self.stream, in.tensor(), left);
    self.world.GroupEnd(self.stream);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(in.values(), Awkward(left, 200'000));
  });
}

TEST_P(CommContract, Split_ByColorAndKey_MakesIndependentGroups) {
  if (Some(4) < 4) GTEST_SKIP() << "NO FOUR GPUS, NOT TESTED";
  OnRanks(4, [&](Rank& self) {
    // Even and odd ranks, each in descending order; then everyone again under another name.
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> pair,
                         self.world.Split(self.rank % 2, -self.rank, "pair"));
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> all, self.world.Split(0, 0, "all"));
    EXPECT_EQ(pair->size(), 2);
    EXPECT_EQ(pair->rank(), self.rank >= 2 ? 0 : 1);
    EXPECT_EQ(pair->name(), "pair");
    EXPECT_EQ(all->rank(), self.rank);
    const std::vector<float> mine = {static_cast<float>(self.rank)};
    Data<float> one = OnDevice(self, mine);
    Data<float> two = OnDevice(self, mine);
    Data<float> three = OnDevice(self, mine);
    pair->AllReduce(self.stream, one.tensor(), ReduceOp::kSum);
    all->AllReduce(self.stream, two.tensor(), ReduceOp::kSum);
    self.world.AllReduce(self.stream, three.tensor(), ReduceOp::kMax);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(one.values()[0], self.rank % 2 == 0 ? 2.f : 4.f);
    EXPECT_EQ(two.values()[0], 6.f);
    EXPECT_EQ(three.values()[0], 3.f);
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> alone, pair->Split(pair->rank(), 0, "one"));
    EXPECT_EQ(alone->size(), 1);
    EXPECT_OK(alone->Barrier());
  });
}

TEST_P(CommContract, TwoStreams_DifferentGroups_RunAtTheSameTime) {
  if (!GetParam().threaded_streams) GTEST_SKIP() << "eager streams do not overlap";
  OnRanks(2, [&](Rank& self) {
    ASSERT_OK_AND_ASSIGN(auto other, self.device.MakeStream({.threaded = true}));
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> second, self.world.Split(0, 0, "second"));
    Data<float> a = OnDevice(self, Awkward(self.rank, 100'000));
    Data<float> b = OnDevice(self, Awkward(self.rank, 100'000));
    // Opposite orders of enqueueing on the two ranks: only separate groups survive that.
    if (self.rank == 0) self.world.AllReduce(self.stream, a.tensor(), ReduceOp::kSum);
    second->AllReduce(*other, b.tensor(), ReduceOp::kSum);
    if (self.rank == 1) self.world.AllReduce(self.stream, a.tensor(), ReduceOp::kSum);
    ASSERT_OK(self.stream.Synchronize());
    ASSERT_OK(other->Synchronize());
    EXPECT_EQ(a.values(), SumAsTree(2, 100'000));
    EXPECT_EQ(b.values(), a.values());
  });
}

TEST_P(CommContract, GatherTexts_OfDifferentLengths_ReachEveryone) {
  const int size = Some(3);
  OnRanks(size, [&](Rank& self) {
    // Works on a host stream whatever the device.
    const std::unique_ptr<kernels::Device> host = kernels::MakeCpuDevice(1);
    ASSERT_OK_AND_ASSIGN(auto stream, host->MakeStream({.threaded = GetParam().threaded_streams}));
    const std::string mine(static_cast<size_t>(self.rank * 1000),
                           static_cast<char>('a' + self.rank));
    ASSERT_OK_AND_ASSIGN(auto all, GatherTexts(self.world, *stream, mine));
    std::vector<std::string> expected;
    for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
      expected.emplace_back(rank * 1000, static_cast<char>('a' + rank));
    }
    EXPECT_EQ(all, expected);
  });
}

TEST_P(CommContract, CallsOfOneGroupOnTwoStreams_RunInTheirOrder) {
  if (!exact()) GTEST_SKIP() << kThreadsOfOneProcess;
  // Not a multiple of what parts are rounded to.
  const int64_t part = 4097;
  OnRanks(Some(4), [&](Rank& self) {
    Communicator& world = self.world;
    const int size = world.size();
    const int64_t elements = part * size;
    const auto value = [&](int rank, int64_t i) {
      return static_cast<float>((i * 7 + rank * 1000) % 4096);  // whose sums are exact
    };
    std::vector<float> mine(static_cast<size_t>(elements));
    for (int64_t i = 0; i < elements; ++i) mine[i] = value(self.rank, i);
    Data<float> in = OnDevice(self, mine), out = OnDevice(self, mine);
    world.AllToAll(self.stream, in.tensor(), out.tensor());
    ASSERT_OK(self.stream.Synchronize());
    const std::vector<float> parts = out.values();
    for (int64_t i = 0; i < elements; ++i) {
      ASSERT_EQ(parts[i], value(static_cast<int>(i / part), self.rank * part + i % part)) << i;
    }

    const auto second = self.device.MakeStream({.threaded = GetParam().threaded_streams});
    ASSERT_OK(second);
    kernels::Copy(self.stream, out.tensor(), in.tensor());
    world.ReduceScatter(self.stream, in.tensor(), ReduceOp::kSum);
    ASSERT_OK_AND_ASSIGN(const auto reduced, self.device.MakeEvent());
    self.stream.Record(*reduced);
    (*second)->Wait(*reduced);
    world.AllGather(**second, in.tensor());
    world.Rotate(**second, in.tensor(), out.tensor(), -1);
    world.Rotate(**second, in.tensor(), out.tensor(), size + 1);
    ASSERT_OK((*second)->Synchronize());
    const std::vector<float> gathered = in.values(), turned = out.values();
    for (int64_t i = 0; i < elements; ++i) {
      float sum = 0;
      for (int rank = 0; rank < size; ++rank) {
        sum += value(static_cast<int>(i / part), rank * part + i % part);
      }
      ASSERT_EQ(gathered[i], sum) << i;
      ASSERT_EQ(turned[i], sum) << i;
    }
  });
}

TEST_P(CommContract, PeerMemory_OfferedBetweenGpusAlone) {
  OnRanks(2, [&](Rank& self) {
    EXPECT_EQ(self.world.peer_memory() != nullptr, GetParam().kind == Kind::kNccl);
  });
}

TEST_P(CommContract, Barrier_LetsNobodyPassBeforeAllHaveCome) {
  const int size = Some(4);
  std::atomic<int> arrived{0};
  OnRanks(size, [&](Rank& self) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      ASSERT_OK(self.world.Barrier());
      EXPECT_GE(arrived.load(), size * round);
    }
  });
}

TEST_P(CommContract, PeerThatLeaves_FailsTheOthersWithUnavailable_Soon) {
  const int size = Some(3);
  World world = MakeWorld(GetParam(), size, absl::Seconds(60));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size - 1; ++rank) {
    threads.emplace_back([&, rank] {
      const auto stream = world.MakeStream(rank, GetParam().threaded_streams);
      Rank self{world[rank], world.device(rank), *stream, rank};
      Data<float> data = OnDevice(self, std::vector<float>(100'000));
      const absl::Time start = absl::Now();
      self.world.AllReduce(*stream, data.tensor(), ReduceOp::kSum);
      EXPECT_THAT(stream->Synchronize(),
                  StatusIs(absl::StatusCode::kUnavailable, HasSubstr("group world, rank")));
      EXPECT_LT(absl::Now() - start, absl::Seconds(20));
      // The communicator is unusable now, and says so without waiting.
      EXPECT_FALSE(self.world.Barrier().ok());
    });
  }
  world.ranks[static_cast<size_t>(size - 1)].reset();
  for (std::thread& thread : threads) thread.join();
}

TEST_P(CommContract, Abort_FromAnotherThread_EndsAWaitingCall) {
  World world = MakeWorld(GetParam(), 2, absl::Seconds(60));
  const auto stream0 = world.MakeStream(0, /*threaded=*/true);
  const auto stream1 = world.MakeStream(1, /*threaded=*/true);
  Rank first{world[0], world.device(0), *stream0, 0};
  Rank second{world[1], world.device(1), *stream1, 1};
  Data<float> data = OnDevice(first, std::vector<float>(100'000));
  Data<float> theirs = OnDevice(second, std::vector<float>(100'000));
  first.world.AllReduce(*stream0, data.tensor(), ReduceOp::kSum);  // rank 1 never comes
  std::thread other([&] { first.world.Abort(absl::CancelledError("the attempt has ended")); });
  EXPECT_THAT(stream0->Synchronize(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("the attempt has ended")));
  other.join();
  first.world.AllReduce(*stream0, data.tensor(), ReduceOp::kSum);
  EXPECT_THAT(stream0->Synchronize(), StatusIs(absl::StatusCode::kAborted));
  // The peer, when it comes, finds out soon.
  second.world.AllReduce(*stream1, theirs.tensor(), ReduceOp::kSum);
  EXPECT_THAT(stream1->Synchronize(), StatusIs(absl::StatusCode::kUnavailable));
}

TEST_P(CommContract, PeerThatNeverComes_IsADeadlineExceeded) {
  World world = MakeWorld(GetParam(), 2, absl::Milliseconds(50));
  const auto stream = world.MakeStream(0, /*threaded=*/false);
  Rank self{world[0], world.device(0), *stream, 0};
  Data<float> data = OnDevice(self, std::vector<float>(10));
  self.world.AllReduce(*stream, data.tensor(), ReduceOp::kSum);
  EXPECT_THAT(stream->Synchronize(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("for rank 1")));
}

// Ranks that do not make the same calls get an error that names the call, no hang and no wrong
// sums.
TEST_P(CommContract, CallsThatDoNotMatch_FailOnEveryRank) {
  if (!exact()) GTEST_SKIP() << "NCCL does not compare calls; its timeout ends them";
  using Call = std::function<void(Rank&, std::vector<float> & data, std::vector<float> & out)>;
  const auto fail = [&](const char* what, size_t count, const Call& call) {
    SCOPED_TRACE(absl::StrCat(what, " of ", count));
    const auto body = [&](Rank& self) {
      std::vector<float> data(count, 1.0f), out(count);
      call(self, data, out);
      const absl::Status status = self.stream.Synchronize();
      EXPECT_FALSE(status.ok()) << "rank " << self.rank;
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank")) << status;
    };
    OnRanks(2, body, absl::Milliseconds(100));
  };
  for (const size_t count : {400, 40'000}) {
    fail("sums of different sizes", count, [](Rank& self, auto& data, auto&) {
      if (self.rank == 1) data.resize(data.size() + 4);
      self.world.AllReduce(self.stream, F32(data), ReduceOp::kSum);
    });
    fail("a sum and a gather", count, [](Rank& self, auto& data, auto&) {
      if (self.rank == 1) return self.world.AllGather(self.stream, F32(data));
      self.world.AllReduce(self.stream, F32(data), ReduceOp::kSum);
    });
    fail("broadcasts from different roots", count, [](Rank& self, auto& data, auto&) {
      self.world.Broadcast(self.stream, F32(data), self.rank);
    });
    fail("messages of different sizes", count, [](Rank& self, auto& data, auto&) {
      if (self.rank == 1) return self.world.Send(self.stream, F32(data), 0);
      data.resize(data.size() - 8);
      self.world.Receive(self.stream, F32(data), 1);
    });
    fail("a scatter and an exchange", count, [](Rank& self, auto& data, auto& out) {
      if (self.rank == 1) return self.world.AllToAll(self.stream, F32(data), F32(out));
      self.world.ReduceScatter(self.stream, F32(data), ReduceOp::kSum);
    });
  }
}

// The ranks call the same groups in another order, so each waits in a group where the other is not.
TEST_P(CommContract, GroupsInAnotherOrder_EndInADeadlineThatNamesRanks) {
  for (const int size : {2, 3}) {
    if (Some(size) < size) continue;
    const auto body = [&](Rank& self) {
      auto first = self.world.Split(0, self.rank, "first");
      ASSERT_OK(first.status());
      auto second = self.world.Split(0, self.rank, "second");
      ASSERT_OK(second.status());
      Data<float> data = OnDevice(self, std::vector<float>(1000));
      const bool other = self.rank == size - 1;
      for (Communicator* group :
           {other ? second->get() : first->get(), other ? first->get() : second->get()}) {
        group->AllReduce(self.stream, data.tensor(), ReduceOp::kSum);
      }
      const absl::Status status = self.stream.Synchronize();
      EXPECT_THAT(status, AnyOf(StatusIs(absl::StatusCode::kDeadlineExceeded),
                                StatusIs(absl::StatusCode::kUnavailable)))
          << "rank " << self.rank;
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank")) << status;
      if (!exact()) return;  // of the calls that are enqueued, NCCL's watchdog may name either
      EXPECT_THAT(std::string(status.message()), HasSubstr(other ? "second" : "first")) << status;
    };
    OnRanks(size, body, absl::Milliseconds(100));
  }
}

// One rank makes two calls of one group in the other order.
TEST_P(CommContract, CallsInAnotherOrder_FailOnEveryRankWithTheirNames) {
  if (!exact()) GTEST_SKIP() << "NCCL does not compare calls; its timeout ends them";
  for (const int size : {2, 4}) {
    const auto body = [&](Rank& self) {
      std::vector<float> parameters(400), gradients(800);
      const auto gather = [&] { self.world.AllGather(self.stream, F32(parameters)); };
      const auto scatter = [&] {
        self.world.ReduceScatter(self.stream, F32(gradients), ReduceOp::kSum);
      };
      if (self.rank == 1) {
        gather();
        scatter();
      } else {
        scatter();
        gather();
      }
      const absl::Status status = self.stream.Synchronize();
      EXPECT_FALSE(status.ok()) << "rank " << self.rank;
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank")) << status;
    };
    OnRanks(size, body, absl::Milliseconds(200));
  }
}

TEST_P(CommContract, AbortAtRandomMoments_NeverHangsNorTouchesFreedMemory) {
  Rng rng(testing::TestSeed());
  const int size = Some(3);
  // Each world of GPUs takes a second to make.
  for (int round = 0; round < (exact() ? 10 : 3); ++round) {
    World world = MakeWorld(GetParam(), size, absl::Seconds(60));
    const int spins = static_cast<int>(rng.Below(2000));
    const int aborter = static_cast<int>(rng.Below(static_cast<uint64_t>(size)));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto stream = world.MakeStream(rank, GetParam().threaded_streams);
        Rank self{world[rank], world.device(rank), *stream, rank};
        absl::Status status;
        while (status.ok()) {
          // Freed each time: a late write would be seen by asan.
          Data<float> data = OnDevice(self, std::vector<float>(300'000));
          self.world.AllReduce(*stream, data.tensor(), ReduceOp::kSum);
          status = stream->Synchronize();
        }
        EXPECT_THAT(status, AnyOf(StatusIs(absl::StatusCode::kAborted),
                                  StatusIs(absl::StatusCode::kUnavailable)));
      });
    }
    for (int i = 0; i < spins; ++i) std::this_thread::yield();
    world[aborter].Abort(absl::CancelledError("stop"));
    for (std::thread& thread : threads) thread.join();
  }
}

// The ranks of a group, as bits of a number.
int64_t MembersOf(Communicator& group, Rank& self) {
  Data<int64_t> bits(self.device, self.stream, {int64_t{1} << self.rank}, DType::kI64);
  group.AllReduce(self.stream, bits.tensor(), ReduceOp::kSum);
  EXPECT_OK(self.stream.Synchronize());
  return bits.values()[0];
}

TEST_P(CommContract, MeshGroups_JoinExactlyTheRanksThatTheMeshNames) {
  if (Some(8) < 8) GTEST_SKIP() << "NO EIGHT GPUS, NOT TESTED";
  OnRanks(8, [](Rank& self) {
    for (const PerAxis& degrees : {PerAxis(2, 2, 1, 2), PerAxis(1, 4, 2, 1), PerAxis(1, 8, 1, 1)}) {
      ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Make({.degrees = degrees}, 8));
      ASSERT_OK_AND_ASSIGN(auto groups, MeshGroups::Make(mesh, self.world, 2));
      const std::vector<std::vector<Axis>> sets = {
          {Axis::kTensor}, {Axis::kContext}, {Axis::kPipeline}, {Axis::kContext, Axis::kData}};
      for (const std::vector<Axis>& axes : sets) {
        int64_t expected = 0;
        for (const int rank : mesh.GroupOf(self.rank, axes)) expected |= int64_t{1} << rank;
        EXPECT_EQ(MembersOf(groups->Along(axes), self), expected);
      }
      const std::vector<int> gradient = mesh.GroupOf(self.rank, {Axis::kData, Axis::kContext});
      int64_t shard = 0, replicas = 0;
      for (int i = 0; i < static_cast<int>(gradient.size()); ++i) {
        const int64_t bit = int64_t{1} << gradient[static_cast<size_t>(i)];
        if (i / 2 == groups->gradient_rank() / 2) shard |= bit;
        if (i % 2 == groups->gradient_rank() % 2) replicas |= bit;
      }
      EXPECT_EQ(MembersOf(groups->shard(), self), shard);
      EXPECT_EQ(MembersOf(groups->gather(), self), shard);
      EXPECT_EQ(MembersOf(groups->replicate(), self), replicas);
      EXPECT_EQ(groups->shard().rank(), groups->gradient_rank() % 2);
    }
    EXPECT_THAT(MeshGroups::MakeData(self.world, 3).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 ranks")));
  });
}

TEST_P(CommContract, FlightRecorder_AfterAFailure_NamesTheCallThatHungAndOnlyThat) {
  const int size = Some(3);
  auto recorder = std::make_shared<FlightRecorder>();
  World world = MakeWorld(GetParam(), size, absl::Seconds(60), recorder);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto stream = world.MakeStream(rank, GetParam().threaded_streams);
      Rank self{world[rank], world.device(rank), *stream, rank};
      std::unique_ptr<Communicator>& own = world.ranks[static_cast<size_t>(rank)];
      if (rank == 0) own = FlightRecorder::Record(std::move(own), recorder);
      Data<float> data = OnDevice(self, std::vector<float>(1000));
      own->AllReduce(*stream, data.tensor(), ReduceOp::kSum);
      EXPECT_OK(stream->Synchronize());
      if (rank != 0) {
        if (rank == size - 1) own.reset();
        return;
      }
      own->AllGather(*stream, Tensor(data.tensor().data(), DType::kF32, {size * 100}));
      EXPECT_FALSE(stream->Synchronize().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(recorder->Dump(), HasSubstr("world call 0: all-reduce F32[1000] 4000 bytes"));
  EXPECT_THAT(recorder->Unfinished(),
              HasSubstr(absl::StrCat("world call 1: all-gather F32[", size * 100, "]")));
  EXPECT_EQ(recorder->Unfinished().find("all-reduce"), std::string::npos);
  const auto positions = recorder->Positions();
  ASSERT_EQ(positions.size(), 1u);
  EXPECT_EQ(positions.begin()->second.calls, 2u);
  ASSERT_TRUE(positions.begin()->second.unfinished.has_value());
  EXPECT_EQ(positions.begin()->second.unfinished->number, 1u);
}

INSTANTIATE_TEST_SUITE_P(Backends, CommContract,
                         ::testing::Values(Backend{"local_eager", Kind::kLocal, false},
                                           Backend{"local_threaded", Kind::kLocal, true},
                                           Backend{"tcp_eager", Kind::kTcp, false},
                                           Backend{"tcp_threaded", Kind::kTcp, true},
                                           Backend{"nccl", Kind::kNccl, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(FlightRecorder, MoreCallsThanItKeeps_KeepsTheNewest) {
  auto recorder = std::make_shared<FlightRecorder>(3);
  std::unique_ptr<Communicator> alone =
      FlightRecorder::Record(std::move(MakeLocalCommunicators(1, absl::Seconds(60))[0]), recorder);
  std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
  ASSERT_OK_AND_ASSIGN(auto stream, device->MakeStream());
  for (size_t count = 1; count <= 5; ++count) {
    std::vector<float> data(count);
    alone->AllReduce(*stream, F32(data), ReduceOp::kSum);
  }
  ASSERT_OK(stream->Synchronize());
  const std::string dump = recorder->Dump();
  EXPECT_EQ(std::count(dump.begin(), dump.end(), '\n'), 3);
  EXPECT_THAT(dump, HasSubstr("world call 4: all-reduce F32[5] 20 bytes"));
  EXPECT_EQ(dump.find("call 1:"), std::string::npos);
  EXPECT_EQ(recorder->Unfinished(), "");
  EXPECT_EQ(recorder->Positions().begin()->second.calls, 5u);
  EXPECT_FALSE(recorder->Positions().begin()->second.unfinished.has_value());
}

TEST(FlightRecorder, BatchOfAllToAlls_IsOneCall) {
  auto recorder = std::make_shared<FlightRecorder>();
  auto world = MakeLocalCommunicators(2, absl::Seconds(60));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<Communicator>& own = world[static_cast<size_t>(rank)];
      if (rank == 0) own = FlightRecorder::Record(std::move(own), recorder);
      std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
      auto stream = device->MakeStream();
      CHECK_OK(stream);
      std::vector<float> in(8), out(8);
      const Tensor from = F32(in), to = F32(out);
      own->AllToAllBatch(**stream,
                         {{from.Rows(0, 2), to.Rows(0, 2)}, {from.Rows(2, 6), to.Rows(2, 6)}});
      EXPECT_OK((*stream)->Synchronize());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string dump = recorder->Dump();
  EXPECT_EQ(std::count(dump.begin(), dump.end(), '\n'), 1);
  EXPECT_THAT(dump, HasSubstr("world call 0: batch of all-to-alls F32[8] 32 bytes"));
}

TEST(NcclPeers, WhatCannotWorkTogether_IsNamed) {
  const NcclPeer good{"2.28.9", "cuda:0 NVIDIA H200 GPU-a", "GPU-a", ""};
  NcclPeer other = good;
  other.uuid = "GPU-b";
  EXPECT_OK(CheckNcclPeers({good, other}));
  EXPECT_THAT(CheckNcclPeers({good, good}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("both given")));
  other.version = "2.27.3";
  EXPECT_THAT(CheckNcclPeers({good, other}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("rank 0 has 2.28.9, rank 1 has 2.27.3")));
  other.error = "NCCL: libnccl.so.2 was not found";
  EXPECT_THAT(CheckNcclPeers({good, NcclPeer::FromText(other.ToText())}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("rank 1 cannot take part: NCCL: libnccl.so.2 was not found")));
  EXPECT_THAT(CheckNcclPeers({good, NcclPeer::FromText("garbage")}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rank 1")));
}

TEST(LocalCommunicator, DifferentCalls_AreToldApart) {
  auto world = MakeLocalCommunicators(2, absl::Seconds(60));
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
      auto stream = device->MakeStream();
      CHECK_OK(stream);
      std::vector<float> data(static_cast<size_t>(rank + 1) * 2);
      world[static_cast<size_t>(rank)]->AllReduce(**stream, F32(data), ReduceOp::kSum);
      statuses[static_cast<size_t>(rank)] = (*stream)->Synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(statuses[0].code() == absl::StatusCode::kInvalidArgument ||
              statuses[1].code() == absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(statuses[0].ok() || statuses[1].ok());
}

TEST(TcpCommunicator, RankThatIsMissing_IsADeadlineExceededOfTheBootstrap) {
  MemoryKeyValueStore store;
  TcpOptions options;
  options.connect_timeout = absl::Milliseconds(50);
  EXPECT_THAT(MakeTcpCommunicator(store, 0, 2, options),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("bootstrap of 2 ranks")));
}

TEST(TcpCommunicator, AddressOfNoInterface_IsInvalid) {
  MemoryKeyValueStore store;
  TcpOptions options;
  options.address = "not an address";
  EXPECT_THAT(MakeTcpCommunicator(store, 0, 2, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not an address")));
}

// ---- real processes ----------------------------------------------------------------------------

// A key-value store in memory that forked processes share.
class SharedStore : public KeyValueStore {
 public:
  static SharedStore* Make() {
    void* memory = mmap(nullptr, sizeof(SharedStore), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return new (memory) SharedStore;
  }
  static void Free(SharedStore* store) {
    store->~SharedStore();
    munmap(store, sizeof(SharedStore));
  }
  absl::Status Put(const std::string& key, const std::string& value) override {
    pthread_mutex_lock(&mutex_);
    CHECK_LT(count_, kSlots);
    CHECK(key.size() < sizeof(Slot::key) && value.size() <= sizeof(Slot::value));
    Slot& slot = slots_[count_++];
    std::memcpy(slot.key, key.c_str(), key.size() + 1);
    std::memcpy(slot.value, value.data(), value.size());
    slot.bytes = value.size();
    pthread_cond_broadcast(&changed_);
    pthread_mutex_unlock(&mutex_);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    const timespec deadline = absl::ToTimespec(absl::Now() + timeout);
    absl::StatusOr<std::string> result = absl::DeadlineExceededError(key);
    pthread_mutex_lock(&mutex_);
    for (int waited = 0; waited != ETIMEDOUT;
         waited = pthread_cond_timedwait(&changed_, &mutex_, &deadline)) {
      for (int i = 0; i < count_; ++i) {
        if (key == slots_[i].key) result = std::string(slots_[i].value, slots_[i].bytes);
      }
      if (result.ok()) break;
    }
    pthread_mutex_unlock(&mutex_);
    return result;
  }

 private:
  static constexpr int kSlots = 64;
  struct Slot {
    char key[64];
    char value[4000];
    size_t bytes;
  };
  SharedStore() {
    pthread_mutexattr_t mutex_attributes;
    pthread_mutexattr_init(&mutex_attributes);
    pthread_mutexattr_setpshared(&mutex_attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&mutex_, &mutex_attributes);
    pthread_condattr_t condition_attributes;
    pthread_condattr_init(&condition_attributes);
    pthread_condattr_setpshared(&condition_attributes, PTHREAD_PROCESS_SHARED);
    pthread_cond_init(&changed_, &condition_attributes);
  }
  pthread_mutex_t mutex_;
  pthread_cond_t changed_;
  int count_ = 0;
  Slot slots_[kSlots];
};

// Sums for ever; writes a byte to `progress` after each sum. Returns the exit code of the process.
int SumUntilItFails(KeyValueStore& store, int rank, int progress) {
  auto world = MakeTcpCommunicator(store, rank, 3, TcpOptions());
  if (!world.ok()) return 3;
  std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
  auto stream = device->MakeStream();
  if (!stream.ok()) return 4;
  std::vector<float> data(1'000'000, 1.f);
  for (;;) {
    (*world)->AllReduce(**stream, F32(data), ReduceOp::kMax);
    const absl::Status status = (*stream)->Synchronize();
    if (!status.ok()) return status.code() == absl::StatusCode::kUnavailable ? 0 : 5;
    if (write(progress, "s", 1) != 1) return 6;
  }
}

TEST(TcpCommunicator, ProcessKilledInTheMiddle_IsNoticedByThePeersWithinASecond) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 5; ++round) {
    SharedStore* store = SharedStore::Make();
    int progress[2];
    ASSERT_EQ(pipe(progress), 0);
    std::vector<pid_t> pids;
    for (int rank = 0; rank < 3; ++rank) {
      const pid_t pid = fork();
      ASSERT_GE(pid, 0);
      if (pid == 0) _exit(SumUntilItFails(*store, rank, progress[1]));
      pids.push_back(pid);
    }
    close(progress[1]);
    // Let them do a few sums, then kill one at a random point of the next ones.
    char byte;
    for (uint64_t i = 0; i < 6 + rng.Below(6); ++i) ASSERT_EQ(read(progress[0], &byte, 1), 1);
    for (uint64_t i = rng.Below(100); i > 0; --i) std::this_thread::yield();
    const size_t victim = rng.Below(3);
    ASSERT_EQ(kill(pids[victim], SIGKILL), 0);
    const absl::Time killed = absl::Now();
    for (size_t rank = 0; rank < 3; ++rank) {
      int status = 0;
      ASSERT_EQ(waitpid(pids[rank], &status, 0), pids[rank]);
      if (rank == victim) {
        EXPECT_TRUE(WIFSIGNALED(status));
      } else {
        EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
        EXPECT_EQ(WEXITSTATUS(status), 0) << "rank " << rank;
      }
    }
    EXPECT_LT(absl::Now() - killed, absl::Seconds(1));
    close(progress[0]);
    SharedStore::Free(store);
  }
}

}  // namespace
}  // namespace muster::parallel
