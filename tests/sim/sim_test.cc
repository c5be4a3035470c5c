// sim_test                      runs the tests: the fixed seeds and checks of the simulator itself
// sim_test --sim N [--first S]  N seeds from S; prints each failing seed
// sim_test --sim 1 --first S --trace   one seed, event by event
// --large: clusters of 20 to 50 workers; --day: 24 hours each; --reachability, --restore: only
// those faults
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/sim/world.h"

namespace muster::sim {
namespace {

struct Outcome {
  std::vector<std::pair<uint64_t, std::string>> failed;
  std::map<std::string, int64_t> counts;
  int64_t events = 0;
  absl::Duration time;  // simulated
};

// Runs seeds, which are independent, on all cores.
Outcome RunSeeds(uint64_t first, int64_t count, Faults faults = Faults::kAll,
                 Options::Scale scale = Options::Scale::kSmall) {
  const int threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<Outcome> parts(threads);
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      for (int64_t i = t; i < count; i += threads) {
        Options options;
        options.seed = first + static_cast<uint64_t>(i);
        options.faults = faults;
        options.scale = scale;
        const Result result = Simulate(options);
        if (!result.violation.empty()) {
          parts[t].failed.emplace_back(options.seed, result.violation);
        }
        for (const auto& [what, times] : result.counts) parts[t].counts[what] += times;
        parts[t].events += result.events;
        parts[t].time += result.time;
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  Outcome all;
  for (Outcome& part : parts) {
    all.failed.insert(all.failed.end(), part.failed.begin(), part.failed.end());
    for (const auto& [what, times] : part.counts) all.counts[what] += times;
    all.events += part.events;
    all.time += part.time;
  }
  std::sort(all.failed.begin(), all.failed.end());
  return all;
}

void Print(const Outcome& outcome, int64_t count) {
  for (const auto& [seed, violation] : outcome.failed) {
    std::printf("seed %llu %s\n    repeat: sim_test --sim 1 --first %llu --trace\n",
                static_cast<unsigned long long>(seed), violation.c_str(),
                static_cast<unsigned long long>(seed));
  }
  std::printf("%lld seeds, %lld events, %zu failed\n", static_cast<long long>(count),
              static_cast<long long>(outcome.events), outcome.failed.size());
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  const double cpu_seconds =
      static_cast<double>(used.ru_utime.tv_sec) + 1e-6 * static_cast<double>(used.ru_utime.tv_usec);
  const double days = absl::ToDoubleHours(outcome.time) / 24;
  std::printf("%.2f simulated days, %.1f processor seconds: %.0f cluster-days per CPU-hour\n", days,
              cpu_seconds, days / cpu_seconds * 3600);
  for (const auto& [what, times] : outcome.counts) {
    std::printf("  %-40s %lld\n", what.c_str(), static_cast<long long>(times));
  }
}

// Sanitizers, which are some 20 times slower, set the number of the fixed seeds: a few reach the
// code, and prove nothing about how often faults happen.
const char* FewSeeds() { return std::getenv("MUSTER_SIM_SEEDS"); }
int64_t FixedSeeds() { return FewSeeds() == nullptr ? 2000 : std::atoll(FewSeeds()); }

// Of the tests with one kind of fault.
int64_t SeedsOfAKind() { return std::max<int64_t>(5, FixedSeeds() / 10); }

TEST(Simulation, FixedSeeds_KeepEveryInvariantAndEndEveryJob) {
  const Outcome outcome = RunSeeds(1, FixedSeeds());
  Print(outcome, FixedSeeds());
  EXPECT_TRUE(outcome.failed.empty());
  if (FewSeeds() != nullptr) return;
  // The seeds prove nothing if a fault never happens.
  for (const char* what : {"ended between the same two again",
                           "USAGE_CLASS_HUNG",
                           "EVENT_KIND_RANKS_REPLACED",
                           "replaced for a drain",
                           "started anew",
                           "coordinator crash",
                           "lost fsync",
                           "daemon crash",
                           "daemon crash between records",
                           "host crash",
                           "rank killed",
                           "gang killed",
                           "gang hung",
                           "partition",
                           "coordinator pause",
                           "all cut off",
                           "cut in one direction",
                           "slow disk",
                           "slow disk of a daemon",
                           "daemon's disk refused a write",
                           "daemon pause",
                           "rack cut off",
                           "backup restored",
                           "disk lost",
                           "older daemon",
                           "device shared",
                           "clock step",
                           "broken session",
                           "reordered",
                           "duplicated",
                           "re-attached",
                           "launch refused",
                           "start refused",
                           "struck while it prepares",
                           "link broken",
                           "preflight failed",
                           "ended between two",
                           "steps replayed",
                           "USAGE_CLASS_AWAY",
                           "USAGE_CLASS_REPLAYED",
                           "USAGE_CLASS_SPARE",
                           "EVENT_KIND_WORKER_FAULT",
                           "EVENT_KIND_WORKER_FORGIVEN",
                           "queues defined",
                           "tenant at its limit",
                           "recovery compared",
                           "plans made again",
                           "stopped at a step boundary",
                           "time limit reached",
                           "EVENT_KIND_SLOTS_KEPT",
                           "EVENT_KIND_WORKER_LOST",
                           "EVENT_KIND_CHECKPOINT_REFUSED",
                           "cordon",
                           "drain",
                           "reservation",
                           "placed on a reserved device",
                           "ended for maintenance",
                           "resized",
                           "EVENT_KIND_WORKER_DRAINED",
                           "JOB_STATE_SUCCEEDED",
                           "JOB_STATE_FAILED",
                           "JOB_STATE_CANCELLED"}) {
    EXPECT_GT(outcome.counts.count(what), 0u) << what << " never happened";
  }
}

TEST(Simulation, LargeClusters_KeepEveryInvariantAndEndEveryJob) {
  const int64_t seeds = std::max<int64_t>(1, FixedSeeds() / 250);
  const Outcome outcome = RunSeeds(1, seeds, Faults::kAll, Options::Scale::kLarge);
  Print(outcome, seeds);
  EXPECT_TRUE(outcome.failed.empty());
}

TEST(Simulation, DaysOfTraining_KeepEveryInvariantAndEndEveryJob) {
  const int64_t seeds = FixedSeeds() / 1000;
  if (seeds == 0) GTEST_SKIP() << "a day takes minutes under a sanitizer";
  const Outcome outcome = RunSeeds(1, seeds, Faults::kAll, Options::Scale::kDay);
  Print(outcome, seeds);
  EXPECT_TRUE(outcome.failed.empty());
  EXPECT_GE(outcome.time, seeds * absl::Hours(20));
}

TEST(Simulation, SameSeedTwice_GivesTheSameTrace) {
  for (int64_t seed = 1; seed <= std::min<int64_t>(20, SeedsOfAKind()); ++seed) {
    Options options;
    options.seed = static_cast<uint64_t>(seed);
    const Result first = Simulate(options);
    const Result second = Simulate(options);
    EXPECT_EQ(first.trace_hash, second.trace_hash) << "seed " << seed;
    EXPECT_EQ(first.events, second.events) << "seed " << seed;
  }
}

TEST(Simulation, WithoutFaults_NoAttemptIsRepeated) {
  for (int64_t seed = 1; seed <= std::min<int64_t>(50, SeedsOfAKind()); ++seed) {
    Options options;
    options.seed = static_cast<uint64_t>(seed);
    options.faults = Faults::kNone;
    Result result = Simulate(options);
    EXPECT_EQ(result.violation, "") << "seed " << seed;
    EXPECT_EQ(result.counts["attempt repeated"], 0) << "seed " << seed;
    EXPECT_EQ(result.counts["EVENT_KIND_WORKER_UNREACHABLE"], 0) << "seed " << seed;
  }
}

TEST(Simulation, CoordinatorAndDaemonsKilled_CostNoAttemptAndNoStep) {
  std::map<std::string, int64_t> counts;
  for (int64_t seed = 1; seed <= SeedsOfAKind(); ++seed) {
    Options options;
    options.seed = static_cast<uint64_t>(seed);
    options.faults = Faults::kServices;
    Result result = Simulate(options);
    EXPECT_EQ(result.violation, "") << "seed " << seed;
    EXPECT_EQ(result.counts["attempt repeated"], 0) << "seed " << seed;
    EXPECT_EQ(result.counts["steps replayed"], 0) << "seed " << seed;
    EXPECT_EQ(result.counts["sound job failed"], 0) << "seed " << seed;
    for (const auto& [what, times] : result.counts) counts[what] += times;
  }
  if (FewSeeds() != nullptr) return;
  // The seeds prove nothing with fewer faults.
  EXPECT_GT(counts["coordinator crash"], 2 * SeedsOfAKind());
  EXPECT_GT(counts["daemon crash"], 2 * SeedsOfAKind());
  EXPECT_GT(counts["re-attached"], SeedsOfAKind() / 4);
}

TEST(Simulation, CoordinatorStoppedOrCutOff_CostsNoAttemptAndNoStep) {
  std::map<std::string, int64_t> counts;
  for (int64_t seed = 1; seed <= SeedsOfAKind(); ++seed) {
    Options options;
    options.seed = static_cast<uint64_t>(seed);
    options.faults = Faults::kReachability;
    Result result = Simulate(options);
    EXPECT_EQ(result.violation, "") << "seed " << seed;
    EXPECT_EQ(result.counts["EVENT_KIND_WORKER_LOST"], 0) << "seed " << seed;
    EXPECT_EQ(result.counts["attempt repeated"], 0) << "seed " << seed;
    EXPECT_EQ(result.counts["steps replayed"], 0) << "seed " << seed;
    EXPECT_EQ(result.counts["sound job failed"], 0) << "seed " << seed;
    for (const auto& [what, times] : result.counts) counts[what] += times;
  }
  if (FewSeeds() != nullptr) return;
  EXPECT_GT(counts["coordinator pause"], 2 * SeedsOfAKind());
  EXPECT_GT(counts["all cut off"], SeedsOfAKind());
  EXPECT_GT(counts["rack cut off"], SeedsOfAKind() / 4);
}

TEST(Simulation, OlderStateRestored_ReusesNoEpochAndEndsEveryJob) {
  std::map<std::string, int64_t> counts;
  for (int64_t seed = 1; seed <= SeedsOfAKind(); ++seed) {
    Options options;
    options.seed = static_cast<uint64_t>(seed);
    options.faults = Faults::kRestore;
    const Result result = Simulate(options);
    EXPECT_EQ(result.violation, "") << "seed " << seed;
    for (const auto& [what, times] : result.counts) counts[what] += times;
  }
  if (FewSeeds() != nullptr) return;
  EXPECT_GE(counts["backup restored"], SeedsOfAKind() / 12);
  EXPECT_GT(counts["attempt repeated"], SeedsOfAKind() / 50);
}

TEST(Simulation, RanksKilled_ReplayLessThanOneIntervalEach) {
  std::map<std::string, int64_t> counts;
  for (int64_t seed = 1; seed <= SeedsOfAKind(); ++seed) {
    Options options;
    options.seed = static_cast<uint64_t>(seed);
    options.faults = Faults::kRanks;  // with these CheckReplay makes no exception
    const Result result = Simulate(options);
    EXPECT_EQ(result.violation, "") << "seed " << seed;
    for (const auto& [what, times] : result.counts) counts[what] += times;
  }
  if (FewSeeds() != nullptr) return;
  EXPECT_GT(counts["rank killed"] + counts["gang killed"], 2 * SeedsOfAKind());
  EXPECT_GT(counts["steps replayed"], SeedsOfAKind());
}

}  // namespace
}  // namespace muster::sim

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int64_t seeds = 0;
  uint64_t first = 1;
  bool trace = false;
  auto scale = muster::sim::Options::Scale::kSmall;
  muster::sim::Faults faults = muster::sim::Faults::kAll;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--trace") {
      trace = true;
    } else if (flag == "--large") {
      scale = muster::sim::Options::Scale::kLarge;
    } else if (flag == "--day") {
      scale = muster::sim::Options::Scale::kDay;
    } else if (flag == "--reachability") {
      faults = muster::sim::Faults::kReachability;
    } else if (flag == "--restore") {
      faults = muster::sim::Faults::kRestore;
    } else if (flag == "--sim" && i + 1 < argc) {
      seeds = std::atoll(argv[++i]);
    } else if (flag == "--first" && i + 1 < argc) {
      first = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr,
                   "usage: %s [--sim SEEDS [--first SEED] [--trace]] [--large | --day] "
                   "[--reachability | --restore]\n",
                   argv[0]);
      return 2;
    }
  }
  if (seeds == 0) return RUN_ALL_TESTS();
  if (trace) {
    muster::sim::Options options;
    options.seed = first;
    options.trace = true;
    options.faults = faults;
    options.scale = scale;
    const muster::sim::Result result = muster::sim::Simulate(options);
    std::printf("%s\n", result.violation.empty() ? "sound" : result.violation.c_str());
    return result.violation.empty() ? 0 : 1;
  }
  const muster::sim::Outcome outcome = muster::sim::RunSeeds(first, seeds, faults, scale);
  muster::sim::Print(outcome, seeds);
  return outcome.failed.empty() ? 0 : 1;
}
