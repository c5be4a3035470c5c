#include "base/network.h"

#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace muster {
namespace {

using ::muster::testing::StatusIs;

TEST(HostPort, Text_IsParsedWithBracketsAroundIpv6) {
  const auto v4 = ParseHostPort("10.0.0.1:7070");
  ASSERT_OK(v4);
  EXPECT_EQ(v4->host, "10.0.0.1");
  EXPECT_EQ(v4->port, "7070");
  const auto v6 = ParseHostPort("[fd00::1]:7070");
  ASSERT_OK(v6);
  EXPECT_EQ(v6->host, "fd00::1");
  EXPECT_EQ(v6->ToString(), "[fd00::1]:7070");
  EXPECT_EQ(ParseHostPort("head:0")->ToString(), "head:0");
  for (const char* bad : {"", "head", "fd00::1:7070", "head:x", "head:70000", ":7070", "[]:1"}) {
    EXPECT_THAT(ParseHostPort(bad), StatusIs(absl::StatusCode::kInvalidArgument)) << bad;
  }
}

TEST(IpAddress, EachKind_IsRecognised) {
  for (const char* address : {"10.0.0.1", "::1", "fe80::1%eth0", "0.0.0.0"}) {
    EXPECT_TRUE(IsIpAddress(address)) << address;
  }
  for (const char* other : {"", "head", "10.0.0", "10.0.0.1:1", "[::1]", "10.0.0.1%eth0"}) {
    EXPECT_FALSE(IsIpAddress(other)) << other;
  }
  EXPECT_TRUE(IsLoopbackAddress("127.3.0.1"));
  EXPECT_TRUE(IsLoopbackAddress("::1"));
  EXPECT_FALSE(IsLoopbackAddress("10.0.0.1"));
  EXPECT_FALSE(IsLoopbackAddress(""));
  EXPECT_TRUE(IsWildcardAddress("0.0.0.0"));
  EXPECT_TRUE(IsWildcardAddress("::"));
  EXPECT_FALSE(IsWildcardAddress("0.0.0.1"));
  EXPECT_TRUE(IsLinkLocalAddress("fe80::1%eth0"));
  EXPECT_TRUE(IsLinkLocalAddress("169.254.1.1"));
  EXPECT_FALSE(IsLinkLocalAddress("fd00::1"));
}

TEST(InCidr, AddressesOfBothFamilies_AreComparedByPrefix) {
  EXPECT_TRUE(*InCidr("10.1.2.3", "10.0.0.0/8"));
  EXPECT_FALSE(*InCidr("11.1.2.3", "10.0.0.0/8"));
  EXPECT_TRUE(*InCidr("10.0.0.129", "10.0.0.128/25"));
  EXPECT_FALSE(*InCidr("10.0.0.127", "10.0.0.128/25"));
  EXPECT_TRUE(*InCidr("fd00::7", "fd00::/16"));
  EXPECT_FALSE(*InCidr("10.0.0.1", "fd00::/16"));
  EXPECT_TRUE(*InCidr("10.0.0.1", "0.0.0.0/0"));
  for (const char* bad : {"10.0.0.0", "10.0.0.0/33", "x/8", "10.0.0.0/-1", "10.0.0.0/a"}) {
    EXPECT_THAT(InCidr("10.0.0.1", bad), StatusIs(absl::StatusCode::kInvalidArgument)) << bad;
  }
}

TEST(Advertised, OnlyWildcards_AreReplaced) {
  EXPECT_EQ(Advertised("0.0.0.0:9071", "10.0.0.1"), "10.0.0.1:9071");
  EXPECT_EQ(Advertised("[::]:9071", "fd00::1"), "[fd00::1]:9071");
  EXPECT_EQ(Advertised("127.0.0.1:9071", "10.0.0.1"), "127.0.0.1:9071");
  EXPECT_EQ(Advertised("0.0.0.0:9071", ""), "0.0.0.0:9071");
  EXPECT_EQ(Advertised("", "10.0.0.1"), "");
}

TEST(OutsideAddress, OfSeveral_IsThatOfTheDefaultRouteElseTheFirstUsefulOne) {
  NetworkView network;
  network.interfaces = [] {
    return std::vector<InterfaceAddress>{
        {"lo", "127.0.0.1"}, {"eth0", "fe80::1%eth0"}, {"eth1", "10.0.0.7"}, {"eth2", "10.1.0.7"}};
  };
  network.source_towards = [](const std::string&) { return "10.1.0.7"; };
  EXPECT_EQ(OutsideAddress(network), "10.1.0.7");
  network.source_towards = [](const std::string&) { return ""; };
  EXPECT_EQ(OutsideAddress(network), "10.0.0.7");
  network.interfaces = [] { return std::vector<InterfaceAddress>{{"lo", "127.0.0.1"}}; };
  EXPECT_EQ(OutsideAddress(network), "");
}

TEST(NetworkView, OfThisMachine_HasLoopback) {
  const NetworkView network = NetworkView::OfThisMachine();
  bool loopback = false;
  for (const InterfaceAddress& entry : network.interfaces()) {
    EXPECT_TRUE(IsIpAddress(entry.address)) << entry.address;
    loopback = loopback || IsLoopbackAddress(entry.address);
  }
  EXPECT_TRUE(loopback);
  EXPECT_EQ(network.source_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(network.resolve("127.0.0.1"), std::vector<std::string>{"127.0.0.1"});
}

}  // namespace
}  // namespace muster
