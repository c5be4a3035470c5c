// Restoring and saving on several ranks, whatever their storage does: ranks share the verification,
// agree on the newest sound checkpoint, and wait for each other longer than a collective may take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/mutex.h"
#include "parallel/model/parameters.h"
#include "parallel/train/control_channel.h"
#include "parallel/train/failure.h"
#include "tests/parity/harness.h"
#include "tests/support/forwarding_file_system.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

using ::muster::testing::ForwardingFileSystem;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- the channel -------------------------------------------------------------------------------

// Runs `body` on `ranks` threads with a channel each, over collectives that wait for `timeout`.
void OnRanks(int ranks, absl::Duration timeout,
             const std::function<void(int rank, ControlChannel& channel)>& body) {
  const auto world = MakeLocalCommunicators(ranks, timeout);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { body(rank, **ControlChannel::Make(*world[rank], absl::Milliseconds(10))); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Opens when it has been told `count` times.
class Latch {
 public:
  explicit Latch(int count) : left_(count) {}
  void Tell() {
    MutexLock lock(&mutex_);
    --left_;
    open_ = left_ <= 0;
  }
  void Await() {
    MutexLock lock(&mutex_);
    mutex_.Await(Condition(&open_));
  }

 private:
  Mutex mutex_;
  int left_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(ControlChannel, WorkThatTakesLongerThanACollectiveMay_IsWaitedFor) {
  // Rank 0 hears of progress at most every 10 ms, so 300 times are three timeouts.
  Latch long_enough(300);
  OnRanks(3, absl::Seconds(1), [&](int rank, ControlChannel& channel) {
    const auto all = channel.Run(
        [&](ControlChannel::Work& work) {
          work.Expect(100);
          if (rank == 1) long_enough.Await();
          work.Advance(100);
          return absl::OkStatus();
        },
        [&](double) {
          if (rank == 0) long_enough.Tell();
        });
    ASSERT_OK(all);
    EXPECT_TRUE(*all);
    const auto texts = channel.Gather(absl::StrCat("rank ", rank));
    ASSERT_OK(texts);
    EXPECT_EQ(*texts, (std::vector<std::string>{"rank 0", "rank 1", "rank 2"}));
  });
}

TEST(ControlChannel, FailureOfOneRank_IsKnownToTheOthersWhileTheyWork) {
  OnRanks(3, absl::Seconds(60), [&](int rank, ControlChannel& channel) {
    const auto all = channel.Run(
        [&](ControlChannel::Work& work) -> absl::Status {
          if (rank == 2) return absl::DataLossError("damaged");
          while (!work.pointless()) std::this_thread::yield();
          return absl::CancelledError("pointless");
        },
        [](double) {});
    ASSERT_OK(all);
    EXPECT_FALSE(*all);
  });
}

TEST(ControlChannel, LossOfAPeer_EndsTheWaitWithACommunicationError) {
  const auto world = MakeLocalCommunicators(2, absl::Seconds(60));
  auto channel = ControlChannel::Make(*world[0], absl::Milliseconds(10));
  ASSERT_OK(channel);
  std::thread peer([&] { world[1]->Abort(absl::CancelledError("the rank has gone")); });
  const auto all =
      (*channel)->Run([](ControlChannel::Work&) { return absl::OkStatus(); }, [](double) {});
  peer.join();
  EXPECT_EQ(DomainOf(all.status()), FailureDomain::kCommunication) << all.status();
}

// ---- restoring ---------------------------------------------------------------------------------

// What a rank reads of shards, in total.
class CountingFiles : public ForwardingFileSystem {
 public:
  CountingFiles(FileSystem& inner, int64_t& bytes) : ForwardingFileSystem(inner), bytes_(bytes) {}
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    bytes_ += length;
    return inner_.ReadRange(path, offset, length);
  }

 private:
  int64_t& bytes_;
};

// Calls `before` in front of every read and write of a shard.
class WatchedFiles : public ForwardingFileSystem {
 public:
  WatchedFiles(FileSystem& inner, std::function<void()> before)
      : ForwardingFileSystem(inner), before_(std::move(before)) {}
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    before_();
    return inner_.ReadRange(path, offset, length);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    before_();
    return inner_.Create(path);
  }

 private:
  const std::function<void()> before_;
};

class Restore : public ::testing::Test {
 protected:
  // Eight steps of four ranks, of which each owns a fourth of the state, with a checkpoint behind
  // the fourth and the eighth.
  Case Base() {
    Case run = Data(4, /*zero=*/1);
    run.steps = 8;
    return run;
  }
  std::vector<RestoreCandidate> Save() {
    Case run = Base();
    run.save_every = 4;
    return harness_.Train(run)[0].saved;
  }
  // Continues from the candidates up to step 12.
  Case Continue(const std::vector<RestoreCandidate>& candidates) {
    Case run = Base();
    run.steps = 12;
    run.restore = candidates;
    return run;
  }
  int64_t ShardBytes(const std::string& directory) {
    int64_t bytes = 0;
    const std::vector<std::string> names = *files_->List(directory);
    for (const std::string& name : names) {
      if (absl::EndsWith(name, ".safetensors")) bytes += *files_->Size(directory + "/" + name);
    }
    return bytes;
  }
  void FlipLastByte(const std::string& path) {
    std::string bytes = *files_->Read(path);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
  }

  Harness harness_;
  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
};

TEST_F(Restore, EveryByte_IsVerifiedOncePerJobByRanksThatShareTheWork) {
  const std::vector<RestoreCandidate> saved = Save();
  ASSERT_EQ(saved.size(), 2u);
  Case run = Continue(saved);
  run.steps = 9;
  std::vector<int64_t> bytes(4);
  run.wrap_files = [&](int rank, FileSystem& files) {
    return std::make_unique<CountingFiles>(files, bytes[rank]);
  };
  harness_.Train(run);
  // Once to verify it, and once to load it: each rank loads the fourth that it owns. Chunks are not
  // cut, hence the tolerance.
  const auto all = static_cast<double>(ShardBytes(saved[0].directory));
  double sum = 0;
  for (const int64_t of_rank : bytes) {
    sum += static_cast<double>(of_rank);
    EXPECT_GT(static_cast<double>(of_rank), 2 * all / 4 * 0.7);
    EXPECT_LT(static_cast<double>(of_rank), 2 * all / 4 * 1.3);
  }
  EXPECT_LT(sum, 2.1 * all);
  EXPECT_GT(sum, 1.9 * all);
}

TEST_F(Restore, DamageThatAnyRankFinds_MakesAllFallBackAndNamesTheFile) {
  const std::vector<RestoreCandidate> saved = Save();
  const RankResult sound = harness_.Train(Continue({saved[1]}))[0];
  for (const int shard : {0, 3}) {
    const std::vector<RestoreCandidate> again = Save();
    const std::string file = absl::StrCat("/rank-0000", shard, ".safetensors");
    FlipLastByte(again[0].directory + file);
    const std::vector<RankResult> results = harness_.Train(Continue(again));
    EXPECT_EQ(results[0].damaged, std::vector<int64_t>{8});
    ASSERT_EQ(results[0].damage.size(), 1u);
    EXPECT_THAT(std::string(results[0].damage[0].message()), HasSubstr(file));
    for (const RankResult& result : results) EXPECT_EQ(result.losses, sound.losses);
  }
}

// Two hosts with two ranks each, which verify what their own host has saved.
TEST_F(Restore, DamageOnTheDiskOfOneHost_MakesAllFallBack) {
  Case first = Data(4, /*zero=*/1, /*shards=*/2);
  first.steps = 8;
  first.hosts = {0, 0, 1, 1};
  Case second = first;
  second.steps = 12;
  first.save_every = 4;
  second.restore = harness_.Train(first)[0].saved;
  ASSERT_EQ(second.restore.size(), 2u);
  Case sound = second;
  sound.restore.erase(sound.restore.begin());
  const std::string directory =
      absl::StrReplaceAll(second.restore[0].directory, {{"/host-0/", "/host-1/"}});
  FlipLastByte(directory + "/rank-00003.safetensors");
  const std::vector<RankResult> results = harness_.Train(second);
  EXPECT_EQ(results[0].damaged, std::vector<int64_t>{8});
  ASSERT_EQ(results[0].damage.size(), 1u);
  EXPECT_THAT(std::string(results[0].damage[0].message()), HasSubstr("host-1"));
  EXPECT_EQ(results[0].losses, harness_.Train(sound)[0].losses);
}

TEST_F(Restore, OneSlowRank_IsWaitedForLongerThanACollectiveMayTake) {
  const std::vector<RestoreCandidate> saved = Save();
  const RankResult fast = harness_.Train(Continue(saved))[0];
  Case run = Continue(saved);
  run.collective_timeout = absl::Seconds(3);
  run.adjust = [](TrainerOptions& options) { options.control_interval = absl::Milliseconds(20); };
  // Rank 0 waits and hears of progress at most every 20 ms: 250 times take longer than the limit.
  Latch long_enough(250);
  run.on_progress = [&](int rank, absl::string_view phase) {
    if (rank == 0 && phase == "verifying") long_enough.Tell();
  };
  run.wrap_files = [&](int rank, FileSystem& files) {
    return std::make_unique<WatchedFiles>(files, [&, rank] {
      if (rank == 2) long_enough.Await();
    });
  };
  const std::vector<RankResult> results = harness_.Train(run);
  EXPECT_EQ(results[0].losses, fast.losses);
  EXPECT_THAT(results[0].progress, Contains("verifying"));
}

TEST_F(Restore, OneSlowWriter_IsWaitedForLongerThanACollectiveMayTake) {
  Case run = Base();
  run.save_every = 8;
  run.collective_timeout = absl::Seconds(3);
  run.adjust = [](TrainerOptions& options) { options.control_interval = absl::Milliseconds(20); };
  Latch long_enough(250);
  run.on_progress = [&](int rank, absl::string_view phase) {
    if (rank == 0 && phase == "saving") long_enough.Tell();
  };
  run.wrap_files = [&](int rank, FileSystem& files) {
    return std::make_unique<WatchedFiles>(files, [&, rank] {
      if (rank == 1) long_enough.Await();
    });
  };
  EXPECT_EQ(harness_.Train(run)[0].saved.size(), 1u);
}

// ---- first weights -----------------------------------------------------------------------------

TEST_F(Restore, WeightsOfTheSeed_AreNeitherDrawnNorGatheredWhenACheckpointIsRestored) {
  Case fresh = Base();
  fresh.steps = 1;
  fresh.layout.global_batch = 8;
  const RankResult begun = harness_.Train(fresh)[0];
  EXPECT_THAT(begun.phases, Contains("initializing"));

  Case saving = fresh;
  saving.save_every = 1;
  Case resumed = saving;
  resumed.steps = 2;
  resumed.restore = harness_.Train(saving)[0].saved;
  const RankResult result = harness_.Train(resumed)[0];
  ASSERT_EQ(result.losses.size(), 1u);
  EXPECT_THAT(result.phases, Not(Contains("initializing")));
  // One gather before the step and one behind it, as in a run that begins.
  EXPECT_EQ(result.gathered_bytes, begun.gathered_bytes);
}

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}
// Processor time so far: of the whole process or of the calling thread.
double ProcessorSeconds(int who) {
  rusage usage;
  getrusage(who, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

TEST(DrawingWeights, ManyElements_TakeTheThreadsOfTheRankAndNoMore) {
  Parameter parameter;
  parameter.name = "table";
  parameter.global_shape = {4096, 4096};
  parameter.box = Box::Whole(parameter.global_shape);
  parameter.initializer = Initializer::kNormal;
  parameter.stddev = 0.02f;
  std::vector<float> values(parameter.box.elements()), expected;
  for (const int threads : {1, 4}) {
    const double process = ProcessorSeconds(RUSAGE_SELF), thread = ProcessorSeconds(RUSAGE_THREAD);
    Initialize(parameter, 7, 0, parameter.box.elements(), values.data(), threads);
    // This thread does its share of the work.
    const double share =
        (ProcessorSeconds(RUSAGE_THREAD) - thread) / (ProcessorSeconds(RUSAGE_SELF) - process);
    if (threads == 1) {
      EXPECT_GT(share, 0.7);  // two threads would do half each
      expected = values;
    } else {
      EXPECT_LT(share, 0.6);
      EXPECT_EQ(values, expected);
    }
  }
}

}  // namespace
}  // namespace muster::parallel::parity
