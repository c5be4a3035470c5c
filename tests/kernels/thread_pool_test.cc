#include "kernels/device/thread_pool.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace muster::kernels {
namespace {

TEST(ThreadPool, Run_AnyNumberOfThreadsAndChunks_DoesEachChunkOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t chunks : {0, 1, 2, 3, 100, 1000}) {
      std::vector<std::atomic<int>> done(chunks);
      pool.Run(chunks, [&](int64_t chunk) { ++done[chunk]; });
      for (const std::atomic<int>& count : done) ASSERT_EQ(count, 1);
    }
  }
}

TEST(ThreadPool, Run_ManyShortLoopsInARow_SeesWhatTheLoopBeforeWrote) {
  ThreadPool pool(3);
  std::vector<int64_t> values(64);
  for (int round = 0; round < 3000; ++round) {
    pool.Run(64, [&](int64_t chunk) { values[chunk] += values[(chunk)] == round ? 1 : 1000000; });
  }
  for (int64_t value : values) EXPECT_EQ(value, 3000);
}

TEST(ThreadPool, Run_InsideALoopAndFromTwoThreads_DoesAll) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  auto loop = [&] {
    for (int round = 0; round < 200; ++round) {
      pool.Run(4, [&](int64_t) { pool.Run(4, [&](int64_t chunk) { sum += chunk; }); });
    }
  };
  std::thread other(loop);
  loop();
  other.join();
  EXPECT_EQ(sum, 2 * 200 * 4 * 6);
}

}  // namespace
}  // namespace muster::kernels
