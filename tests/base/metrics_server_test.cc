#include <gtest/gtest.h>
#include <httplib.h>

#include <string>

#include "base/metrics.h"
#include "base/network.h"
#include "tests/support/status_matchers.h"

namespace muster::metrics {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

const Family kThings = {Kind::kCounter, "muster_things_total", "Things seen.", {}};

std::string Scrape(const std::string& address) {
  const HostPort at = *ParseHostPort(address);
  httplib::Client client(at.host, std::stoi(at.port));
  const auto response = client.Get("/metrics");
  return response ? response->body : "";
}

TEST(PrometheusServer, Counter_IsServed) {
  const auto server = PrometheusServer::Start("127.0.0.1:0");
  ASSERT_OK(server);
  (*server)->registry().GetCounter(kThings).Increment(3);
  EXPECT_THAT(Scrape((*server)->address()), HasSubstr("muster_things_total 3"));
}

TEST(PrometheusServer, Ipv6_IsServedUnderAnAddressInBrackets) {
  const auto server = PrometheusServer::Start("[::1]:0");
  if (!server.ok()) GTEST_SKIP() << "THIS MACHINE HAS NO IPv6 LOOPBACK: " << server.status();
  EXPECT_THAT((*server)->address(), ::testing::StartsWith("[::1]:"));
  (*server)->registry().GetCounter(kThings).Increment();
  EXPECT_THAT(Scrape((*server)->address()), HasSubstr("muster_things_total 1"));
}

TEST(PrometheusServer, PortInUse_IsRefused) {
  const auto server = PrometheusServer::Start("127.0.0.1:0");
  ASSERT_OK(server);
  EXPECT_THAT(PrometheusServer::Start((*server)->address()).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("in use")));
}

TEST(PrometheusServer, TextThatIsNoAddress_IsInvalid) {
  for (const char* bad : {"127.0.0.1", "::1:9000", ":0", "127.0.0.1:x"}) {
    EXPECT_THAT(PrometheusServer::Start(bad).status(), StatusIs(absl::StatusCode::kInvalidArgument))
        << bad;
  }
}

TEST(PrometheusServer, Pages_AreServedUntilTheyAreReplaced) {
  const auto server = PrometheusServer::Start("127.0.0.1:0");
  ASSERT_OK(server);
  (*server)->SetPages({{"/one", [] { return PageReply{.status = 503, .body = "no"}; }}});
  const HostPort at = *ParseHostPort((*server)->address());
  httplib::Client client(at.host, std::stoi(at.port));
  auto response = client.Get("/one");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 503);
  EXPECT_EQ(response->body, "no");
  (*server)->SetPages({{"/two", [] { return PageReply{.body = "[]"}; }}});
  response = client.Get("/one");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 404);
  EXPECT_THAT(response->body, HasSubstr("/two"));
  response = client.Get("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
}

TEST(PrometheusServer, StoppedRightAfterItsStart_Ends) {
  for (int round = 0; round < 200; ++round) ASSERT_OK(PrometheusServer::Start("127.0.0.1:0"));
}

}  // namespace
}  // namespace muster::metrics
