#include "security/authorize.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/generated_message_reflection.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "externalscaler/external_scaler.pb.h"
#include "muster/v1/admin_service.pb.h"
#include "muster/v1/job_service.pb.h"
#include "muster/v1/worker_service.pb.h"
#include "tests/support/status_matchers.h"

namespace muster::security {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

// The coordinator's services; RankService is that of a daemon, on a socket of its own.
std::vector<const google::protobuf::MethodDescriptor*> Methods() {
  std::vector<const google::protobuf::MethodDescriptor*> out;
  // These files have no messages, so that nothing else links their descriptors.
  const google::protobuf::internal::AddDescriptorsRunner of_workers(
      &descriptor_table_muster_2fv1_2fworker_5fservice_2eproto),
      of_operators(&descriptor_table_muster_2fv1_2fadmin_5fservice_2eproto);
  for (const auto* file : {v1::SubmitRequest::descriptor()->file(),
                           externalscaler::ScaledObjectRef::descriptor()->file(),
                           google::protobuf::DescriptorPool::generated_pool()->FindFileByName(
                               "muster/v1/admin_service.proto"),
                           google::protobuf::DescriptorPool::generated_pool()->FindFileByName(
                               "muster/v1/worker_service.proto")}) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int k = 0; k < file->service(i)->method_count(); ++k) {
        out.push_back(file->service(i)->method(k));
      }
    }
  }
  return out;
}

Principal User(const std::vector<std::string>& roles) {
  Principal user{Principal::Kind::kUser, "alice", {}};
  for (const std::string& role : roles) user.grants.push_back(*ParseGrant(role));
  return user;
}
const Principal kNobody{Principal::Kind::kNobody, "", {}};
const Principal kWorker{Principal::Kind::kWorker, "w1", {}};

absl::Status May(const Principal& caller, const std::string& method,
                 const std::optional<std::string>& queue = std::nullopt) {
  const Rule* rule = FindRule(method);
  return rule == nullptr ? absl::NotFoundError(method) : Authorize(caller, *rule, queue);
}

TEST(Authorize, EveryRpcOfTheServicesHasARule_AndEveryRuleAnRpc) {
  std::set<std::string> served, ruled;
  for (const auto* method : Methods()) {
    served.insert(absl::StrCat(method->service()->name(), ".", method->name()));
  }
  for (const Rule& rule : Rules()) ruled.insert(rule.method);
  EXPECT_EQ(served, ruled) << "an RPC without a rule in security/authorize.cc, or the other way";
  EXPECT_GE(served.size(), 20u);
}

TEST(Authorize, NobodyMayCallAnything_AndTrustedCallersEverything) {
  for (const Rule& rule : Rules()) {
    EXPECT_THAT(Authorize(kNobody, rule, std::nullopt),
                StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("--tls-cert")))
        << rule.method;
    EXPECT_OK(Authorize(Principal(), rule, "any"));
  }
}

TEST(Authorize, AUserWithoutARoleLearnsTheVersionAlone) {
  for (const Rule& rule : Rules()) {
    const absl::Status may = Authorize(User({}), rule, std::nullopt);
    EXPECT_EQ(may.ok(), rule.need == Need::kKnown) << rule.method << ": " << may;
  }
}

TEST(Authorize, EachRoleMayWhatThoseBeforeItMay_AndNoMore) {
  const std::vector<std::string> roles = {"viewer", "submitter", "operator", "admin"};
  for (const Rule& rule : Rules()) {
    if (rule.need == Need::kWorker || rule.need == Need::kKnown) continue;
    const int needed = static_cast<int>(rule.need) - static_cast<int>(Need::kViewer);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(Authorize(User({roles[i]}), rule, "q").ok(), i >= needed)
          << roles[i] << " " << rule.method;
    }
  }
}

TEST(Authorize, DaemonsAreForTheirServiceAlone_AndUsersNotForIt) {
  for (const Rule& rule : Rules()) {
    const bool may = rule.need == Need::kWorker || rule.need == Need::kKnown;
    EXPECT_EQ(Authorize(kWorker, rule, std::nullopt).ok(), may) << rule.method;
  }
  EXPECT_THAT(May(User({"admin"}), "WorkerService.Session"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("worker daemons")));
}

TEST(Authorize, ARoleOfAQueueReachesThatQueue) {
  const Principal user = User({"submitter@research"});
  EXPECT_OK(May(user, "JobService.Submit", "research"));
  EXPECT_THAT(May(user, "JobService.Submit", "production"),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       HasSubstr("submitter in queue production; user alice has "
                                 "submitter@research")));
  EXPECT_OK(May(user, "JobService.ListJobs"));
  EXPECT_OK(May(user, "JobService.GetLogs", "research"));
  EXPECT_THAT(May(user, "JobService.GetLogs", "production"),
              StatusIs(absl::StatusCode::kPermissionDenied));
  // What belongs to no queue needs a role in all.
  EXPECT_THAT(May(User({"operator@research"}), "AdminService.RemoveWorker"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("whole cluster")));
  EXPECT_OK(May(User({"operator"}), "AdminService.RemoveWorker"));
}

TEST(Authorize, OwnersCancelTheirOwnJobs_OperatorsThoseOfTheirQueue) {
  EXPECT_OK(AuthorizeChange(User({"submitter"}), "alice", "q"));
  EXPECT_THAT(AuthorizeChange(User({"submitter"}), "bob", "q"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("belongs to user bob")));
  EXPECT_THAT(AuthorizeChange(User({"submitter"}), "", "q"),
              StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_OK(AuthorizeChange(User({"operator@q"}), "bob", "q"));
  EXPECT_THAT(AuthorizeChange(User({"operator@other", "submitter"}), "bob", "q"),
              StatusIs(absl::StatusCode::kPermissionDenied));
  // A role that was taken away takes the own jobs along.
  EXPECT_THAT(AuthorizeChange(User({"viewer"}), "alice", "q"),
              StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(AuthorizeChange(kWorker, "w1", "q"), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_OK(AuthorizeChange(Principal(), "bob", "q"));
}

TEST(Authorize, ADaemonSaysHelloUnderItsOwnName) {
  EXPECT_OK(AuthorizeHello(kWorker, "w1"));
  EXPECT_THAT(AuthorizeHello(kWorker, "w2"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("--name w1")));
  EXPECT_OK(AuthorizeHello({Principal::Kind::kWorker, "*", {}}, "w2"));
  EXPECT_THAT(AuthorizeHello(User({"admin"}), "alice"),
              StatusIs(absl::StatusCode::kPermissionDenied));
}

TEST(Grant, ReadsWhatItWrites_AndRefusesTheRest) {
  for (const char* text : {"viewer", "submitter", "operator@research", "admin", "viewer@a@b"}) {
    EXPECT_EQ(ToString(*ParseGrant(text)), text);
  }
  for (const char* text : {"", "root", "Viewer", "viewer@", "admin@q", "@q"}) {
    EXPECT_THAT(ParseGrant(text), StatusIs(absl::StatusCode::kInvalidArgument)) << text;
  }
}

}  // namespace
}  // namespace muster::security
