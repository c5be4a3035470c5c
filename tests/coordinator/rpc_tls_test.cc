// A coordinator that asks who calls: good callers, and every kind of bad one.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/generated_message_reflection.h>
#include <grpcpp/generic/generic_stub.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "coordinator/rpc/rate_limit.h"
#include "muster/v1/admin_service.grpc.pb.h"
#include "muster/v1/worker_service.pb.h"
#include "security/authorize.h"
#include "security/credentials.h"
#include "security/pki.h"
#include "tests/coordinator/rpc_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr absl::Duration kDay = absl::Hours(24);

class TlsTest : public ::testing::Test {
 protected:
  explicit TlsTest(GateOptions gate = {.calls_per_second = 0}) {
    EXPECT_OK(pki_.Init("test", {"localhost"}, kDay).status());
    EXPECT_OK(pki_.IssueUser("admin", {{security::Role::kAdmin, ""}}, kDay).status());
    gate.crl = Path("ca.crl");
    gate.access = directory_ / "access.yaml";
    gate.reload = absl::Milliseconds(20);
    WriteAccess("");
    std::filesystem::create_directory(directory_ / "data");
    coordinator_ = std::make_unique<Coordinator>(
        directory_ / "data", absl::Seconds(5), kHelloTimeout,
        security::TlsFiles{Path("coordinator.crt"), Path("coordinator.key"), Path("ca.crt")}, gate);
    admin_ = Channel("user-admin");
  }

  std::string Path(const std::string& name) const { return directory_ / ("pki/" + name); }
  void WriteAccess(const std::string& text) {
    EXPECT_OK(PosixFileSystem()->WriteAtomically(directory_ / "access.yaml", text));
  }
  // As the holder of NAME.crt and .key in a directory of an authority; "": of nothing.
  std::shared_ptr<grpc::Channel> Channel(const std::string& name, const std::string& pki = "pki") {
    security::TlsFiles files{"", "", Path("ca.crt")};
    if (!name.empty()) {
      files.certificate = directory_ / absl::StrCat(pki, "/", name, ".crt");
      files.key = directory_ / absl::StrCat(pki, "/", name, ".key");
    }
    return Coordinator::ChannelTo(coordinator_->address(), security::ChannelCredentials(files));
  }
  static std::unique_ptr<grpc::ClientContext> Context(const std::string& token = "") {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
    return context;
  }
  static grpc::Status List(const std::shared_ptr<grpc::Channel>& channel,
                           const std::string& token = "") {
    v1::ListJobsResponse response;
    return v1::JobService::NewStub(channel)->ListJobs(Context(token).get(), {}, &response);
  }
  static grpc::Status Submit(const std::shared_ptr<grpc::Channel>& channel, const std::string& name,
                             const std::string& token = "", v1::Job* job = nullptr) {
    v1::SubmitRequest request;
    *request.mutable_spec() = testing::SmallJobSpec(name);
    v1::SubmitResponse response;
    const grpc::Status status =
        v1::JobService::NewStub(channel)->Submit(Context(token).get(), request, &response);
    if (job != nullptr) *job = response.job();
    return status;
  }
  static grpc::Status Cancel(const std::shared_ptr<grpc::Channel>& channel,
                             const std::string& name) {
    v1::CancelJobRequest request;
    request.set_name(name);
    v1::Job job;
    return v1::JobService::NewStub(channel)->CancelJob(Context().get(), request, &job);
  }
  std::string MakeToken(const std::string& user, const std::string& role, int64_t lifetime_s = 60) {
    v1::CreateTokenRequest request;
    request.set_user(user);
    request.add_roles(role);
    request.set_lifetime_s(lifetime_s);
    v1::CreateTokenResponse response;
    const grpc::Status status =
        v1::AdminService::NewStub(admin_)->CreateToken(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.token();
  }
  std::vector<v1::AuditEntry> Audit() {
    v1::ListAuditResponse response;
    v1::ListAuditRequest request;
    request.set_page_size(kPageSizeMax);
    const grpc::Status status =
        v1::AdminService::NewStub(admin_)->ListAudit(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return {response.entries().begin(), response.entries().end()};
  }
  // The newest entry about this method, with this message where one is given. Entries of refused
  // calls follow their replies soon.
  v1::AuditEntry LastOf(const std::string& method, int code, const std::string& message = "") {
    const absl::Time give_up = absl::Now() + absl::Seconds(30);
    while (absl::Now() < give_up) {
      const std::vector<v1::AuditEntry> entries = Audit();
      for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
        if (entry->method() == method && entry->status_code() == code &&
            (message.empty() || entry->message() == message)) {
          return *entry;
        }
      }
    }
    ADD_FAILURE() << "no entry of " << method << " with code " << code;
    return {};
  }
  void Refused(const grpc::Status& status, grpc::StatusCode code, const std::string& why,
               const std::string& method = "JobService.ListJobs") {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(why));
    EXPECT_THAT(LastOf(method, code, status.error_message()).address(), HasSubstr("127.0.0.1"));
  }

  testing::TemporaryDirectory directory_;
  security::Pki pki_{directory_ / "pki", absl::Now()};
  std::unique_ptr<Coordinator> coordinator_;
  std::shared_ptr<grpc::Channel> admin_;
};

// ---- every RPC

// What a call of this method with an empty request ends with.
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       grpc::ClientContext& context) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  wait();
  call->WriteLast(grpc::ByteBuffer(nullptr, 0), grpc::WriteOptions(), nullptr);
  wait();
  grpc::ByteBuffer reply;
  do {
    call->Read(&reply, nullptr);
  } while (wait());
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  return status;
}

TEST_F(TlsTest, EveryRpcAsksWhoCalls_AndWhetherTheyMay) {
  ASSERT_OK(pki_.IssueUser("viewer", {{security::Role::kViewer, ""}}, kDay).status());
  ASSERT_OK(pki_.IssueUser("guest", {}, kDay).status());
  ASSERT_OK(pki_.IssueWorker("w1", kDay).status());
  const auto nobody = Channel(""), guest = Channel("user-guest"), viewer = Channel("user-viewer");
  const auto worker = Channel("worker-w1");
  int methods = 0;
  // These files have no messages, so that nothing else links their descriptors.
  const google::protobuf::internal::AddDescriptorsRunner of_workers(
      &descriptor_table_muster_2fv1_2fworker_5fservice_2eproto),
      of_operators(&descriptor_table_muster_2fv1_2fadmin_5fservice_2eproto);
  for (const std::string full : {"muster.v1.JobService", "muster.v1.AdminService",
                                 "muster.v1.WorkerService", "externalscaler.ExternalScaler"}) {
    const std::string service = full.substr(full.rfind('.') + 1);
    const auto* descriptor =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(full);
    ASSERT_NE(descriptor, nullptr);
    for (int i = 0; i < descriptor->method_count(); ++i, ++methods) {
      const std::string name = absl::StrCat(service, ".", descriptor->method(i)->name());
      const std::string path = absl::StrCat("/", full, "/", descriptor->method(i)->name());
      const security::Rule* rule = security::FindRule(name);
      ASSERT_NE(rule, nullptr) << name;
      EXPECT_EQ(CallEmpty(nobody, path, *Context()).error_code(), grpc::StatusCode::UNAUTHENTICATED)
          << name << " lets nobody in; does its handler call Gate::Admit or Open?";
      const bool known = rule->need == security::Need::kKnown;
      EXPECT_EQ(
          CallEmpty(guest, path, *Context()).error_code() == grpc::StatusCode::PERMISSION_DENIED,
          !known)
          << name;
      const bool above = rule->need > security::Need::kViewer;
      if (above || rule->need == security::Need::kWorker) {
        EXPECT_EQ(CallEmpty(viewer, path, *Context()).error_code(),
                  grpc::StatusCode::PERMISSION_DENIED)
            << name;
      }
      if (!known && rule->need != security::Need::kWorker) {
        EXPECT_EQ(CallEmpty(worker, path, *Context()).error_code(),
                  grpc::StatusCode::PERMISSION_DENIED)
            << name;
      }
    }
  }
  EXPECT_EQ(methods, static_cast<int>(security::Rules().size()));
}

// ---- bad callers

TEST_F(TlsTest, WithoutTls_ThereIsNoAnswer) {
  const grpc::Status status = List(Coordinator::ChannelTo(coordinator_->address()));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
}

TEST_F(TlsTest, NoCertificate_IsUnauthenticated) {
  Refused(List(Channel("")), grpc::StatusCode::UNAUTHENTICATED, "--tls-cert");
}

TEST_F(TlsTest, WrongAuthority_IsUnauthenticated) {
  security::Pki other(directory_ / "other", absl::Now());
  ASSERT_OK(other.Init("test", {"localhost"}, kDay).status());
  ASSERT_OK(other.IssueUser("admin", {{security::Role::kAdmin, ""}}, kDay).status());
  Refused(List(Channel("user-admin", "other")), grpc::StatusCode::UNAUTHENTICATED, "'admin'");
}

TEST_F(TlsTest, ExpiredCertificate_IsUnauthenticated) {
  security::Pki past(directory_ / "pki", absl::Now() - 2 * kDay);
  ASSERT_OK(past.IssueUser("old", {{security::Role::kAdmin, ""}}, kDay).status());
  Refused(List(Channel("user-old")), grpc::StatusCode::UNAUTHENTICATED, "expired");
}

TEST_F(TlsTest, CertificateOfTheFuture_IsUnauthenticated) {
  security::Pki future(directory_ / "pki", absl::Now() + 2 * kDay);
  ASSERT_OK(future.IssueUser("early", {{security::Role::kAdmin, ""}}, kDay).status());
  Refused(List(Channel("user-early")), grpc::StatusCode::UNAUTHENTICATED, "not yet valid");
}

TEST_F(TlsTest, TheCoordinatorsOwnCertificate_IsNoCallers) {
  Refused(List(Channel("coordinator")), grpc::StatusCode::UNAUTHENTICATED, "purpose");
}

TEST_F(TlsTest, WrongRole_IsDenied) {
  ASSERT_OK(pki_.IssueUser("bob", {{security::Role::kViewer, ""}}, kDay).status());
  const auto bob = Channel("user-bob");
  EXPECT_TRUE(List(bob).ok());
  Refused(Submit(bob, "job"), grpc::StatusCode::PERMISSION_DENIED,
          "needs the role submitter in queue", "JobService.Submit");
  EXPECT_EQ(LastOf("JobService.Submit", 7).who(), "user bob");
}

TEST_F(TlsTest, BadTokens_AreUnauthenticated) {
  const auto channel = Channel("");
  const std::string good = MakeToken("carol", "viewer");
  EXPECT_TRUE(List(channel, good).ok());
  std::string forged = good;
  forged.back() = forged.back() == 'A' ? 'B' : 'A';
  // Base64 has letters whose last bits count for nothing; the one before counts in full.
  forged[forged.size() - 2] = forged[forged.size() - 2] == 'A' ? 'B' : 'A';
  Refused(List(channel, forged), grpc::StatusCode::UNAUTHENTICATED, "not one of this cluster");
  Refused(List(channel, "muster_aaaaaaaaaa_x"), grpc::StatusCode::UNAUTHENTICATED,
          "not one of this cluster");
  Refused(List(channel, "eyJhbGciOiJub25lIn0.e30."), grpc::StatusCode::UNAUTHENTICATED,
          "malformed");
  Refused(List(channel, "x"), grpc::StatusCode::UNAUTHENTICATED, "malformed");
  // A token counts before the certificate of its connection, also when it is bad.
  Refused(List(admin_, "x"), grpc::StatusCode::UNAUTHENTICATED, "malformed");
}

TEST_F(TlsTest, ARevokedToken_IsRefusedAtOnce_AndAfterARestart) {
  const auto channel = Channel("");
  const std::string token = MakeToken("carol", "submitter");
  v1::Job job;
  EXPECT_TRUE(Submit(channel, "job", token, &job).ok());
  EXPECT_EQ(job.owner(), "carol");
  v1::ListTokensResponse tokens;
  ASSERT_TRUE(v1::AdminService::NewStub(admin_)->ListTokens(Context().get(), {}, &tokens).ok());
  ASSERT_EQ(tokens.tokens_size(), 1);
  EXPECT_THAT(tokens.tokens(0).created_by(), HasSubstr("user admin at ipv4:127.0.0.1"));
  v1::RevokeTokenRequest request;
  request.set_id(tokens.tokens(0).id());
  v1::Token revoked;
  ASSERT_TRUE(
      v1::AdminService::NewStub(admin_)->RevokeToken(Context().get(), request, &revoked).ok());
  EXPECT_TRUE(revoked.has_revoked());
  Refused(List(channel, token), grpc::StatusCode::UNAUTHENTICATED, "was revoked");
  coordinator_->Restart();
  admin_ = Channel("user-admin");
  Refused(List(Channel(""), token), grpc::StatusCode::UNAUTHENTICATED, "was revoked");
  request.set_id("nothere");
  EXPECT_EQ(v1::AdminService::NewStub(admin_)
                ->RevokeToken(Context().get(), request, &revoked)
                .error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(TlsTest, TokensAreMadeWithSoundUsersRolesAndLifetimesAlone) {
  const auto stub = v1::AdminService::NewStub(admin_);
  const auto refused = [&](const char* user, const char* role, int64_t lifetime) {
    v1::CreateTokenRequest request;
    request.set_user(user);
    if (*role != '\0') request.add_roles(role);
    request.set_lifetime_s(lifetime);
    v1::CreateTokenResponse response;
    const grpc::Status status = stub->CreateToken(Context().get(), request, &response);
    EXPECT_TRUE(response.token().empty());
    return status.error_code() == grpc::StatusCode::INVALID_ARGUMENT;
  };
  EXPECT_TRUE(refused("", "viewer", 60));
  EXPECT_TRUE(refused("two words", "viewer", 60));
  EXPECT_TRUE(refused("x", "", 60));
  EXPECT_TRUE(refused("x", "root", 60));
  EXPECT_TRUE(refused("x", "viewer", 59));
  EXPECT_TRUE(refused("x", "viewer", 366 * 24 * 3600));
}

TEST_F(TlsTest, ARevokedCertificate_IsRefusedOnAnOpenConnection) {
  ASSERT_OK(pki_.IssueUser("eve", {{security::Role::kViewer, ""}}, kDay).status());
  const auto eve = Channel("user-eve");
  ASSERT_TRUE(List(eve).ok());
  ASSERT_OK(pki_.Revoke(Path("user-eve.crt")));
  const absl::Time give_up = absl::Now() + absl::Seconds(10);
  grpc::Status status;
  while ((status = List(eve)).ok() && absl::Now() < give_up) {
  }
  Refused(status, grpc::StatusCode::UNAUTHENTICATED, "revoked");
  EXPECT_TRUE(List(admin_).ok());
}

// ---- workers

TEST_F(TlsTest, AWorkersCertificateNamesIt) {
  ASSERT_OK(pki_.IssueWorker("w1", kDay).status());
  Daemon own(Channel("worker-w1"), "w1", 1);
  own.ReadUntil([](const v1::FromCoordinator& message) { return message.has_welcome(); });
  Daemon other(Channel("worker-w1"), "w2", 1);
  Refused(other.Finish(), grpc::StatusCode::PERMISSION_DENIED, "--name w1",
          "WorkerService.Session");
  EXPECT_EQ(LastOf("WorkerService.Session", 7).target(), "w2");
  EXPECT_EQ(LastOf("WorkerService.Session", 7).who(), "worker w1");
  ASSERT_OK(pki_.IssueWorker("*", kDay).status());
  Daemon any(Channel("worker-any"), "w5", 1);
  any.ReadUntil([](const v1::FromCoordinator& message) { return message.has_welcome(); });
}

// ---- roles

TEST_F(TlsTest, OwnersCancelTheirOwnJobsAlone_OperatorsAny) {
  for (const char* name : {"ann", "ben"}) {
    ASSERT_OK(pki_.IssueUser(name, {{security::Role::kSubmitter, ""}}, kDay).status());
  }
  ASSERT_OK(pki_.IssueUser("oscar", {{security::Role::kOperator, ""}}, kDay).status());
  const auto ann = Channel("user-ann"), ben = Channel("user-ben");
  ASSERT_TRUE(Submit(ann, "one").ok());
  ASSERT_TRUE(Submit(ann, "two").ok());
  Refused(Cancel(ben, "one"), grpc::StatusCode::PERMISSION_DENIED, "belongs to user ann",
          "JobService.CancelJob");
  EXPECT_TRUE(Cancel(ann, "one").ok());
  EXPECT_TRUE(Cancel(Channel("user-oscar"), "two").ok());
  const v1::AuditEntry cancelled = LastOf("JobService.CancelJob", 0);
  EXPECT_EQ(cancelled.who(), "user oscar");
  EXPECT_THAT(cancelled.target(), HasSubstr("two-"));
  EXPECT_THAT(cancelled.proof(), HasSubstr("certificate "));
}

TEST_F(TlsTest, JobsOfOneCall_AreDeniedEachForItsQueue) {
  ASSERT_OK(pki_.IssueUser("ann", {{security::Role::kSubmitter, "default"}}, kDay).status());
  v1::SubmitJobsRequest request;
  *request.add_jobs()->mutable_spec() = testing::SmallJobSpec("theirs");
  request.mutable_jobs(0)->mutable_spec()->set_queue("production");
  *request.add_jobs()->mutable_spec() = testing::SmallJobSpec("own");
  v1::SubmitJobsResponse response;
  const auto stub = v1::JobService::NewStub(Channel("user-ann"));
  ASSERT_TRUE(stub->SubmitJobs(Context().get(), request, &response).ok());
  ASSERT_EQ(response.results_size(), 2);
  EXPECT_EQ(response.results(0).code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(response.results(0).message(), HasSubstr("in queue production"));
  EXPECT_EQ(response.results(1).code(), 0) << response.results(1).message();
  EXPECT_EQ(response.results(1).accepted().job().spec().name(), "own");
  EXPECT_EQ(LastOf("JobService.SubmitJobs", 7).target(), "theirs");
  EXPECT_EQ(LastOf("JobService.SubmitJobs", 0).who(), "user ann");
}

TEST_F(TlsTest, TheAccessFileGivesRoles_AndIsReadAgain) {
  ASSERT_OK(pki_.IssueUser("dave", {}, kDay).status());
  const auto dave = Channel("user-dave");
  EXPECT_EQ(List(dave).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  WriteAccess("users:\n  dave: [viewer]\n");
  const absl::Time give_up = absl::Now() + absl::Seconds(10);
  while (!List(dave).ok() && absl::Now() < give_up) {
  }
  EXPECT_TRUE(List(dave).ok());
  v1::GetVersionResponse version;
  ASSERT_TRUE(v1::JobService::NewStub(dave)->GetVersion(Context().get(), {}, &version).ok());
  EXPECT_EQ(version.caller(), "user dave");
  EXPECT_THAT(version.roles(), Contains("viewer"));
  // A file that cannot be read changes nothing.
  WriteAccess("users: {dave: [root]}\n");
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(List(dave).ok());
}

// ---- reload

TEST_F(TlsTest, TheCoordinatorsCertificateIsReplacedWhileItServes) {
  ASSERT_TRUE(List(admin_).ok());
  const auto serial = [&] {
    return security::ReadCertificate(*PosixFileSystem()->Read(Path("coordinator.crt")))->serial;
  };
  const std::string before = serial();
  ASSERT_OK(pki_.AddAuthority());
  ASSERT_OK(pki_.Rotate(3650 * kDay).status());
  ASSERT_NE(serial(), before);
  // A client who trusts the new authority alone: gets in once the new certificate is served.
  const std::string bundle = *PosixFileSystem()->Read(Path("ca.crt"));
  const std::string end = "-----END CERTIFICATE-----\n";
  ASSERT_OK(PosixFileSystem()->WriteAtomically(directory_ / "new.crt",
                                               bundle.substr(0, bundle.find(end) + end.size())));
  const security::TlsFiles files{Path("user-admin.crt"), Path("user-admin.key"),
                                 directory_ / "new.crt"};
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  grpc::Status status;
  do {
    status =
        List(Coordinator::ChannelTo(coordinator_->address(), security::ChannelCredentials(files)));
  } while (!status.ok() && absl::Now() < give_up);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(List(admin_).ok());
}

// ---- audit

TEST_F(TlsTest, MutatingCallsLeaveAnEntry_WithoutSecrets) {
  const std::string token = MakeToken("carol", "submitter");
  ASSERT_TRUE(Submit(Channel(""), "job", token).ok());
  const v1::AuditEntry submitted = LastOf("JobService.Submit", 0);
  EXPECT_EQ(submitted.who(), "user carol");
  EXPECT_THAT(submitted.target(), HasSubstr("job-"));
  EXPECT_THAT(submitted.proof(), HasSubstr("token "));
  EXPECT_EQ(LastOf("AdminService.CreateToken", 0).target(), "carol");
  ASSERT_TRUE(Submit(Channel(""), "job", token).error_code() == grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(LastOf("JobService.Submit", 6).target(), "job");
  const std::string secret = token.substr(token.rfind('_') + 1);
  for (const v1::AuditEntry& entry : Audit()) {
    EXPECT_EQ(entry.SerializeAsString().find(secret), std::string::npos);
  }
}

TEST_F(TlsTest, AuditIsReadFromAMoment_AndByPages) {
  for (int i = 0; i < 5; ++i) MakeToken("carol", "viewer");
  v1::ListAuditRequest request;
  request.set_page_size(2);
  int entries = 0, pages = 0;
  do {
    v1::ListAuditResponse page;
    ASSERT_TRUE(v1::AdminService::NewStub(admin_)->ListAudit(Context().get(), request, &page).ok());
    entries += page.entries_size();
    ++pages;
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(entries, 5);
  EXPECT_EQ(pages, 3);
  request.mutable_since()->set_seconds(absl::ToUnixSeconds(absl::Now()) + 3600);
  v1::ListAuditResponse none;
  ASSERT_TRUE(v1::AdminService::NewStub(admin_)->ListAudit(Context().get(), request, &none).ok());
  EXPECT_EQ(none.entries_size(), 0);
  request.set_page_token("e1");
  EXPECT_EQ(
      v1::AdminService::NewStub(admin_)->ListAudit(Context().get(), request, &none).error_code(),
      grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(TlsTest, AFloodOfRefusedCalls_CostsFewEntries) {
  const auto nobody = Channel("");
  for (int i = 0; i < 300; ++i) ASSERT_FALSE(List(nobody).ok());
  EXPECT_LE(Audit().size(), 100u);
  EXPECT_TRUE(List(admin_).ok());
}

// ---- limits

class RateTest : public TlsTest {
 protected:
  RateTest() : TlsTest({.calls_per_second = 5}) {}
};

TEST_F(RateTest, OneCallerTooOften_IsRefused_OthersAreNot) {
  ASSERT_OK(pki_.IssueUser("busy", {{security::Role::kViewer, ""}}, kDay).status());
  const auto busy = Channel("user-busy");
  grpc::Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) status = List(busy);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("user busy calls more than 5 times a second"));
  EXPECT_TRUE(List(admin_).ok());
}

TEST(RateLimit, FillsAgainWithTime_AndForgetsFullBuckets) {
  const absl::Time start = absl::UnixEpoch();
  RateLimit limit(1, 2, 2);
  EXPECT_TRUE(limit.Take("a", start).may);
  EXPECT_TRUE(limit.Take("a", start).may);
  EXPECT_FALSE(limit.Take("a", start).may);
  EXPECT_FALSE(limit.Take("a", start).may);
  const RateLimit::Answer later = limit.Take("a", start + absl::Seconds(1));
  EXPECT_TRUE(later.may);
  EXPECT_EQ(later.refused_before, 2);
  // A clock that is set back gives nothing.
  EXPECT_FALSE(limit.Take("a", start).may);
  EXPECT_TRUE(limit.Take("b", start).may);
  EXPECT_TRUE(limit.Take("c", start + absl::Seconds(100)).may);
}

}  // namespace
}  // namespace muster::coordinator
