// Tokens, owners and the audit log in the core.
#include <string>
#include <vector>

#include "coordinator/core/limits.h"
#include "coordinator/core/restore.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/state_log.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::SizeIs;

Caller User(const std::string& name, security::Role role, const std::string& method) {
  Caller caller("user " + name);
  caller.principal = {security::Principal::Kind::kUser, name, {{role, ""}}};
  caller.method = method;
  caller.target = "named";
  caller.address = "ipv4:10.0.0.7";
  return caller;
}

class AccessTest : public CoreTest {
 protected:
  std::vector<v1::AuditEntry> Audit() {
    std::vector<v1::AuditEntry> out;
    EXPECT_OK(
        store_->Scan(Table::kAudit, "", "", [&](const std::string&, const std::string& value) {
          EXPECT_TRUE(out.emplace_back().ParseFromString(value));
          return true;
        }));
    return out;
  }
  absl::Status Reply() {
    const auto replies = Actions<ReplyAction>();
    EXPECT_THAT(replies, SizeIs(1));
    return replies.empty() ? absl::InternalError("no reply") : replies[0].status;
  }
  void CreateToken(const std::string& id) {
    CreateTokenEvent event;
    event.call = CallId(1);
    event.row.mutable_token()->set_id(id);
    event.row.mutable_token()->set_user("carol");
    *event.row.mutable_token()->mutable_expires() = ToProto(now_ + absl::Hours(24));
    event.row.set_secret_hash("hash");
    event.caller = User("admin", security::Role::kAdmin, "AdminService.CreateToken");
    Handle(event);
  }
  void Revoke(const std::string& id) {
    Handle(RevokeTokenEvent{CallId(1), id,
                            User("admin", security::Role::kAdmin, "AdminService.RevokeToken")});
  }
  void ExpectReplays() {
    const auto replayed = Replay(*store_, nullptr, 0);
    ASSERT_OK(replayed.status());
    EXPECT_THAT(replayed->differences, ::testing::IsEmpty());
  }
};

TEST_F(AccessTest, AJobBelongsToItsSubmitter_AlsoAfterARestart) {
  const Caller alice = User("alice", security::Role::kSubmitter, "JobService.Submit");
  Handle(SubmitEvent{CallId(1), Spec(), "r", alice});
  ASSERT_OK(Reply());
  EXPECT_EQ(Actions<ReplyAction>()[0].job.owner(), "alice");
  Restart();
  EXPECT_EQ(core_->GetJob("job")->owner(), "alice");
  // The same request of another user is no repetition.
  Handle(SubmitEvent{CallId(2), Spec(), "r",
                     User("bob", security::Role::kSubmitter, "JobService.Submit")});
  EXPECT_THAT(Reply(), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("another user")));
  Handle(SubmitEvent{CallId(3), Spec(), "r", alice});
  EXPECT_TRUE(Actions<ReplyAction>()[0].existed);
}

TEST_F(AccessTest, CancellingAnothersJob_ChangesNothing) {
  Handle(SubmitEvent{CallId(1), Spec(), "r",
                     User("alice", security::Role::kSubmitter, "JobService.Submit")});
  Handle(CancelEvent{CallId(2), "job",
                     User("bob", security::Role::kSubmitter, "JobService.CancelJob")});
  EXPECT_THAT(Reply(), StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("user alice")));
  EXPECT_EQ(core_->GetJob("job")->state(), v1::JOB_STATE_QUEUED);
  Handle(CancelEvent{CallId(3), "job",
                     User("oscar", security::Role::kOperator, "JobService.CancelJob")});
  EXPECT_OK(Reply());
  EXPECT_EQ(core_->GetJob("job")->state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(AccessTest, EveryCallWithACaller_LeavesAnEntryInTheBatchOfItsReply) {
  Handle(SubmitEvent{CallId(1), Spec(), "r",
                     User("alice", security::Role::kSubmitter, "JobService.Submit")});
  Handle(CancelEvent{CallId(2), "nothing",
                     User("bob", security::Role::kSubmitter, "JobService.CancelJob")});
  Handle(RemoveWorkerEvent{CallId(3), "w9",
                           User("oscar", security::Role::kOperator, "AdminService.RemoveWorker")});
  const auto entries = Audit();
  ASSERT_THAT(entries, SizeIs(3));
  EXPECT_EQ(entries[0].sequence(), 1u);
  EXPECT_EQ(entries[0].who(), "user alice");
  EXPECT_EQ(entries[0].target(), core_->GetJob("job")->id());
  EXPECT_EQ(entries[0].status_code(), 0);
  EXPECT_EQ(FromProto(entries[0].time()), now_);
  EXPECT_EQ(entries[1].status_code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(entries[1].target(), "named");
  EXPECT_EQ(entries[2].method(), "AdminService.RemoveWorker");
  EXPECT_EQ(entries[2].address(), "ipv4:10.0.0.7");
  // Numbers go on after a restart.
  Restart();
  v1::AuditEntry refused;
  refused.set_who("nobody");
  Handle(AuditEvent{refused});
  ASSERT_THAT(Audit(), SizeIs(4));
  EXPECT_EQ(Audit()[3].sequence(), 4u);
  ExpectReplays();
}

TEST_F(AccessTest, CallsOfWhichNothingIsKnown_LeaveNoEntry) {
  Submit();
  Handle(CancelEvent{CallId(2), "job"});
  EXPECT_THAT(Audit(), SizeIs(0));
  EXPECT_EQ(core_->GetJob("job")->owner(), "");
}

TEST_F(AccessTest, TokensAreDurable_PublishedAtTheStart_AndFoldedAgain) {
  CreateToken("aaa");
  ASSERT_OK(Reply());
  ASSERT_THAT(Actions<TokenChanged>(), SizeIs(1));
  EXPECT_EQ(Actions<TokenChanged>()[0].row.token().created_by(), "user admin");
  Restart();
  ASSERT_THAT(Actions<TokenChanged>(), SizeIs(1));
  EXPECT_EQ(Actions<TokenChanged>()[0].row.secret_hash(), "hash");
  CreateToken("aaa");
  EXPECT_THAT(Reply(), StatusIs(absl::StatusCode::kAlreadyExists));
  Revoke("aaa");
  ASSERT_OK(Reply());
  EXPECT_TRUE(Actions<TokenChanged>()[0].row.token().has_revoked());
  const absl::Time revoked = FromProto(Actions<TokenChanged>()[0].row.token().revoked());
  now_ += absl::Hours(1);
  Revoke("aaa");  // again: it keeps its time
  ASSERT_OK(Reply());
  Restart();
  EXPECT_EQ(FromProto(Actions<TokenChanged>()[0].row.token().revoked()), revoked);
  Revoke("bbb");
  EXPECT_THAT(Reply(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("token list")));
  ExpectReplays();
}

TEST_F(AccessTest, TokensThatEndedLongAgo_AreForgotten) {
  CreateToken("aaa");
  CreateToken("bbb");
  Revoke("aaa");
  now_ += kEndedTokensKept + absl::Hours(1);
  CreateToken("ccc");
  ASSERT_THAT(Actions<TokenForgotten>(), SizeIs(1));
  EXPECT_EQ(Actions<TokenForgotten>()[0].id, "aaa");
  Revoke("aaa");
  EXPECT_THAT(Reply(), StatusIs(absl::StatusCode::kNotFound));
  ExpectReplays();
}

TEST_F(AccessTest, TooManyTokens_AreRefused) {
  if (testing::kSanitized) GTEST_SKIP() << "makes ten thousand tokens, which takes a minute";
  for (size_t i = 0; i < kTokensMax; ++i) CreateToken(absl::StrCat("t", i));
  ASSERT_OK(Reply());
  CreateToken("more");
  EXPECT_THAT(Reply(), StatusIs(absl::StatusCode::kResourceExhausted));
}

TEST_F(AccessTest, ARestoredState_HasRevokedItsTokens_AndLeapsInTheAuditLog) {
  CreateToken("aaa");
  Rng rng(1);
  ASSERT_OK(MarkRestored(*store_, rng, now_));
  Restart();
  ASSERT_THAT(Actions<TokenChanged>(), SizeIs(1));
  EXPECT_TRUE(Actions<TokenChanged>()[0].row.token().has_revoked());
  CreateToken("bbb");
  EXPECT_GT(Audit().back().sequence(), 1000u);
  ExpectReplays();
}

}  // namespace
}  // namespace muster::coordinator
