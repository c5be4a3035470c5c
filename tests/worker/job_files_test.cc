// Secrets and allowed paths of jobs, on real files.
#include "worker/daemon/job_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::worker {
namespace {

namespace fs = std::filesystem;
using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

constexpr char kValue[] = "s3cr3t-value";

class JobFilesTest : public ::testing::Test {
 protected:
  JobFilesTest() {
    policy_.secrets_directory = Path("secrets");
    fs::create_directories(policy_.secrets_directory);
    spec_.set_queue("research");
  }
  std::string Path(const std::string& name) const { return directory_ / name; }
  void Write(const std::string& name, const std::string& text, mode_t mode = 0400) {
    fs::create_directories(fs::path(Path(name)).parent_path());
    ASSERT_OK(PosixFileSystem()->WriteAtomically(Path(name), text));
    ASSERT_EQ(::chmod(Path(name).c_str(), mode), 0);
  }
  void Refer(const std::string& variable, const std::string& secret) {
    (*spec_.mutable_env())[variable] = absl::StrCat("${secret:", secret, "}");
  }
  absl::Status Error() {
    const absl::Status status = ReadSecrets(policy_, spec_).status();
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(kValue)));
    return status;
  }

  testing::TemporaryDirectory directory_;
  JobFilePolicy policy_;
  v1::JobSpec spec_;
};

TEST_F(JobFilesTest, SecretsAreReadFromTheQueuesFolderFirst) {
  Write("secrets/token", absl::StrCat(kValue, "\n"));
  Write("secrets/key", "of all");
  Write("secrets/research/key", "of research");
  Refer("TOKEN", "token");
  Refer("KEY", "key");
  (*spec_.mutable_env())["PLAIN"] = "x";
  ASSERT_OK_AND_ASSIGN(const auto secrets, ReadSecrets(policy_, spec_));
  EXPECT_THAT(secrets, ElementsAre(Pair("KEY", "of research"), Pair("TOKEN", kValue)));
  spec_.set_queue("other");
  ASSERT_OK_AND_ASSIGN(const auto others, ReadSecrets(policy_, spec_));
  EXPECT_EQ(others.at("KEY"), "of all");
}

TEST_F(JobFilesTest, ASecretOfAnotherQueueIsNone) {
  Write("secrets/research/key", kValue);
  Refer("KEY", "key");
  spec_.set_queue("other");
  EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("secret key")));
  spec_.set_queue("../research");
  EXPECT_FALSE(Error().ok());
}

TEST_F(JobFilesTest, LinksInsideTheDirectoryAreFollowed_AsKubernetesMountsThem) {
  Write("secrets/..2026/token", kValue);
  fs::create_symlink("..2026", Path("secrets/..data"));
  fs::create_symlink("..data/token", Path("secrets/token"));
  Refer("TOKEN", "token");
  ASSERT_OK_AND_ASSIGN(const auto secrets, ReadSecrets(policy_, spec_));
  EXPECT_EQ(secrets.at("TOKEN"), kValue);
}

TEST_F(JobFilesTest, NothingOutsideTheDirectoryIsASecret) {
  Write("outside", kValue);
  fs::create_symlink(Path("outside"), Path("secrets/absolute"));
  fs::create_symlink("../outside", Path("secrets/relative"));
  for (const char* name : {"absolute", "relative"}) {
    Refer("A", name);
    EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("leads out of")));
  }
}

TEST_F(JobFilesTest, FilesThatOthersMayRead_AreRefused) {
  Refer("TOKEN", "token");
  for (const mode_t mode : {0644, 0604, 0420, 0402}) {
    Write("secrets/token", kValue, mode);
    EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kPermissionDenied,
                                  AllOf(HasSubstr("secret token"), HasSubstr("chmod 0400"))))
        << mode;
  }
  Write("secrets/token", kValue, 0440);
  EXPECT_OK(Error());
}

TEST_F(JobFilesTest, FilesOfAnotherUser_AreRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may give files away";
  Write("secrets/token", kValue);
  ASSERT_EQ(::chown(Path("secrets/token").c_str(), 12345, 0), 0);
  Refer("TOKEN", "token");
  EXPECT_THAT(Error(),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("belongs to user 12345")));
}

TEST_F(JobFilesTest, WhatIsNoSecretIsRefused) {
  Refer("A", "absent");
  EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("secret absent")));
  fs::create_directory(Path("secrets/folder"));
  Refer("A", "folder");
  EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("not a file")));
  Write("secrets/long", std::string(100 << 10, 'x'));
  Refer("A", "long");
  EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("longer than")));
  Write("secrets/zero", std::string("a\0b", 3));
  Refer("A", "zero");
  EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("zero byte")));
  policy_.secrets_directory.clear();
  EXPECT_THAT(Error(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("no --secrets")));
}

TEST_F(JobFilesTest, PathsLieInAllowedDirectories_LinksFollowed) {
  fs::create_directories(Path("allowed/a"));
  fs::create_directories(Path("allowed-not"));
  fs::create_directory_symlink(Path("allowed/a"), Path("link-in"));
  fs::create_directory_symlink(Path("allowed-not"), Path("allowed/link-out"));
  fs::create_directory_symlink("/nonexistent/x", Path("allowed/dangling"));
  fs::create_directory_symlink("loop", Path("allowed/loop"));
  policy_.allowed_paths = {Path("none"), Path("allowed")};
  const auto allowed = [this](const std::string& name) {
    return AllowedPath(policy_, Path(name)).status();
  };
  EXPECT_OK(allowed("allowed"));
  EXPECT_OK(allowed("allowed/a/new/folder"));
  EXPECT_OK(allowed("allowed-not/../allowed/a"));
  EXPECT_OK(allowed("link-in/x"));
  ASSERT_OK_AND_ASSIGN(const std::string resolved, AllowedPath(policy_, Path("link-in/x")));
  EXPECT_EQ(resolved, fs::canonical(Path("allowed/a")).string() + "/x");
  for (const char* name : {"", "allowed-not", "allowed/..", "allowed/../allowed-not",
                           "allowed/link-out", "allowed/link-out/new"}) {
    EXPECT_THAT(allowed(name),
                StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("--allow-path")))
        << name;
  }
  for (const char* name : {"allowed/dangling", "allowed/dangling/x", "allowed/loop",
                           "allowed/new/../../allowed-not"}) {
    EXPECT_EQ(allowed(name).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(AllowedPath(policy_, "allowed").status().code(), absl::StatusCode::kInvalidArgument);
  policy_.allowed_paths = {"/"};
  EXPECT_OK(allowed("allowed-not"));
}

TEST_F(JobFilesTest, WorkingDirectoryAndCheckpointsAreChecked) {
  fs::create_directories(Path("allowed/a"));
  fs::create_directory_symlink("/tmp", Path("allowed/a/out"));
  policy_.allowed_paths = {Path("allowed")};
  spec_.set_working_directory(Path("allowed/a"));
  spec_.mutable_checkpoint()->set_path("checkpoints");
  EXPECT_OK(CheckJobFiles(policy_, spec_));
  spec_.mutable_checkpoint()->set_path("out/checkpoints");
  EXPECT_THAT(CheckJobFiles(policy_, spec_),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("checkpoint.path")));
  spec_.mutable_checkpoint()->set_path("../../checkpoints");
  EXPECT_FALSE(CheckJobFiles(policy_, spec_).ok());
  spec_.clear_checkpoint();
  spec_.set_working_directory("/");
  EXPECT_THAT(CheckJobFiles(policy_, spec_),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("working_directory")));
}

}  // namespace
}  // namespace muster::worker
