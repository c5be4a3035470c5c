// One contract for the file systems on disk and in memory, and the crashes that only the one in
// memory has.
#include "base/file_system.h"

#include <unistd.h>

#include <filesystem>
#include <string>

#include "tests/support/status_matchers.h"

namespace muster {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FileSystemContract : public ::testing::TestWithParam<bool> {
 protected:
  FileSystemContract() {
    if (GetParam()) {
      files_ = PosixFileSystem();
      char name[] = "/tmp/muster-files-XXXXXX";
      root_ = ::mkdtemp(name);
    } else {
      files_ = MemoryFileSystem::Make();
      root_ = "/memory";
    }
  }
  ~FileSystemContract() override {
    if (GetParam()) std::filesystem::remove_all(root_);
  }

  std::unique_ptr<FileSystem> files_;
  std::string root_;
};

TEST_P(FileSystemContract, WriteAtomically_ThenRead_GivesTheBytes) {
  ASSERT_OK(files_->WriteAtomically(root_ + "/a", "first"));
  ASSERT_OK(files_->WriteAtomically(root_ + "/a", "second"));
  ASSERT_OK_AND_ASSIGN(std::string bytes, files_->Read(root_ + "/a"));
  EXPECT_EQ(bytes, "second");
  ASSERT_OK_AND_ASSIGN(auto names, files_->List(root_));
  EXPECT_THAT(names, ElementsAre("a"));
}

TEST_P(FileSystemContract, WriteUnsynced_ThenRead_GivesTheBytesAndLeavesNothingBeside) {
  ASSERT_OK(files_->WriteUnsynced(root_ + "/a", "first"));
  ASSERT_OK(files_->WriteUnsynced(root_ + "/a", "2nd"));
  ASSERT_OK_AND_ASSIGN(std::string bytes, files_->Read(root_ + "/a"));
  EXPECT_EQ(bytes, "2nd");
  ASSERT_OK_AND_ASSIGN(auto names, files_->List(root_));
  EXPECT_THAT(names, ElementsAre("a"));
}

TEST_P(FileSystemContract, ReadRange_PastTheEnd_IsDataLossThatNamesThePath) {
  ASSERT_OK(files_->WriteAtomically(root_ + "/a", "12345"));
  ASSERT_OK_AND_ASSIGN(std::string middle, files_->ReadRange(root_ + "/a", 1, 3));
  EXPECT_EQ(middle, "234");
  EXPECT_THAT(files_->ReadRange(root_ + "/a", 3, 3),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(root_ + "/a")));
}

TEST_P(FileSystemContract, Reopen_CutsTheFileAndWritesBehind) {
  ASSERT_OK(files_->WriteAtomically(root_ + "/a", "12345"));
  ASSERT_OK_AND_ASSIGN(auto file, files_->Reopen(root_ + "/a", 3));
  ASSERT_OK(file->Append("xy"));
  ASSERT_OK(file->Append("z"));
  ASSERT_OK(file->Close());
  ASSERT_OK_AND_ASSIGN(const std::string bytes, files_->Read(root_ + "/a"));
  EXPECT_EQ(bytes, "123xyz");
  EXPECT_THAT(files_->Reopen(root_ + "/a", 7),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(root_ + "/a has 6 bytes")));
  EXPECT_THAT(files_->Reopen(root_ + "/none", 0), StatusIs(absl::StatusCode::kNotFound));
}

TEST_P(FileSystemContract, MissingFile_IsNotFound) {
  EXPECT_THAT(files_->Read(root_ + "/none"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(root_ + "/none")));
  EXPECT_THAT(files_->RemoveFile(root_ + "/none"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_OK(files_->RemoveTree(root_ + "/none"));
}

TEST_P(FileSystemContract, RenamedDirectory_KeepsItsFiles) {
  ASSERT_OK(files_->MakeDirectory(root_ + "/d.tmp"));
  ASSERT_OK(files_->WriteAtomically(root_ + "/d.tmp/f", "x"));
  ASSERT_OK(files_->Rename(root_ + "/d.tmp", root_ + "/d"));
  ASSERT_OK_AND_ASSIGN(std::string bytes, files_->Read(root_ + "/d/f"));
  EXPECT_EQ(bytes, "x");
  EXPECT_FALSE(files_->Exists(root_ + "/d.tmp/f"));
}

INSTANTIATE_TEST_SUITE_P(Posix, FileSystemContract, ::testing::Values(true));
INSTANTIATE_TEST_SUITE_P(Memory, FileSystemContract, ::testing::Values(false));

TEST(MemoryFileSystem, Crash_ForgetsUnsyncedBytesAndUnsyncedNames) {
  auto files = MemoryFileSystem::Make();
  ASSERT_OK(files->WriteAtomically("/m/kept", "durable"));
  ASSERT_OK_AND_ASSIGN(auto open, files->Create("/m/new"));
  ASSERT_OK(open->Append("bytes"));
  ASSERT_OK(open->Sync());  // makes the bytes durable, not the name
  ASSERT_OK_AND_ASSIGN(auto rewritten, files->Create("/m/kept"));
  ASSERT_OK(rewritten->Append("half"));
  files->Crash();
  EXPECT_FALSE(files->Exists("/m/new"));
  ASSERT_OK_AND_ASSIGN(std::string bytes, files->Read("/m/kept"));
  EXPECT_EQ(bytes, "durable");
}

TEST(MemoryFileSystem, FailWrites_RefusesUntilCleared) {
  auto files = MemoryFileSystem::Make();
  files->FailWrites(true);
  EXPECT_THAT(files->WriteAtomically("/m/a", "x"), StatusIs(absl::StatusCode::kUnavailable));
  files->FailWrites(false);
  EXPECT_OK(files->WriteAtomically("/m/a", "x"));
}

}  // namespace
}  // namespace muster
