// The server itself: health, reflection, bad input, ports, stop and keepalive.
#include <arpa/inet.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "tests/coordinator/rpc_fixture.h"
#include "tests/support/proxy.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

// Calls a method by its name with the bytes of one request: for requests that are no valid
// messages, and for services whose generated code Debian does not ship.
grpc::Status CallRaw(const Coordinator& coordinator, const std::string& method,
                     const std::string& request, std::string* reply) {
  grpc::GenericStub stub(coordinator.Channel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::Slice slice(request);
  const grpc::ByteBuffer sent(&slice, 1);
  grpc::ByteBuffer received;
  grpc::Status result;
  Notification done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &sent, &received,
                 [&](const grpc::Status& status) {
                   result = status;
                   done.Notify();
                 });
  done.WaitForNotification();
  std::vector<grpc::Slice> slices;
  if (result.ok() && received.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) {
      reply->append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
  }
  return result;
}

TEST_F(RpcTest, HealthCheck_Serves) {
  std::string reply;
  ASSERT_TRUE(CallRaw(*coordinator_, "/grpc.health.v1.Health/Check", "", &reply).ok());
  EXPECT_EQ(reply, "\x08\x01");  // HealthCheckResponse{status: SERVING}
}

TEST_F(RpcTest, Reflection_ListsTheServices) {
  std::string services;
  const std::string list_services("\x3a\x00", 2);  // ServerReflectionRequest{list_services: ""}
  ASSERT_TRUE(CallRaw(*coordinator_,
                      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                      list_services, &services)
                  .ok());
  EXPECT_THAT(services, HasSubstr("muster.v1.JobService"));
  EXPECT_THAT(services, HasSubstr("muster.v1.WorkerService"));
  EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
}

TEST_F(RpcTest, Version_NamesBuildAndCluster) {
  v1::GetVersionResponse version;
  ASSERT_TRUE(stub_->GetVersion(Context().get(), {}, &version).ok());
  EXPECT_EQ(version.version(), "1.2.3");
  EXPECT_EQ(version.cluster_id(), "test-cluster");
}

void SendBytes(int port, const std::string& bytes) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  // Fails when the server closes the connection first, which it may.
  send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  shutdown(socket, SHUT_WR);
  char buffer[4096];
  while (recv(socket, buffer, sizeof(buffer), 0) > 0) {
  }
  close(socket);
}

TEST_F(RpcTest, GarbageOnThePort_KillsNothing) {
  const v1::Job job = MustSubmit("gpt");
  Rng rng(testing::TestSeed());
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  SendBytes(coordinator_->port(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  SendBytes(coordinator_->port(), "\x16\x03\x01\x02");  // the start of TLS
  for (int i = 0; i < 40; ++i) {
    std::string bytes(1 + rng.Below(4096), '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng.Next());
    SendBytes(coordinator_->port(), (i % 2 == 0 ? preface : "") + bytes);
  }
  v1::GetJobRequest request;
  request.set_name("gpt");
  v1::Job found;
  ASSERT_TRUE(stub_->GetJob(Context().get(), request, &found).ok());
  EXPECT_EQ(found.id(), job.id());
}

TEST_F(RpcTest, MessageThatIsNoProto_FailsItsCallOnly) {
  Rng rng(testing::TestSeed() + 1);
  for (const char* method : {"/muster.v1.JobService/Submit", "/muster.v1.WorkerService/Session",
                             "/muster.v1.JobService/WatchEvents", "/muster.v1.JobService/None"}) {
    std::string bytes(100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng.Next() | 0x80);
    std::string reply;
    const grpc::Status status = CallRaw(*coordinator_, method, bytes, &reply);
    EXPECT_FALSE(status.ok()) << method;
    EXPECT_NE(status.error_code(), grpc::DEADLINE_EXCEEDED) << method;
  }
  MustSubmit("gpt");
}

TEST_F(RpcTest, SecondServerOnAPortInUse_IsRefused) {
  auto store = MemoryStore::Make("other");
  RealClock clock;
  const auto log = Logger::Discard();
  const auto registry = metrics::DiscardRegistry();
  Metrics metrics(*registry);
  ASSERT_OK_AND_ASSIGN(const auto shell, Shell::Start(
                                             {*store, clock, *log, metrics},
                                             [&](absl::Time now, CoreOutput* output) {
                                               return Core::Recover(CoreConfig(), *store, Rng(1),
                                                                    now, output);
                                             },
                                             nullptr));
  EXPECT_THAT(
      RpcServer::Start(*shell, {.listen = coordinator_->address()}),
      testing::StatusIs(absl::StatusCode::kUnavailable, HasSubstr(coordinator_->address())));
  EXPECT_THAT(RpcServer::Start(*shell, {.listen = "nowhere"}),
              testing::StatusIs(absl::StatusCode::kInvalidArgument));
  // Where another process has the earlier port, the system picks one.
  ASSERT_OK_AND_ASSIGN(
      const auto server,
      RpcServer::Start(*shell, {.listen = "127.0.0.1:0", .earlier_port = coordinator_->port()}));
  EXPECT_NE(server->address(), coordinator_->address());
  server->Stop(absl::Seconds(1));
}

TEST_F(RpcTest, Drain_EndsEveryStreamWithUnavailableInTime) {
  MustSubmit("gpt");
  Daemon daemon(*coordinator_, "w0", 1);
  daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
  v1::GetJobRequest get;
  get.set_name("gpt");
  const auto job_context = Context();
  const auto job_watch = stub_->WatchJob(job_context.get(), get);
  const auto event_context = Context();
  const auto event_watch = stub_->WatchEvents(event_context.get(), {});
  // gRPC cancels a call that reaches a server which has begun to stop.
  v1::Job job;
  ASSERT_TRUE(job_watch->Read(&job));
  v1::Event event;
  ASSERT_TRUE(event_watch->Read(&event));
  RealClock clock;
  const absl::Duration start = clock.Monotonic();
  coordinator_->Stop();
  // Streams end by themselves; the grace for stuck calls is not used up.
  EXPECT_LT(clock.Monotonic() - start, kGrace / 2);
  while (job_watch->Read(&job)) {
  }
  EXPECT_EQ(job_watch->Finish().error_code(), grpc::UNAVAILABLE);
  while (event_watch->Read(&event)) {
  }
  EXPECT_EQ(event_watch->Finish().error_code(), grpc::UNAVAILABLE);
  v1::FromCoordinator message;
  while (daemon.Read(&message)) {
  }
  EXPECT_EQ(daemon.Finish().error_code(), grpc::UNAVAILABLE);
}

// A peer that is gone leaves a connection that is open and silent.
TEST_F(RpcTest, HalfOpenConnection_IsClosedWhenItsPingsAreNotAnswered) {
  Coordinator coordinator(directory_ + "/other", /*keepalive=*/absl::Seconds(1));
  testing::Proxy proxy(coordinator.address());
  Daemon daemon(Coordinator::ChannelTo(proxy.address()), "w0", 1);
  daemon.ReadUntil([](const auto& message) { return message.has_welcome(); });
  proxy.Freeze();
  EXPECT_TRUE(proxy.AwaitServerGone(kGrace)) << "the coordinator kept it";
  daemon.Cancel();
}

}  // namespace
}  // namespace muster::coordinator
