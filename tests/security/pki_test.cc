#include "security/pki.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "base/file_system.h"
#include "security/certificates.h"
#include "security/tls_files.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::security {
namespace {

using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const absl::Time kNow = absl::FromCivil(absl::CivilSecond(2026, 11, 24, 12), absl::UTCTimeZone());
constexpr absl::Duration kDay = absl::Hours(24);

class PkiTest : public ::testing::Test {
 protected:
  PkiTest() {
    EXPECT_OK(At(kNow).Init("lab", {"head.example.org", "10.0.0.1"}, Pki::kLifetime).status());
  }
  Pki At(absl::Time now) { return Pki(Path(), now); }
  std::string Path() const { return directory_ / "pki"; }
  std::string Read(const std::string& name) {
    return PosixFileSystem()->Read(name[0] == '/' ? name : Path() + "/" + name).value_or("");
  }
  std::string IssueUser(const std::string& name, const std::vector<Grant>& roles = {}) {
    const auto issued = At(kNow).IssueUser(name, roles, 30 * kDay);
    EXPECT_OK(issued.status());
    return issued.ok() ? Read(issued->certificate) : "";
  }
  absl::Status Verify(const std::string& pem, absl::Time now, bool revocations = true) {
    const auto authorities = Authorities::Make(Read("ca.crt"), revocations ? Read("ca.crl") : "");
    return authorities.ok() ? (*authorities)->Verify(pem, now) : authorities.status();
  }

  testing::TemporaryDirectory directory_;
};

TEST_F(PkiTest, KeysAreForTheirOwnerAlone_AndMatchTheirCertificates) {
  EXPECT_OK(At(kNow).IssueWorker("gpu-1", kDay).status());
  for (const char* name : {"ca.key", "coordinator.key", "worker-gpu-1.key"}) {
    struct stat info = {};
    ASSERT_EQ(::stat((Path() + "/" + name).c_str(), &info), 0) << name;
    EXPECT_EQ(info.st_mode & 0777, 0600u) << name;
  }
  struct stat directory = {};
  ASSERT_EQ(::stat(Path().c_str(), &directory), 0);
  EXPECT_EQ(directory.st_mode & 0777, 0700u);
  EXPECT_OK(CheckKeyPair(Read("coordinator.crt"), Read("coordinator.key")));
  EXPECT_OK(CheckKeyPair(Read("worker-gpu-1.crt"), Read("worker-gpu-1.key")));
  EXPECT_THAT(CheckKeyPair(Read("coordinator.crt"), Read("worker-gpu-1.key")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not that of")));
}

TEST_F(PkiTest, NothingIsOverwritten) {
  const std::string before = Read("ca.key");
  EXPECT_THAT(At(kNow).Init("lab", {"x"}, kDay), StatusIs(absl::StatusCode::kAlreadyExists));
  IssueUser("alice");
  EXPECT_THAT(At(kNow).IssueUser("alice", {}, kDay),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("user-alice.crt")));
  EXPECT_EQ(Read("ca.key"), before);
}

TEST_F(PkiTest, CertificatesNameTheirHolder) {
  const auto worker = At(kNow).IssueWorker("gpu-1", kDay);
  ASSERT_OK(worker.status());
  const auto named = WhoIs(*ReadCertificate(Read(worker->certificate)));
  ASSERT_OK(named.status());
  EXPECT_EQ(named->principal.ToString(), "worker gpu-1");
  const auto user = WhoIs(*ReadCertificate(IssueUser("alice", {{Role::kSubmitter, "research"}})));
  ASSERT_OK(user.status());
  EXPECT_EQ(user->principal.ToString(), "user alice");
  EXPECT_THAT(user->principal.grants, ElementsAre(Grant{Role::kSubmitter, "research"}));
  const auto coordinator = ReadCertificate(Read("coordinator.crt"));
  ASSERT_OK(coordinator.status());
  EXPECT_THAT(coordinator->hosts, ElementsAre("head.example.org", "10.0.0.1", "localhost",
                                              "127.0.0.1", "0:0:0:0:0:0:0:1"));
  const auto any = At(kNow).IssueWorker("*", kDay);
  ASSERT_OK(any.status());
  EXPECT_EQ(WhoIs(*ReadCertificate(Read(any->certificate)))->principal.name, "*");
}

TEST_F(PkiTest, MetricsHaveACertificateOfAServer_AlsoOnceItWasRotated) {
  const auto issued = At(kNow).IssueMetrics({"gpu-1.example.org", "10.0.0.7"}, kDay);
  ASSERT_OK(issued.status());
  EXPECT_THAT(issued->certificate, ::testing::EndsWith("/metrics-gpu-1.example.org.crt"));
  for (const absl::Time at : {kNow, kNow + kDay / 2}) {
    const auto certificate = ReadCertificate(Read(issued->certificate));
    ASSERT_OK(certificate.status());
    EXPECT_THAT(certificate->hosts, ElementsAre("gpu-1.example.org", "10.0.0.7"));
    EXPECT_FALSE(Verify(Read(issued->certificate), at).ok());  // nobody can call with it
    ASSERT_OK(At(at).Rotate(2 * kDay).status());
  }
  EXPECT_THAT(At(kNow).IssueMetrics({}, kDay), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(At(kNow).IssueMetrics({"../x"}, kDay),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no DNS name")));
}

TEST_F(PkiTest, NamesThatWouldLeaveTheDirectoryAreRefused) {
  for (const char* name :
       {"", "../evil", "a/b", ".hidden", "two words", "a,URI:spiffe://x/worker/b"}) {
    EXPECT_THAT(At(kNow).IssueWorker(name, kDay), StatusIs(absl::StatusCode::kInvalidArgument))
        << name;
    EXPECT_THAT(At(kNow).IssueUser(name, {}, kDay), StatusIs(absl::StatusCode::kInvalidArgument))
        << name;
  }
  EXPECT_THAT(Pki(directory_ / "other", kNow).Init("lab", {"host:7600"}, kDay),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without a port")));
}

TEST_F(PkiTest, ACertificateIsGoodInItsTimeAndFromItsAuthority) {
  const std::string alice = IssueUser("alice");
  EXPECT_OK(Verify(alice, kNow));
  EXPECT_THAT(Verify(alice, kNow + 31 * kDay),
              StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("expired")));
  EXPECT_THAT(Verify(alice, kNow - kDay),
              StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("not yet valid")));
  // The coordinator's own certificate is no caller's.
  EXPECT_THAT(Verify(Read("coordinator.crt"), kNow),
              StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("purpose")));
  Pki other(directory_ / "other", kNow);
  ASSERT_OK(other.Init("lab", {"x"}, kDay).status());
  const auto mallory = other.IssueUser("alice", {{Role::kAdmin, ""}}, kDay);
  ASSERT_OK(mallory.status());
  EXPECT_THAT(Verify(Read(mallory->certificate), kNow),
              StatusIs(absl::StatusCode::kUnauthenticated));
  EXPECT_THAT(Verify("-----BEGIN CERTIFICATE-----\nAAAA\n", kNow),
              StatusIs(absl::StatusCode::kUnauthenticated));
  EXPECT_THAT(Verify("", kNow), StatusIs(absl::StatusCode::kUnauthenticated));
}

TEST_F(PkiTest, ARevokedCertificateIsRefused_TheOthersAreNot) {
  const std::string alice = IssueUser("alice");
  const std::string bob = IssueUser("bob");
  ASSERT_OK(At(kNow).Revoke(Path() + "/user-alice.crt"));
  EXPECT_THAT(Verify(alice, kNow),
              StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("revoked")));
  EXPECT_OK(Verify(bob, kNow));
  ASSERT_OK(At(kNow).Revoke(Path() + "/user-bob.crt"));
  ASSERT_OK(At(kNow).Revoke(Path() + "/user-bob.crt"));
  EXPECT_THAT(Verify(alice, kNow), StatusIs(absl::StatusCode::kUnauthenticated));
  EXPECT_THAT(Verify(bob, kNow), StatusIs(absl::StatusCode::kUnauthenticated));
}

TEST_F(PkiTest, RotateIssuesAgainWhatEndsSoon_WithTheSameNames) {
  const std::string before = IssueUser("alice", {{Role::kOperator, "q"}});
  const auto none = At(kNow + kDay).Rotate(10 * kDay);
  ASSERT_OK(none.status());
  EXPECT_TRUE(none->empty());
  const auto rotated = At(kNow + 25 * kDay).Rotate(10 * kDay);
  ASSERT_OK(rotated.status());
  ASSERT_EQ(rotated->size(), 1u);
  EXPECT_EQ((*rotated)[0].not_after, kNow + 55 * kDay);
  const std::string after = Read("user-alice.crt");
  EXPECT_NE(before, after);
  EXPECT_OK(CheckKeyPair(after, Read("user-alice.key")));
  EXPECT_OK(Verify(after, kNow + 40 * kDay));
  const auto named = WhoIs(*ReadCertificate(after));
  ASSERT_OK(named.status());
  EXPECT_EQ(named->principal.name, "alice");
  EXPECT_THAT(named->principal.grants, ElementsAre(Grant{Role::kOperator, "q"}));
}

TEST_F(PkiTest, AuthoritiesAreReplacedWithoutAMomentOfDistrust) {
  const std::string old = IssueUser("alice");
  ASSERT_OK(At(kNow).AddAuthority());
  EXPECT_OK(Verify(old, kNow));
  const std::string fresh = IssueUser("bob");
  EXPECT_OK(Verify(fresh, kNow));
  EXPECT_THAT(At(kNow).RetireAuthorities(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rotate")));
  // What the old authority signed can be revoked until it is gone.
  ASSERT_OK(At(kNow).Revoke(Path() + "/user-alice.crt"));
  EXPECT_THAT(Verify(old, kNow), StatusIs(absl::StatusCode::kUnauthenticated));
  ASSERT_OK(At(kNow).Rotate(3650 * kDay).status());
  ASSERT_OK(At(kNow).RetireAuthorities());
  EXPECT_THAT(Verify(old, kNow, false), StatusIs(absl::StatusCode::kUnauthenticated));
  for (const char* name : {"user-alice.crt", "user-bob.crt"}) EXPECT_OK(Verify(Read(name), kNow));
}

TEST_F(PkiTest, FilesTellWhenTheFirstOfThemEnds) {
  ASSERT_OK(At(kNow).IssueWorker("w", 2 * kDay).status());
  ASSERT_OK(At(kNow).IssueUser("u", {}, kDay).status());
  const auto both = ReadValidity(Read("worker-w.crt") + Read("user-u.crt"));
  ASSERT_OK(both.status());
  EXPECT_EQ(both->not_after, kNow + kDay);
  EXPECT_LE(both->not_before, kNow);
  EXPECT_GT(both->not_before, kNow - kDay);
  EXPECT_EQ(ReadValidity("none").status().code(), absl::StatusCode::kInvalidArgument);

  const std::string absent = directory_ / "absent";
  const auto files = ReadValidities({Path() + "/worker-w.crt", Path() + "/worker-w.key", absent},
                                    Path() + "/ca.crl");
  ASSERT_EQ(files.size(), 3u);
  EXPECT_EQ(files.at("tls-cert").not_after, kNow + 2 * kDay);
  EXPECT_EQ(files.at("tls-ca").not_after, absl::UnixEpoch());
  EXPECT_GT(files.at("tls-crl").not_after, kNow);
  EXPECT_EQ(ReadValidities({"", "", Path() + "/ca.crt"}).size(), 1u);
}

TEST_F(PkiTest, LifetimesEndBeforeTheAuthority) {
  EXPECT_THAT(At(kNow).IssueUser("a", {}, 3651 * kDay),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("end of the authority")));
  EXPECT_THAT(At(kNow).IssueUser("a", {}, absl::Seconds(1)),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(Pki(directory_ / "none", kNow).IssueUser("a", {}, kDay),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("pki init")));
}

TEST_F(PkiTest, TlsFilesAreCheckedByName) {
  const TlsFiles files{Path() + "/coordinator.crt", Path() + "/coordinator.key",
                       Path() + "/ca.crt"};
  EXPECT_OK(CheckServerFiles(files, kNow));
  EXPECT_THAT(CheckServerFiles(files, kNow + 400 * kDay),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("coordinator.crt"), HasSubstr("ended on 2027-11-24"))));
  EXPECT_THAT(CheckServerFiles({files.certificate, files.key, ""}, kNow),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("all three")));
  EXPECT_THAT(CheckServerFiles({files.certificate, Path() + "/ca.key", files.authorities}, kNow),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ca.key")));
  EXPECT_THAT(CheckServerFiles({files.key, files.key, files.authorities}, kNow),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("PEM")));
  EXPECT_OK(CheckClientFiles({"", "", files.authorities}, kNow));
  EXPECT_THAT(CheckClientFiles({files.certificate, files.key, ""}, kNow),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--tls-ca")));
  EXPECT_THAT(CheckClientFiles({"", "", Path() + "/no"}, kNow),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--tls-ca")));
}

TEST(WhoIs, ReadsNamesOfOtherAuthorities) {
  Certificate spiffe;
  spiffe.uris = {"spiffe://example.org/muster/worker/gpu-7"};
  EXPECT_EQ(WhoIs(spiffe)->principal.ToString(), "worker gpu-7");
  Certificate plain;
  plain.common_name = "bob";
  plain.organizations = {"ml-platform", "muster:viewer"};
  const auto bob = WhoIs(plain);
  ASSERT_OK(bob.status());
  EXPECT_EQ(bob->principal.ToString(), "user bob");
  EXPECT_THAT(bob->groups, ElementsAre("ml-platform"));
  EXPECT_THAT(bob->principal.grants, ElementsAre(Grant{Role::kViewer, ""}));
  Certificate node;
  node.common_name = "gpu-8";
  node.organizations = {"muster:worker"};
  EXPECT_EQ(WhoIs(node)->principal.ToString(), "worker gpu-8");
}

TEST(WhoIs, RefusesCertificatesOfTwoOrOfNobody) {
  Certificate two;
  two.uris = {"spiffe://x/worker/a", "spiffe://x/worker/b"};
  EXPECT_THAT(WhoIs(two), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("more than one")));
  two.uris = {"spiffe://x/worker/a", "spiffe://x/user/b"};
  EXPECT_THAT(WhoIs(two), StatusIs(absl::StatusCode::kInvalidArgument));
  Certificate both;
  both.uris = {"spiffe://x/worker/a"};
  both.organizations = {"muster:admin"};
  EXPECT_THAT(WhoIs(both), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(WhoIs(Certificate()), StatusIs(absl::StatusCode::kInvalidArgument));
  Certificate role;
  role.common_name = "x";
  role.organizations = {"muster:root"};
  EXPECT_THAT(WhoIs(role), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("root")));
  Certificate odd;
  odd.common_name = "a b\n";
  EXPECT_THAT(WhoIs(odd), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace muster::security
