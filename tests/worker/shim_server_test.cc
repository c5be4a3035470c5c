// Shims forked by a server of real processes; each says at its socket that it has its lock.
#include "worker/daemon/shim_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/proc.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

using ::muster::testing::IsOk;
using ::testing::HasSubstr;

constexpr int kPatienceMs = 30'000;

class ShimServerTest : public ::testing::Test {
 protected:
  ShimServerTest() {
    int sockets[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
    ours_.Reset(sockets[0]);
    theirs_.Reset(sockets[1]);
    shim_.run_directory = directory_.path();
    shim_.working_directory = directory_.path();
    shim_.command = {"/bin/sh", "-c", "echo $GIVEN $HOME >out"};
  }

  void Fork() {
    absl::StatusOr<UniqueFd> pidfd =
        server_.Fork(shim_, {"GIVEN=by the test", "PATH=/bin:/usr/bin"}, theirs_.get());
    ASSERT_OK(pidfd.status());
    pidfd_ = *std::move(pidfd);
    theirs_.Reset();
  }
  // The next word of the shim; 0: it has closed its end.
  char Word() {
    pollfd wait = {ours_.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&wait, 1, kPatienceMs), 1);
    char word = 0;
    return ::read(ours_.get(), &word, 1) == 1 ? word : 0;
  }
  void Go() { ASSERT_EQ(::write(ours_.get(), &kShimGo, 1), 1); }
  void AwaitEnd() {
    pollfd wait = {pidfd_.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&wait, 1, kPatienceMs), 1);
  }

  testing::TemporaryDirectory directory_;
  ShimOptions shim_;
  UniqueFd ours_, theirs_, pidfd_;
  ShimServer server_{MUSTER_WORKER_BINARY};
};

TEST_F(ShimServerTest, Shim_HasItsOwnSessionAndTheEnvironmentGivenAlone) {
  Fork();
  ASSERT_EQ(Word(), kShimLocked);
  Go();
  ASSERT_EQ(Word(), kShimRunning);
  AwaitEnd();
  ASSERT_OK_AND_ASSIGN(const std::string out, PosixFileSystem()->Read(directory_.path() + "/out"));
  EXPECT_EQ(out, "by the test\n");
  const auto record = ReadShimRecord(directory_.path());
  ASSERT_TRUE(record.has_value());
  const auto exit = ReadShimExit(directory_.path());
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->code(), 0);
  EXPECT_TRUE(exit->left_none());
}

TEST_F(ShimServerTest, Shim_OutlivesTheServerAndIsListedByItsRunDirectory) {
  shim_.command = {"/bin/sh", "-c", "read line <fifo"};
  Fork();
  ASSERT_EQ(Word(), kShimLocked);
  const pid_t server = server_.pid();
  ASSERT_EQ(::kill(server, SIGKILL), 0);
  Go();
  ASSERT_EQ(Word(), kShimRunning);
  AwaitEnd();  // there is no such file
  const auto record = ReadShimRecord(directory_.path());
  ASSERT_TRUE(record.has_value());
  EXPECT_NE(record->shim_pid(), server);
  EXPECT_TRUE(ReadShimExit(directory_.path()).has_value());
}

TEST_F(ShimServerTest, CommandLine_IsThatOfTheShim) {
  Fork();
  ASSERT_EQ(Word(), kShimLocked);
  const std::string children =
      ReadKernelFile(absl::StrCat("/proc/", server_.pid(), "/task/", server_.pid(), "/children"));
  const std::string command =
      ReadKernelFile(absl::StrCat("/proc/", std::stoi(children), "/cmdline"));
  EXPECT_THAT(command, HasSubstr(std::string("shim\0", 5) + directory_.path()));
  // Without a word to go on it ends.
  ours_.Reset();
  AwaitEnd();
  EXPECT_FALSE(ReadShimRecord(directory_.path()).has_value());
}

TEST_F(ShimServerTest, ServerThatWasKilled_IsStartedAgain) {
  ASSERT_OK(server_.Start());
  const pid_t first = server_.pid();
  ASSERT_EQ(::kill(first, SIGKILL), 0);
  Fork();
  EXPECT_NE(server_.pid(), first);
  EXPECT_EQ(Word(), kShimLocked);
}

TEST_F(ShimServerTest, ProgramThatDoesNotExist_IsNamed) {
  ShimServer absent("/nonexistent/muster-worker");
  EXPECT_THAT(absent.Fork(shim_, {}, theirs_.get()).status().message(),
              HasSubstr("/nonexistent/muster-worker"));
}

}  // namespace
}  // namespace muster::worker
