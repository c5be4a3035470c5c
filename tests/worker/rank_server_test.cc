// The sockets of ranks: who may connect, and about which ranks they may call.
#include "worker/daemon/rank_server.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "muster/v1/rank_service.grpc.pb.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/rank_files.h"

namespace muster::worker {
namespace {

using ::testing::HasSubstr;

class RankServerTest : public ::testing::Test {
 protected:
  RankServerTest() {
    std::filesystem::create_directories(users_);
    for (const std::string job : {"mine", "others"}) {
      std::filesystem::create_directories(RunDirectory(job));
    }
    security::Account own;
    own.name = "me";
    own.uid = ::geteuid();
    own.gid = ::getegid();
    own.groups = {own.gid};
    EXPECT_OK(MakeRankDirectory(RunDirectory("mine"), users_, RunDirectoryName(Key("mine")), own));
    // Answers every call at once.
    server_ = RankServer::Make(attempts_, [this](DaemonEvent event) {
      if (const auto* call = std::get_if<RankCall>(&event)) {
        server_->Reply({call->call, RankResponse(v1::ReportResponse())});
      }
    });
  }
  static RankKey Key(const std::string& job) { return {{JobId(job), Epoch(1)}, 0}; }
  std::string RunDirectory(const std::string& job) const {
    return absl::StrCat(attempts_, "/", RunDirectoryName(Key(job)));
  }
  static grpc::Status Report(const std::string& socket, const std::string& job) {
    const auto stub = v1::RankService::NewStub(
        grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    v1::ReportRequest request;
    request.mutable_identity()->set_job_id(job);
    request.mutable_identity()->set_epoch(1);
    v1::ReportResponse response;
    return stub->Report(&context, request, &response);
  }

  testing::TemporaryDirectory directory_;
  const std::string attempts_ = directory_ / "a";
  const std::string users_ = directory_ / "u";
  std::unique_ptr<RankServer> server_;
};

TEST_F(RankServerTest, AnAccountCallsAboutItsOwnRanksAlone) {
  const auto socket = server_->ListenForUser(users_, ::geteuid(), ::getegid());
  ASSERT_OK(socket);
  struct stat info = {};
  ASSERT_EQ(::stat(socket->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_EQ(info.st_uid, ::geteuid());
  const grpc::Status own = Report(*socket, "mine");
  EXPECT_TRUE(own.ok()) << own.error_message();
  for (const std::string job : {"others", "none", "../u"}) {
    const grpc::Status refused = Report(*socket, job);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED) << job;
    EXPECT_THAT(refused.error_message(), HasSubstr("does not run as user"));
  }
  const auto again = server_->ListenForUser(users_, ::geteuid(), ::getegid());
  ASSERT_OK(again);
  EXPECT_EQ(*again, *socket);
}

TEST_F(RankServerTest, ConnectionsOfAnotherUserAreClosed) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, who may connect to every socket";
  std::filesystem::create_directories(users_ + "/64199");
  const auto socket = server_->ListenForUser(users_, 64199, 64199);
  ASSERT_OK(socket);
  EXPECT_EQ(Report(*socket, "mine").error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(RankServerTest, ConnectionsOfAnAccountAreBounded_AndTheNextIsTakenWhenOneEnds) {
  const auto socket = server_->ListenForUser(users_, ::geteuid(), ::getegid());
  ASSERT_OK(socket);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(socket->size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, socket->c_str(), socket->size() + 1);
  const auto connect = [&address] {
    UniqueFd one(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(one.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return one;
  };
  // A server greets a connection that it has taken.
  const auto greeted = [](const UniqueFd& one, int milliseconds) {
    pollfd wait = {one.get(), POLLIN, 0};
    return ::poll(&wait, 1, milliseconds) == 1 && (wait.revents & POLLIN) != 0;
  };
  std::vector<UniqueFd> open;
  for (int i = 0; i < RankServer::kUserConnectionsMax; ++i) open.push_back(connect());
  for (const UniqueFd& one : open) ASSERT_TRUE(greeted(one, 30'000));
  const UniqueFd more = connect();
  EXPECT_FALSE(greeted(more, 200));
  open.pop_back();
  EXPECT_TRUE(greeted(more, 30'000));
}

TEST_F(RankServerTest, TheDaemonsOwnUserCallsAboutAllRanks) {
  ASSERT_OK(server_->Listen(directory_ / "rank.sock"));
  for (const std::string job : {"mine", "others"}) {
    const grpc::Status status = Report(directory_ / "rank.sock", job);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
}

}  // namespace
}  // namespace muster::worker
