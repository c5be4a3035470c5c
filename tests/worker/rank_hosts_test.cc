#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/check.h"
#include "parallel/comm/communicator.h"
#include "tests/support/status_matchers.h"
#include "worker/rank/hosts.h"

namespace muster::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Makes a rank on each of the named hosts.
std::vector<RankHost> On(const std::vector<const char*>& hosts) {
  std::vector<RankHost> ranks;
  for (const char* host : hosts) {
    ranks.push_back({std::string("worker-") + host, host, std::string("10.0.0.") + host, host});
  }
  return ranks;
}

parallel::Mesh MeshOf(const parallel::PerAxis& degrees, int ranks) {
  auto mesh = parallel::Mesh::Make({.degrees = degrees}, ranks);
  CHECK_OK(mesh);
  return *mesh;
}

TEST(RankHosts, Table_HasOneLinePerHostWithItsRanks) {
  EXPECT_THAT(
      HostTable(On({"1", "1", "2", "2", "1", "3"})),
      ElementsAre("host 1 (worker-1, 10.0.0.1): ranks 0-1, 4",
                  "host 2 (worker-2, 10.0.0.2): ranks 2-3", "host 3 (worker-3, 10.0.0.3): rank 5"));
  EXPECT_EQ(HostCount(On({"1", "1", "2", "2", "1", "3"})), 3);
}

TEST(RankHosts, TwoDaemonsOfOneHost_AreOneLine) {
  std::vector<RankHost> ranks = On({"1", "1"});
  ranks[1].worker = "worker-b";
  EXPECT_THAT(HostTable(ranks),
              ElementsAre("host 1 (worker-1, 10.0.0.1; worker-b, 10.0.0.1): ranks 0-1"));
}

TEST(RankHosts, AxesAcrossHosts_AreThoseWithAGroupOnTwo) {
  using parallel::Axis;
  // Tensor 2 x data 2, numbered along tensor first.
  const parallel::Mesh mesh = MeshOf({1, 2, 1, 2}, 4);
  EXPECT_THAT(AxesAcrossHosts(mesh, On({"1", "1", "1", "1"})), IsEmpty());
  EXPECT_THAT(AxesAcrossHosts(mesh, On({"1", "1", "2", "2"})), ElementsAre(Axis::kData));
  EXPECT_THAT(AxesAcrossHosts(mesh, On({"1", "2", "1", "2"})), ElementsAre(Axis::kTensor));
  EXPECT_THAT(AxesAcrossHosts(mesh, On({"1", "2", "2", "2"})),
              ElementsAre(Axis::kData, Axis::kTensor));
}

TEST(RankHosts, Gather_GivesEveryRankTheHostsOfAll) {
  auto world = parallel::MakeLocalCommunicators(3, absl::Seconds(60));
  const std::vector<RankHost> places = On({"1", "2", "2"});
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = kernels::MakeCpuDevice(1);
      const auto all = GatherHosts(*world[rank], *device, places[rank]);
      ASSERT_OK(all);
      EXPECT_EQ(HostTable(*all), HostTable(places));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace muster::worker
