// The coordinator as its callers see it: real gRPC on loopback, the real core, a store on disk that
// outlives restarts.
#ifndef MUSTER_TESTS_COORDINATOR_RPC_FIXTURE_H_
#define MUSTER_TESTS_COORDINATOR_RPC_FIXTURE_H_

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/server.h"
#include "coordinator/shell.h"
#include "coordinator/store/store.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "security/tls_files.h"
#include "tests/support/job_spec.h"
#include "tests/support/seed.h"

namespace muster::coordinator {

// How long a stop waits for calls that do not end by themselves. No test waits for it.
constexpr absl::Duration kGrace = absl::Seconds(60);

// A whole coordinator on a data directory, on which it can be restarted.
class Coordinator {
 public:
  explicit Coordinator(std::string directory, absl::Duration keepalive = absl::Seconds(5),
                       absl::Duration hello_timeout = kHelloTimeout, security::TlsFiles tls = {},
                       GateOptions gate = {},
                       std::unique_ptr<metrics::Registry> registry = metrics::DiscardRegistry())
      : directory_(std::move(directory)),
        keepalive_(keepalive),
        hello_timeout_(hello_timeout),
        tls_(std::move(tls)),
        gate_(std::move(gate)),
        registry_(std::move(registry)) {
    Start();
  }
  ~Coordinator() { Stop(); }

  void Start() {
    auto opened = OpenRocksDbStore(directory_ + "/store", "", "test-cluster");
    CHECK_OK(opened);
    store_ = *std::move(opened);
    auto shell = Shell::Start(
        {*store_, clock_, *log_, metrics_},
        [this](absl::Time now, CoreOutput* output) {
          return Core::Recover(CoreConfig(), *store_, Rng(testing::TestSeed()), now, output);
        },
        nullptr);
    CHECK_OK(shell);
    shell_ = *std::move(shell);
    auto server = RpcServer::Start(*shell_, {.listen = "127.0.0.1:0",
                                             .version = "1.2.3",
                                             .earlier_port = port_,
                                             .backups = directory_ + "/backups",
                                             .keepalive = keepalive_,
                                             .hello_timeout = hello_timeout_,
                                             .tls = tls_,
                                             .gate = gate_});
    CHECK_OK(server);
    server_ = *std::move(server);
    CHECK(absl::SimpleAtoi(address().substr(address().rfind(':') + 1), &port_));
  }
  void Stop() {
    if (server_ == nullptr) return;
    server_->Stop(kGrace);
    server_.reset();
    shell_.reset();
    store_.reset();
  }
  void Restart() {
    Stop();
    Start();
  }

  const std::string& address() const { return server_->address(); }
  int port() const { return port_; }
  std::shared_ptr<grpc::Channel> Channel() const { return ChannelTo(address()); }
  static std::shared_ptr<grpc::Channel> ChannelTo(
      const std::string& address, const std::shared_ptr<grpc::ChannelCredentials>& credentials =
                                      grpc::InsecureChannelCredentials()) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    return grpc::CreateCustomChannel(address, credentials, arguments);
  }

 private:
  const std::string directory_;
  const absl::Duration keepalive_;
  const absl::Duration hello_timeout_;
  const security::TlsFiles tls_;
  const GateOptions gate_;
  int port_ = 0;
  RealClock clock_;
  std::shared_ptr<Logger> log_ = Logger::Discard();
  const std::unique_ptr<metrics::Registry> registry_;
  Metrics metrics_{*registry_};
  std::unique_ptr<Store> store_;
  std::unique_ptr<Shell> shell_;
  std::unique_ptr<RpcServer> server_;
};

class RpcTest : public ::testing::Test {
 protected:
  RpcTest() {
    std::string name = (std::filesystem::temp_directory_path() / "muster-rpc-XXXXXX").string();
    directory_ = mkdtemp(name.data());
    coordinator_ = std::make_unique<Coordinator>(directory_);
    stub_ = v1::JobService::NewStub(coordinator_->Channel());
  }
  ~RpcTest() override {
    coordinator_.reset();
    std::filesystem::remove_all(directory_);
  }

  // With a deadline, so that no call hangs for ever when the coordinator is broken.
  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    context->set_wait_for_ready(true);
    return context;
  }
  grpc::Status Submit(const v1::JobSpec& spec, const std::string& request_id,
                      v1::SubmitResponse* response) {
    v1::SubmitRequest request;
    *request.mutable_spec() = spec;
    request.set_request_id(request_id);
    return stub_->Submit(Context().get(), request, response);
  }
  v1::Job MustSubmit(const std::string& name) {
    v1::SubmitResponse response;
    const grpc::Status status = Submit(testing::SmallJobSpec(name), "", &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.job();
  }

  std::string directory_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<v1::JobService::Stub> stub_;
};

// A daemon that is nothing but its stream.
class Daemon {
 public:
  Daemon(const Coordinator& coordinator, const std::string& name, int slots)
      : Daemon(coordinator.Channel(), name, slots) {}
  Daemon(std::shared_ptr<grpc::Channel> channel, const std::string& name, int slots)
      : stub_(v1::WorkerService::NewStub(std::move(channel))), stream_(stub_->Session(&context_)) {
    v1::FromWorker message;
    message.set_incarnation(kIncarnation);
    v1::Hello& hello = *message.mutable_hello();
    hello.set_worker(name);
    hello.set_host("localhost");
    for (int i = 0; i < slots; ++i) {
      v1::Device& device = *hello.add_devices();
      device.set_name(absl::StrCat("cpu:", i));
      device.set_kind(v1::DEVICE_KIND_CPU);
    }
    hello.mutable_observed();
    EXPECT_TRUE(stream_->Write(message));
  }

  static constexpr uint64_t kIncarnation = 11;

  bool Write(v1::FromWorker message) {
    message.set_incarnation(kIncarnation);
    return stream_->Write(message);
  }
  bool Read(v1::FromCoordinator* message) { return stream_->Read(message); }
  // The next message of this kind; others are passed over.
  template <typename Has>
  v1::FromCoordinator ReadUntil(Has has) {
    v1::FromCoordinator message;
    while (Read(&message)) {
      if (has(message)) return message;
    }
    ADD_FAILURE() << "the stream ended: " << stream_->Finish().error_message();
    return message;
  }
  grpc::Status Finish() { return stream_->Finish(); }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  const std::unique_ptr<v1::WorkerService::Stub> stub_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::FromWorker, v1::FromCoordinator>> stream_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_TESTS_COORDINATOR_RPC_FIXTURE_H_
