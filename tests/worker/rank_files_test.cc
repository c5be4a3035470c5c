// Files of ranks that run as accounts of their own, and what such a rank could plant among them.
#include "worker/daemon/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "security/accounts.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

namespace fs = std::filesystem;
using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

MATCHER_P(IsOkAndHolds, expected, "") {
  return arg.ok() && ::testing::ExplainMatchResult(expected, *arg, result_listener);
}

constexpr int64_t kAny = 1 << 20;

void Write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
std::string Read(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text, '\0');
  return text;
}

// An account with the ids of this process, so that no test needs to be root.
security::Account Own() {
  security::Account account;
  account.name = "me";
  account.uid = ::geteuid();
  account.gid = ::getegid();
  account.groups = {account.gid};
  return account;
}

class RankFilesTest : public ::testing::Test {
 protected:
  RankFilesTest() {
    fs::create_directories(users_);
    fs::create_directories(run_);
    Write(hidden_, "hidden");
  }
  // The rank's directory, of an account with this process's ids.
  std::string Make() {
    EXPECT_OK(MakeRankDirectory(run_, users_, "job.e1/rank-0", Own()));
    return RankDirectory(run_);
  }

  testing::TemporaryDirectory directory_;
  const std::string users_ = directory_ / "users";
  const std::string run_ = directory_ / "attempts/job.e1/rank-0";
  const std::string hidden_ = directory_ / "hidden";
};

TEST_F(RankFilesTest, WithoutAnAccountFilesAreInTheRunDirectory) {
  EXPECT_EQ(RankDirectory(run_), run_);
  Write(run_ + "/exit.pb", "report");
  const RankFiles files(run_);
  EXPECT_EQ(files.uid(), std::nullopt);
  EXPECT_THAT(files.Read("/exit.pb", kAny), IsOkAndHolds("report"));
  EXPECT_OK(files.Write("/profile.pb", "steps"));
  EXPECT_EQ(Read(run_ + "/profile.pb"), "steps");
}

TEST_F(RankFilesTest, AnAccountHasADirectoryOfItsOwn) {
  const std::string own = Make();
  EXPECT_EQ(own, absl::StrCat(users_, "/", ::geteuid(), "/run/job.e1/rank-0"));
  struct stat info = {};
  ASSERT_EQ(::stat(own.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
  EXPECT_EQ(info.st_uid, ::geteuid());
  ASSERT_EQ(::stat(fs::path(own).parent_path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0711u);
  const RankFiles files(run_);
  EXPECT_EQ(files.uid(), ::geteuid());
  EXPECT_OK(files.Write("/assignment.pb", "first"));
  EXPECT_OK(files.Write("/assignment.pb", "second"));
  EXPECT_THAT(files.Read("/assignment.pb", kAny), IsOkAndHolds("second"));
  EXPECT_THAT(files.ReadRange("/assignment.pb", 2, 3), IsOkAndHolds("con"));
  EXPECT_THAT(files.ReadRange("/assignment.pb", 4, 100), IsOkAndHolds("nd"));
  EXPECT_OK(MakeRankDirectory(run_, users_, "job.e1/rank-0", Own()));  // again changes nothing
  EXPECT_EQ(std::distance(fs::directory_iterator(own), fs::directory_iterator()), 1);
}

TEST_F(RankFilesTest, LinksAreNotFollowed_NorDirectoriesInTheirPlace) {
  const std::string own = Make();
  fs::create_symlink(hidden_, own + "/exit.pb");
  fs::create_directories(directory_ / "elsewhere");
  Write(directory_ / "elsewhere/7.pb", "hidden");
  fs::create_symlink(directory_ / "elsewhere", own + "/commits");
  const RankFiles files(run_);
  EXPECT_THAT(files.Read("/exit.pb", kAny), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(files.Size("/exit.pb"), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(files.Read("/commits/7.pb", kAny), ::testing::Not(IsOk()));
  EXPECT_THAT(files.List("/commits", 10), IsEmpty());
  EXPECT_EQ(ReadRankExitReport(run_), std::nullopt);
  EXPECT_THAT(ReadCommitRequests(run_), IsEmpty());
  // What is written replaces the link, and leaves what it leads to alone.
  EXPECT_OK(files.Write("/exit.pb", "new"));
  EXPECT_EQ(Read(hidden_), "hidden");
  EXPECT_THAT(files.Read("/exit.pb", kAny), IsOkAndHolds("new"));
}

TEST_F(RankFilesTest, PipesAndFilesWithoutEndHoldUpNobody) {
  const std::string own = Make();
  ASSERT_EQ(::mkfifo((own + "/exit.pb").c_str(), 0600), 0);
  Write(own + "/huge", "");
  ASSERT_EQ(::truncate((own + "/huge").c_str(), int64_t{1} << 40), 0);
  const RankFiles files(run_);
  EXPECT_THAT(files.Read("/exit.pb", kAny), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(files.Read("/huge", kAny), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(files.Read("/none", kAny), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(RankFilesTest, FilesOfOthersDoNotCount) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  security::Account other = Own();
  other.uid = other.gid = 64199;
  other.groups = {64199};
  ASSERT_EQ(::chmod(directory_.path().c_str(), 0711), 0);
  ASSERT_EQ(::chmod(users_.c_str(), 0711), 0);
  ASSERT_OK(MakeRankDirectory(run_, users_, "job.e1/rank-0", other));
  const std::string own = RankDirectory(run_);
  Write(own + "/exit.pb", "of root");  // as a link to a file of root's would be
  const RankFiles files(run_);
  EXPECT_EQ(files.uid(), 64199u);
  EXPECT_THAT(files.Read("/exit.pb", kAny),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("belongs to user 0")));
  ASSERT_OK(files.Write("/assignment.pb", "its own"));
  EXPECT_THAT(files.Read("/assignment.pb", kAny), IsOkAndHolds("its own"));
  // Another account does not get it.
  security::Account third = other;
  third.uid = 64198;
  EXPECT_THAT(MakeRankDirectory(run_, users_, "job.e1/rank-0", third),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_F(RankFilesTest, AnAccountThatCannotReachItsDirectoryIsToldWhy) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  security::Account other = Own();
  other.uid = other.gid = 64199;
  other.groups = {64199};
  ASSERT_EQ(::chmod(users_.c_str(), 0700), 0);
  EXPECT_THAT(MakeRankDirectory(run_, users_, "job.e1/rank-0", other),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("(mode o+x)")));
}

TEST_F(RankFilesTest, ActingAsAnAccountIsForTheThreadAndItsTime) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  security::Account other = Own();
  other.name = "other";
  other.uid = other.gid = 64199;
  other.groups = {64199};
  ASSERT_EQ(::chmod(hidden_.c_str(), 0600), 0);
  ASSERT_EQ(::chmod(directory_.path().c_str(), 0711), 0);
  {
    const security::ActAs as(other);
    EXPECT_FALSE(std::ifstream(hidden_).is_open());
  }
  EXPECT_TRUE(std::ifstream(hidden_).is_open());
  const security::ActAs nobody(std::nullopt);
  EXPECT_TRUE(std::ifstream(hidden_).is_open());
}

TEST_F(RankFilesTest, ATreeIsRemovedThroughNoLink_AndToABoundedDepth) {
  const std::string tree = directory_ / "tree";
  fs::create_directories(tree + "/a/b");
  Write(tree + "/a/b/file", "x");
  fs::create_directory_symlink(directory_.path(), tree + "/a/out");
  fs::create_symlink(hidden_, tree + "/file");
  EXPECT_OK(RemoveUntrustedTree(tree));
  EXPECT_FALSE(fs::exists(tree));
  EXPECT_EQ(Read(hidden_), "hidden");
  EXPECT_OK(RemoveUntrustedTree(tree));  // there is none
  fs::path deep = tree;
  for (int i = 0; i < 300; ++i) deep /= "d";
  fs::create_directories(deep);
  EXPECT_THAT(RemoveUntrustedTree(tree), StatusIs(absl::StatusCode::kResourceExhausted));
}

TEST(AccountMapTest, LinesNameIdentitiesAndAccounts) {
  EXPECT_THAT(security::ParseAccountMap("# remark\n\nalice@example.org  alice # her\n*\tguest\r\n"),
              IsOkAndHolds(ElementsAre(Pair("*", "guest"), Pair("alice@example.org", "alice"))));
  EXPECT_THAT(security::ParseAccountMap("alice\n"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("line 1")));
  EXPECT_THAT(security::ParseAccountMap("\na b c"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("line 2")));
  EXPECT_THAT(security::ParseAccountMap("a b\na c"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("a is twice here")));
  EXPECT_THAT(security::ParseAccountMap("a \x01z"), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(JobUserTest, WithoutTheFlagRanksAreTheDaemons) {
  EXPECT_OK(security::CheckJobUser({}));
  const auto account = security::AccountOf({}, "alice");
  ASSERT_OK(account);
  EXPECT_FALSE(account->has_value());
  security::JobUserPolicy policy;
  policy.map_file = "/etc/accounts";
  EXPECT_THAT(security::CheckJobUser(policy), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(JobUserTest, AccountsAreRefusedByName) {
  security::JobUserPolicy policy;
  policy.user = security::kJobUserOwner;
  EXPECT_THAT(security::AccountOf(policy, ""),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("the job has no owner")));
  EXPECT_THAT(security::AccountOf(policy, "no-such-user-here"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("account no-such-user-here of")));
  EXPECT_THAT(security::AccountOf(policy, "root"), StatusIs(absl::StatusCode::kPermissionDenied));
  EXPECT_THAT(security::AccountOf(policy, "daemon"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("--job-uid-min 1000")));
  policy.user = "daemon";  // one account for all may be a system's own
  const auto account = security::AccountOf(policy, "alice");
  ASSERT_OK(account);
  EXPECT_EQ((*account)->uid, 1u);
}

}  // namespace
}  // namespace muster::worker
