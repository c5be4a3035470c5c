#include <gtest/gtest.h>
#include <httplib.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "base/metrics.h"
#include "base/network.h"
#include "security/pki.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

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

class TlsMetrics : public ::testing::Test {
 protected:
  static constexpr absl::Duration kDay = absl::Hours(24);

  TlsMetrics() {
    EXPECT_OK(pki_.Init("test", {}, kDay).status());
    EXPECT_OK(pki_.IssueUser("scraper", {}, kDay).status());
    EXPECT_OK(stranger_.Init("other", {}, kDay).status());
    EXPECT_OK(stranger_.IssueUser("scraper", {}, kDay).status());
    tls_ = {.certificate = Path("pki/coordinator.crt"), .key = Path("pki/coordinator.key")};
  }

  std::string Path(const std::string& name) const { return directory_ / name; }
  std::unique_ptr<PrometheusServer> Start() {
    auto server = PrometheusServer::Start("127.0.0.1:0", tls_);
    EXPECT_OK(server);
    (*server)->registry().GetCounter(kThings).Increment(3);
    (*server)->SetPages({{"/livez", [] { return PageReply{.body = "ok", .open = true}; }},
                         {"/targets", [] { return PageReply{.body = "[]"}; }}});
    return *std::move(server);
  }
  // The status and text of a page, "0" where no connection could be made. `as`: a pair of files
  // without their endings; empty shows no certificate. `trusts`: the authority of the server.
  static std::string Get(const PrometheusServer& server, const std::string& page,
                         const std::string& as, const std::string& trusts) {
    std::string address = server.address();
    EXPECT_EQ(address.rfind("https://", 0), 0u) << address;
    const HostPort at = *ParseHostPort(address.substr(8));
    httplib::SSLClient client(at.host, std::stoi(at.port), as.empty() ? "" : as + ".crt",
                              as.empty() ? "" : as + ".key");
    client.set_ca_cert_path(trusts.c_str());
    client.enable_server_certificate_verification(true);
    const auto response = client.Get(page.c_str());
    return response ? std::to_string(response->status) + " " + response->body : "0";
  }

  testing::TemporaryDirectory directory_;
  security::Pki pki_{Path("pki"), absl::Now()}, stranger_{Path("stranger"), absl::Now()};
  ServerTls tls_;
};

TEST_F(TlsMetrics, PagesAreServedOverHttps_AndNotWithoutIt) {
  const auto server = Start();
  EXPECT_THAT(Get(*server, "/metrics", "", Path("pki/ca.crt")), HasSubstr("muster_things_total 3"));
  EXPECT_EQ(Get(*server, "/metrics", "", Path("stranger/ca.crt")), "0");
  EXPECT_EQ(Scrape(server->address().substr(8)), "");
}

TEST_F(TlsMetrics, WithAuthorities_OnlyProbesAnswerCallersWithoutACertificate) {
  tls_.client_authorities = Path("pki/ca.crt");
  const auto server = Start();
  const std::string trusts = Path("pki/ca.crt");
  EXPECT_EQ(Get(*server, "/livez", "", trusts), "200 ok");
  EXPECT_THAT(Get(*server, "/metrics", "", trusts), HasSubstr("403 this page needs a client"));
  EXPECT_THAT(Get(*server, "/targets", "", trusts), HasSubstr("403"));
  EXPECT_THAT(Get(*server, "/nothing", "", trusts), HasSubstr("404"));
  EXPECT_THAT(Get(*server, "/metrics", Path("pki/user-scraper"), trusts), HasSubstr("200 "));
  EXPECT_EQ(Get(*server, "/targets", Path("pki/user-scraper"), trusts), "200 []");
  EXPECT_EQ(Get(*server, "/metrics", Path("stranger/user-scraper"), trusts), "0");
}

TEST_F(TlsMetrics, FilesThatAreReplaced_CountFromTheNextConnection) {
  tls_.client_authorities = Path("pki/ca.crt");
  const auto server = Start();
  for (const char* name : {"coordinator.crt", "coordinator.key", "ca.crt"}) {
    std::filesystem::copy(Path("stranger/") + name, Path("pki/") + name,
                          std::filesystem::copy_options::overwrite_existing);
  }
  EXPECT_THAT(Get(*server, "/metrics", Path("stranger/user-scraper"), Path("stranger/ca.crt")),
              HasSubstr("200 "));
  EXPECT_EQ(Get(*server, "/metrics", Path("pki/user-scraper"), Path("stranger/ca.crt")), "0");
}

TEST_F(TlsMetrics, FilesThatAreNotWhatTheyShouldBe_AreToldAtTheStart) {
  const auto refused = [](const ServerTls& tls) {
    return PrometheusServer::Start("127.0.0.1:0", tls).status();
  };
  EXPECT_THAT(refused({.certificate = tls_.certificate}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("both")));
  EXPECT_THAT(refused({.client_authorities = Path("pki/ca.crt")}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("both")));
  EXPECT_THAT(refused({.certificate = Path("none.crt"), .key = tls_.key}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("none.crt")));
  EXPECT_THAT(refused({.certificate = tls_.certificate, .key = Path("stranger/coordinator.key")}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--metrics-tls-key")));
  EXPECT_THAT(
      refused({.certificate = tls_.certificate, .key = tls_.key, .client_authorities = tls_.key}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--metrics-tls-ca")));
}

TEST(PrometheusServer, StoppedRightAfterItsStart_Ends) {
  for (int round = 0; round < 200; ++round) ASSERT_OK(PrometheusServer::Start("127.0.0.1:0"));
}

}  // namespace
}  // namespace muster::metrics
