#include "worker/daemon/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace muster::worker {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

// This host is "here" and has two networks; the coordinator, "head", is on the first.
NetworkView TwoNetworks() {
  NetworkView network;
  network.interfaces = [] {
    return std::vector<InterfaceAddress>{{"lo", "127.0.0.1"},
                                         {"eth0", "fe80::5%eth0"},
                                         {"eth0", "10.0.0.5"},
                                         {"eth0", "fd00::5"},
                                         {"ib0", "192.168.7.5"}};
  };
  network.source_towards = [](const std::string& to) -> std::string {
    if (to == "127.0.0.1") return "127.0.0.1";
    if (to == "10.0.0.1" || to == "192.0.2.1") return "10.0.0.5";
    return "";
  };
  network.resolve = [](const std::string& host) -> std::vector<std::string> {
    if (host == "head") return {"10.0.0.1"};
    if (host == "here") return {"127.0.0.1"};
    if (host == "10.0.0.1" || host == "203.0.113.9") return {host};
    return {};
  };
  return network;
}

std::string AddressOf(const AddressChoice& choice, const std::string& coordinator = "head:7070") {
  const auto found = FindAddress(TwoNetworks(), choice, coordinator);
  return found.ok() ? found->address : std::string(found.status().message());
}

TEST(FindAddress, ByDefault_IsThatOfTheRouteToTheCoordinator) {
  EXPECT_EQ(AddressOf({}), "10.0.0.5");
  EXPECT_EQ(AddressOf({}, "10.0.0.1:7070"), "10.0.0.5");
}

TEST(FindAddress, CoordinatorOnThisHost_HasAnOutsideAddressToo) {
  const auto found = FindAddress(TwoNetworks(), {}, "here:7070");
  ASSERT_OK(found);
  EXPECT_EQ(found->address, "127.0.0.1");
  EXPECT_EQ(found->outside_address, "10.0.0.5");
}

TEST(FindAddress, Flags_ChooseByAddressNameAndNetwork) {
  EXPECT_EQ(AddressOf({.address = "192.168.7.5"}), "192.168.7.5");
  EXPECT_EQ(AddressOf({.interface = "ib0"}), "192.168.7.5");
  EXPECT_EQ(AddressOf({.interface = "eth0"}), "10.0.0.5") << "not the link-local one before it";
  EXPECT_EQ(AddressOf({.interface = "192.168.0.0/16"}), "192.168.7.5");
  EXPECT_EQ(AddressOf({.interface = "fd00::/8"}), "fd00::5");
  EXPECT_EQ(AddressOf({.interface = "fd00::5"}), "fd00::5");
}

TEST(FindAddress, FlagThatNamesNothingHere_SaysWhatThereIs) {
  for (const AddressChoice& choice :
       {AddressChoice{.address = "10.9.9.9"}, AddressChoice{.interface = "eth7"},
        AddressChoice{.interface = "172.16.0.0/12"}}) {
    EXPECT_THAT(FindAddress(TwoNetworks(), choice, "head:7070"),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("192.168.7.5 (ib0)")));
  }
  for (const AddressChoice& choice :
       {AddressChoice{.address = "eth0"}, AddressChoice{.address = "0.0.0.0"},
        AddressChoice{.interface = "::"}, AddressChoice{.interface = "10.0.0.0/99"},
        AddressChoice{.address = "10.0.0.5", .interface = "eth0"}}) {
    EXPECT_THAT(FindAddress(TwoNetworks(), choice, "head:7070"),
                StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST(FindAddress, WithoutARoute_IsUnavailable) {
  EXPECT_THAT(FindAddress(TwoNetworks(), {}, "nowhere:7070"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("does not resolve")));
  EXPECT_THAT(FindAddress(TwoNetworks(), {}, "203.0.113.9:7070"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no route")));
}

TEST(CheckPortRange, TwoPortsForEachRank) {
  EXPECT_OK(CheckPortRange("", 100));
  EXPECT_OK(CheckPortRange("20000-20007", 4));
  EXPECT_THAT(CheckPortRange("20000-20006", 4),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has 7 ports")));
  for (const char* bad : {"20000", "1000-2000", "20000-70000", "5-4", "a-b", "1-2-3"}) {
    EXPECT_THAT(CheckPortRange(bad, 1), StatusIs(absl::StatusCode::kInvalidArgument)) << bad;
  }
}

}  // namespace
}  // namespace muster::worker
