// What every Communicator promises, checked on all of them.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "kernels/device.h"
#include "parallel/comm/collective_plan.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/comm/mesh_groups.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;
using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class MemoryKeyValueStore : public KeyValueStore {
 public:
  absl::Status Put(const std::string& key, const std::string& value) override {
    MutexLock lock(&mutex_);
    values_[key] = value;
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    MutexLock lock(&mutex_);
    auto known = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return values_.contains(key); };
    if (!mutex_.AwaitWithTimeout(Condition(&known), timeout)) {
      return absl::DeadlineExceededError(key);
    }
    return values_[key];
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

struct Backend {
  const char* name;
  bool gloo;
  bool threaded_streams;
};

std::vector<std::unique_ptr<Communicator>> MakeWorld(const Backend& backend, int size,
                                                     absl::Duration timeout) {
  if (!backend.gloo) return MakeLocalCommunicators(size, timeout);
  MemoryKeyValueStore store;
  std::vector<std::unique_ptr<Communicator>> world(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      GlooOptions options;
      options.operation_timeout = timeout;
      auto made = MakeGlooCommunicator(store, rank, size, options);
      CHECK_OK(made);
      world[static_cast<size_t>(rank)] = std::move(made).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return world;
}

// What one rank of a test sees.
struct Rank {
  Communicator& world;
  kernels::Stream& stream;
  int rank;
};

Tensor F32(std::vector<float>& data) {
  return Tensor(data.data(), DType::kF32, {static_cast<int64_t>(data.size())});
}

class CommContract : public ::testing::TestWithParam<Backend> {
 protected:
  // Runs `body` on `size` threads, one per rank; the communicators live until all have finished.
  void OnRanks(int size, const std::function<void(Rank&)>& body,
               absl::Duration timeout = absl::Seconds(60)) {
    std::vector<std::unique_ptr<Communicator>> world = MakeWorld(GetParam(), size, timeout);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
        auto stream = device->MakeStream({.threaded = GetParam().threaded_streams});
        CHECK_OK(stream);
        Rank self{*world[static_cast<size_t>(rank)], **stream, rank};
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

TEST_P(CommContract, AllReduce_AnySizeOfGroupAndData_SumsAsTreeToTheLastBit) {
  for (int size : {1, 2, 3, 4, 7}) {
    for (int64_t count : {1, 15, 33, 2049, 700'001}) {
      const std::vector<float> expected = SumAsTree(size, count);
      OnRanks(size, [&](Rank& self) {
        std::vector<float> data = Awkward(self.rank, count);
        self.world.AllReduce(self.stream, F32(data), ReduceOp::kSum);
        ASSERT_OK(self.stream.Synchronize());
        EXPECT_EQ(std::memcmp(data.data(), expected.data(), data.size() * sizeof(float)), 0)
            << size << " ranks, " << count << " elements, rank " << self.rank;
        EXPECT_EQ(self.world.bytes_sent(), AllReduceBytes(count, 4, size, self.rank));
      });
    }
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
  OnRanks(3, [&](Rank& self) {
    std::vector<float> data = {static_cast<float>(self.rank), self.rank == 1 ? NAN : 1.f};
    std::vector<float> low = data;
    self.world.AllReduce(self.stream, F32(data), ReduceOp::kMax);
    self.world.AllReduce(self.stream, F32(low), ReduceOp::kMin);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(data[0], 2.f);
    EXPECT_EQ(low[0], 0.f);
    EXPECT_TRUE(std::isnan(data[1]) && std::isnan(low[1]));
  });
}

TEST_P(CommContract, AllReduce_HalfPrecisionAndIntegers_AccumulateWide) {
  OnRanks(3, [&](Rank& self) {
    // 256 + 1 + 1: in bf16 (8 bits) each single addition would be lost.
    std::vector<uint16_t> bf16(5000, self.rank == 0 ? 0x4380 : 0x3F80);
    // 2048 + 1 + 1 in fp16 (11 bits).
    std::vector<uint16_t> f16(5000, self.rank == 0 ? 0x6800 : 0x3C00);
    std::vector<int64_t> i64 = {int64_t{1} << 40, self.rank};
    self.world.AllReduce(self.stream, Tensor(bf16.data(), DType::kBF16, {5000}), ReduceOp::kSum);
    self.world.AllReduce(self.stream, Tensor(f16.data(), DType::kF16, {5000}), ReduceOp::kSum);
    self.world.AllReduce(self.stream, Tensor(i64.data(), DType::kI64, {2}), ReduceOp::kSum);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(bf16, std::vector<uint16_t>(5000, 0x4381));  // 258
    EXPECT_EQ(f16, std::vector<uint16_t>(5000, 0x6801));   // 2050
    EXPECT_EQ(i64, (std::vector<int64_t>{3 * (int64_t{1} << 40), 3}));
  });
}

TEST_P(CommContract, ReduceScatterThenAllGather_EqualsAllReduce_BitForBit) {
  for (int size : {2, 4}) {
    const int64_t count = size * 300'000;
    const std::vector<float> expected = SumAsTree(size, count);
    OnRanks(size, [&](Rank& self) {
      std::vector<float> data = Awkward(self.rank, count);
      self.world.ReduceScatter(self.stream, F32(data), ReduceOp::kSum);
      self.world.AllGather(self.stream, F32(data));
      ASSERT_OK(self.stream.Synchronize());
      EXPECT_EQ(std::memcmp(data.data(), expected.data(), data.size() * sizeof(float)), 0);
      EXPECT_EQ(self.world.bytes_sent(), 2 * count * 4 * (size - 1) / size);
    });
  }
}

TEST_P(CommContract, Broadcast_FromEveryRoot_FillsEveryRank) {
  for (int size : {2, 3, 4}) {
    for (int64_t count : {3, 50'001}) {
      OnRanks(size, [&](Rank& self) {
        int64_t sent = 0;
        for (int root = 0; root < size; ++root) {
          std::vector<float> data = Awkward(self.rank, count);
          self.world.Broadcast(self.stream, F32(data), root);
          ASSERT_OK(self.stream.Synchronize());
          EXPECT_EQ(data, Awkward(root, count));
          sent += BroadcastBytes(count, 4, size, self.rank, root);
        }
        EXPECT_EQ(self.world.bytes_sent(), sent);
      });
    }
  }
}

TEST_P(CommContract, AllToAll_Transposes) {
  OnRanks(4, [&](Rank& self) {
    std::vector<float> in, out(4 * 1000);
    for (int to = 0; to < 4; ++to)
      in.insert(in.end(), 1000, static_cast<float>(10 * self.rank + to));
    self.world.AllToAll(self.stream, F32(in), F32(out));
    ASSERT_OK(self.stream.Synchronize());
    for (int from = 0; from < 4; ++from) {
      EXPECT_EQ(out[static_cast<size_t>(from * 1000 + 999)], 10 * from + self.rank);
    }
  });
}

TEST_P(CommContract, SendAndReceive_KeepTheirOrder) {
  OnRanks(2, [&](Rank& self) {
    std::vector<float> data(3);
    for (int i = 0; i < 3; ++i) {
      Tensor one(&data[static_cast<size_t>(i)], DType::kF32, {1});
      if (self.rank == 0) {
        data[static_cast<size_t>(i)] = static_cast<float>(i + 1);
        self.world.Send(self.stream, one, 1);
      } else {
        self.world.Receive(self.stream, one, 0);
      }
    }
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(data, (std::vector<float>{1, 2, 3}));
  });
}

TEST_P(CommContract, Group_EveryoneSendsFirst_NobodyWaitsForEver) {
  OnRanks(3, [&](Rank& self) {
    std::vector<float> out = Awkward(self.rank, 200'000), in(200'000);
    self.world.GroupBegin();
    self.world.Send(self.stream, F32(out), (self.rank + 1) % 3);
    self.world.Receive(self.stream, F32(in), (self.rank + 2) % 3);
    self.world.GroupEnd(self.stream);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(in, Awkward((self.rank + 2) % 3, 200'000));
  });
}

TEST_P(CommContract, Split_ByColorAndKey_MakesIndependentGroups) {
  OnRanks(4, [&](Rank& self) {
    // Even and odd ranks, each in descending order; then everyone again under another name.
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> half,
                         self.world.Split(self.rank % 2, -self.rank, "half"));
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> all, self.world.Split(0, 0, "all"));
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), self.rank >= 2 ? 0 : 1);
    EXPECT_EQ(half->name(), "half");
    EXPECT_EQ(all->rank(), self.rank);
    std::vector<float> one = {static_cast<float>(self.rank)}, two = one, three = one;
    half->AllReduce(self.stream, F32(one), ReduceOp::kSum);
    all->AllReduce(self.stream, F32(two), ReduceOp::kSum);
    self.world.AllReduce(self.stream, F32(three), ReduceOp::kMax);
    ASSERT_OK(self.stream.Synchronize());
    EXPECT_EQ(one[0], self.rank % 2 == 0 ? 2.f : 4.f);
    EXPECT_EQ(two[0], 6.f);
    EXPECT_EQ(three[0], 3.f);
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> alone, half->Split(half->rank(), 0, "one"));
    EXPECT_EQ(alone->size(), 1);
    EXPECT_OK(alone->Barrier());
  });
}

TEST_P(CommContract, TwoStreams_DifferentGroups_RunAtTheSameTime) {
  if (!GetParam().threaded_streams) GTEST_SKIP() << "eager streams do not overlap";
  OnRanks(2, [&](Rank& self) {
    std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
    ASSERT_OK_AND_ASSIGN(auto other, device->MakeStream({.threaded = true}));
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Communicator> second, self.world.Split(0, 0, "second"));
    std::vector<float> a = Awkward(self.rank, 100'000), b = a;
    // Opposite orders of enqueueing on the two ranks: only separate groups survive that.
    if (self.rank == 0) self.world.AllReduce(self.stream, F32(a), ReduceOp::kSum);
    second->AllReduce(*other, F32(b), ReduceOp::kSum);
    if (self.rank == 1) self.world.AllReduce(self.stream, F32(a), ReduceOp::kSum);
    ASSERT_OK(self.stream.Synchronize());
    ASSERT_OK(other->Synchronize());
    EXPECT_EQ(a, SumAsTree(2, 100'000));
    EXPECT_EQ(b, a);
  });
}

TEST_P(CommContract, GatherTexts_OfDifferentLengths_ReachEveryone) {
  OnRanks(3, [&](Rank& self) {
    const std::string mine(static_cast<size_t>(self.rank * 1000),
                           static_cast<char>('a' + self.rank));
    ASSERT_OK_AND_ASSIGN(auto all, GatherTexts(self.world, self.stream, mine));
    EXPECT_EQ(all, (std::vector<std::string>{"", std::string(1000, 'b'), std::string(2000, 'c')}));
  });
}

TEST_P(CommContract, Barrier_LetsNobodyPassBeforeAllHaveCome) {
  std::atomic<int> arrived{0};
  OnRanks(4, [&](Rank& self) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      ASSERT_OK(self.world.Barrier());
      EXPECT_GE(arrived.load(), 4 * round);
    }
  });
}

TEST_P(CommContract, PeerThatLeaves_FailsTheOthersWithUnavailable_Soon) {
  std::vector<std::unique_ptr<Communicator>> world = MakeWorld(GetParam(), 3, absl::Seconds(60));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
      ASSERT_OK_AND_ASSIGN(auto stream,
                           device->MakeStream({.threaded = GetParam().threaded_streams}));
      std::vector<float> data(100'000);
      const absl::Time start = absl::Now();
      world[static_cast<size_t>(rank)]->AllReduce(*stream, F32(data), ReduceOp::kSum);
      EXPECT_THAT(stream->Synchronize(),
                  StatusIs(absl::StatusCode::kUnavailable, HasSubstr("group world, rank")));
      EXPECT_LT(absl::Now() - start, absl::Seconds(20));
      // Unusable from now on, without waiting.
      EXPECT_FALSE(world[static_cast<size_t>(rank)]->Barrier().ok());
    });
  }
  world[2].reset();
  for (std::thread& thread : threads) thread.join();
}

TEST_P(CommContract, Abort_FromAnotherThread_EndsAWaitingCall) {
  std::vector<std::unique_ptr<Communicator>> world = MakeWorld(GetParam(), 2, absl::Seconds(60));
  std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
  ASSERT_OK_AND_ASSIGN(auto stream, device->MakeStream({.threaded = true}));
  std::vector<float> data(100'000), more(10);
  world[0]->AllReduce(*stream, F32(data), ReduceOp::kSum);  // rank 1 never comes
  world[0]->Abort(absl::CancelledError("the attempt has ended"));
  EXPECT_THAT(stream->Synchronize(),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("the attempt has ended")));
  world[0]->AllReduce(*stream, F32(more), ReduceOp::kSum);
  EXPECT_THAT(stream->Synchronize(), StatusIs(absl::StatusCode::kAborted));
  // The peer, when it comes, finds out at once.
  world[1]->AllReduce(*stream, F32(data), ReduceOp::kSum);
  EXPECT_THAT(stream->Synchronize(), StatusIs(absl::StatusCode::kUnavailable));
}

TEST_P(CommContract, PeerThatNeverComes_IsADeadlineExceeded) {
  std::vector<std::unique_ptr<Communicator>> world =
      MakeWorld(GetParam(), 2, absl::Milliseconds(50));
  std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
  ASSERT_OK_AND_ASSIGN(auto stream, device->MakeStream());
  std::vector<float> data(10);
  world[0]->AllReduce(*stream, F32(data), ReduceOp::kSum);
  EXPECT_THAT(stream->Synchronize(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("for rank 1")));
}

TEST_P(CommContract, AbortAtRandomMoments_NeverHangsNorTouchesFreedMemory) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 10; ++round) {
    std::vector<std::unique_ptr<Communicator>> world = MakeWorld(GetParam(), 3, absl::Seconds(60));
    const int spins = static_cast<int>(rng.Below(2000));
    const size_t aborter = rng.Below(3);
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        std::unique_ptr<kernels::Device> device = kernels::MakeCpuDevice(1);
        auto stream = device->MakeStream({.threaded = GetParam().threaded_streams});
        CHECK_OK(stream);
        absl::Status status;
        while (status.ok()) {
          std::vector<float> data(300'000);  // freed each time: a late write would be seen by asan
          world[rank]->AllReduce(**stream, F32(data), ReduceOp::kSum);
          status = (*stream)->Synchronize();
        }
        EXPECT_THAT(status, AnyOf(StatusIs(absl::StatusCode::kAborted),
                                  StatusIs(absl::StatusCode::kUnavailable)));
      });
    }
    for (int i = 0; i < spins; ++i) std::this_thread::yield();
    world[aborter]->Abort(absl::CancelledError("stop"));
    for (std::thread& thread : threads) thread.join();
  }
}

// The ranks of a group, as bits of a number.
int64_t MembersOf(Communicator& group, kernels::Stream& stream, int world_rank) {
  int64_t bits = int64_t{1} << world_rank;
  group.AllReduce(stream, Tensor(&bits, DType::kI64, {1}), ReduceOp::kSum);
  EXPECT_OK(stream.Synchronize());
  return bits;
}

TEST_P(CommContract, MeshGroups_JoinExactlyTheRanksThatTheMeshNames) {
  OnRanks(8, [](Rank& self) {
    for (const PerAxis& degrees : {PerAxis(2, 2, 1, 2), PerAxis(1, 4, 2, 1), PerAxis(1, 8, 1, 1)}) {
      ASSERT_OK_AND_ASSIGN(const Mesh mesh, Mesh::Make({.degrees = degrees}, 8));
      ASSERT_OK_AND_ASSIGN(auto groups, MeshGroups::Make(mesh, self.world, 2));
      const std::vector<std::vector<Axis>> sets = {{Axis::kData},
                                                   {Axis::kTensor},
                                                   {Axis::kContext},
                                                   {Axis::kPipeline},
                                                   {Axis::kContext, Axis::kData},
                                                   {Axis::kTensor, Axis::kPipeline}};
      for (const std::vector<Axis>& axes : sets) {
        int64_t expected = 0;
        for (const int rank : mesh.GroupOf(self.rank, axes)) expected |= int64_t{1} << rank;
        EXPECT_EQ(MembersOf(groups->Along(axes), self.stream, self.rank), expected);
      }
      const std::vector<int> gradient = mesh.GroupOf(self.rank, {Axis::kData, Axis::kContext});
      int64_t shard = 0, replicas = 0;
      for (int i = 0; i < static_cast<int>(gradient.size()); ++i) {
        const int64_t bit = int64_t{1} << gradient[static_cast<size_t>(i)];
        if (i / 2 == groups->gradient_rank() / 2) shard |= bit;
        if (i % 2 == groups->gradient_rank() % 2) replicas |= bit;
      }
      EXPECT_EQ(MembersOf(groups->shard(), self.stream, self.rank), shard);
      EXPECT_EQ(MembersOf(groups->gather(), self.stream, self.rank), shard);
      EXPECT_EQ(MembersOf(groups->replicate(), self.stream, self.rank), replicas);
      EXPECT_EQ(groups->shard().rank(), groups->gradient_rank() % 2);
    }
    EXPECT_THAT(MeshGroups::MakeData(self.world, 3).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 ranks")));
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CommContract,
                         ::testing::Values(Backend{"local_eager", false, false},
                                           Backend{"local_threaded", false, true},
                                           Backend{"gloo_eager", true, false},
                                           Backend{"gloo_threaded", true, true}),
                         [](const auto& info) { return std::string(info.param.name); });

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

TEST(GlooCommunicator, RankThatIsMissing_IsADeadlineExceededOfTheMeeting) {
  MemoryKeyValueStore store;
  GlooOptions options;
  options.connect_timeout = absl::Milliseconds(50);
  EXPECT_THAT(MakeGlooCommunicator(store, 0, 2, options),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("meeting of 2 ranks")));
}

TEST(GlooCommunicator, AddressOfNoInterface_IsInvalid) {
  MemoryKeyValueStore store;
  GlooOptions options;
  options.interface_address = "not an address";
  EXPECT_THAT(MakeGlooCommunicator(store, 0, 2, options),
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
  auto world = MakeGlooCommunicator(store, rank, 3, GlooOptions());
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

TEST(GlooCommunicator, ProcessKilledInTheMiddle_IsNoticedByThePeersWithinASecond) {
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
