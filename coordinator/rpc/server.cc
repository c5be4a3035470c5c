#include "coordinator/rpc/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/server_interceptor.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/admin_service.h"
#include "coordinator/rpc/call_log.h"
#include "coordinator/rpc/external_scaler.h"
#include "coordinator/rpc/job_service.h"
#include "coordinator/rpc/worker_service.h"
#include "coordinator/shell.h"
#include "security/credentials.h"

namespace muster::coordinator {
namespace {

std::string HostOf(const std::string& address) { return address.substr(0, address.rfind(':')); }

// Measures one call with a single reply, from its arrival until its status is sent, and logs it
// where it was slow or failed.
class CallTimer : public grpc::experimental::Interceptor {
 public:
  CallTimer(Metrics& metrics, CallLog& log, const grpc::ServerContextBase& context,
            std::string method)
      : metrics_(metrics),
        log_(log),
        context_(context),
        method_(std::move(method)),
        start_(absl::Now()) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      // A step of the clock is no time of the call.
      const absl::Time now = absl::Now();
      const absl::Duration took = std::max(absl::ZeroDuration(), now - start_);
      metrics_.RpcTook(method_, took);
      const grpc::Status status = methods->GetSendStatus();
      if (!log_.Ignores(took, status.ok())) Log(took, status, now);
    }
    methods->Proceed();
  }

 private:
  void Log(absl::Duration took, const grpc::Status& status, absl::Time now) {
    const auto& metadata = context_.client_metadata();
    const auto traceparent = metadata.find("traceparent");
    log_.Ended(
        {.method = method_,
         .address = HostOf(context_.peer()),
         .traceparent = traceparent == metadata.end()
                            ? ""
                            : std::string(traceparent->second.data(), traceparent->second.size()),
         .took = took,
         .status = absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                                status.error_message())},
        now);
  }

  Metrics& metrics_;
  CallLog& log_;
  const grpc::ServerContextBase& context_;
  const std::string method_;
  const absl::Time start_;
};

class CallTimers : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  CallTimers(Metrics& metrics, CallLog& log) : metrics_(metrics), log_(log) {}
  // Null, so that streams are not intercepted at all.
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    if (info->type() != grpc::experimental::ServerRpcInfo::Type::UNARY) return nullptr;
    const std::string method = info->method();  // "/muster.v1.JobService/Submit"
    if (!absl::StartsWith(method, "/muster.")) return nullptr;
    return new CallTimer(metrics_, log_, *info->server_context(),
                         method.substr(method.rfind('/') + 1));
  }

 private:
  Metrics& metrics_;
  CallLog& log_;
};

class GrpcServer : public RpcServer {
 public:
  GrpcServer(Shell& shell, const Options& options)
      : shell_(shell),
        keepalive_ms_(static_cast<int>(absl::ToInt64Milliseconds(options.keepalive))),
        tls_(options.tls),
        slots_(options.slots),
        call_log_(shell.log(), options.slow_call, options.trace_seed) {}

  // Reads what callers are checked with.
  absl::Status Prepare(const Options& options) {
    GateOptions gate = options.gate;
    gate.tls = tls_.any();
    gate.ca = tls_.authorities;
    ASSIGN_OR_RETURN(gate_, Gate::Make(shell_, slots_, gate));
    job_service_ = MakeJobService(shell_, *gate_, options.version);
    worker_service_ = MakeWorkerService(shell_, *gate_, options.hello_timeout);
    admin_service_ = MakeAdminService(shell_, *gate_, options.backups);
    external_scaler_ = MakeExternalScaler(shell_, *gate_);
    return absl::OkStatus();
  }

  // False when the address cannot be bound.
  bool Bind(const std::string& address) {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kReceiveBytesMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
    // Requests are read before it is known who sends them.
    grpc::ResourceQuota quota("requests");
    quota.Resize(kRequestBytesMax);
    builder.SetResourceQuota(quota);
    // Two coordinators must never share a port.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms_);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms_);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // any number
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                               static_cast<int>(absl::ToInt64Milliseconds(kHandshakeTimeout)));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                               static_cast<int>(absl::ToInt64Milliseconds(kIdleConnectionTimeout)));
    // No limit on the pings of daemons and clients.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    // Only reflection uses the synchronous server's threads; the other services are callbacks.
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 1);
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> timers;
    timers.push_back(std::make_unique<CallTimers>(shell_.metrics(), call_log_));
    builder.experimental().SetInterceptorCreators(std::move(timers));
    builder.RegisterService(job_service_.get());
    builder.RegisterService(worker_service_.get());
    builder.RegisterService(admin_service_.get());
    builder.RegisterService(external_scaler_.get());
    int port = 0;
    builder.AddListeningPort(
        address, tls_.any() ? security::ServerCredentials(tls_) : grpc::InsecureServerCredentials(),
        &port);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) return false;
    address_ = absl::StrCat(HostOf(address), ":", port);
    return true;
  }

  ~GrpcServer() override { Stop(absl::ZeroDuration()); }

  const std::string& address() const override { return address_; }

  void Stop(absl::Duration grace) override {
    if (server_ == nullptr) return;
    server_->GetHealthCheckService()->SetServingStatus(false);
    shell_.Drain();
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    server_->Wait();
    server_.reset();
  }

 private:
  Shell& shell_;
  const int keepalive_ms_;
  const security::TlsFiles tls_;
  Slots slots_;
  CallLog call_log_;
  std::unique_ptr<Gate> gate_;
  std::unique_ptr<grpc::Service> job_service_;
  std::unique_ptr<grpc::Service> worker_service_;
  std::unique_ptr<grpc::Service> admin_service_;
  std::unique_ptr<grpc::Service> external_scaler_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace

absl::StatusOr<int> PortOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", address, "' is not HOST:PORT with a port of 0 to 65535"));
  }
  return port;
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(Shell& shell, const Options& options) {
  ASSIGN_OR_RETURN(const int port, PortOf(options.listen));
  // Both are global switches of gRPC that must be set before a server is built.
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  if (port == 0 && options.earlier_port != 0) {
    auto server = std::make_unique<GrpcServer>(shell, options);
    RETURN_IF_ERROR(server->Prepare(options));
    if (server->Bind(absl::StrCat(HostOf(options.listen), ":", options.earlier_port))) {
      return std::unique_ptr<RpcServer>(std::move(server));
    }
  }
  auto server = std::make_unique<GrpcServer>(shell, options);
  RETURN_IF_ERROR(server->Prepare(options));
  if (!server->Bind(options.listen)) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.listen,
                     ": another process uses the port, or no interface has the address"));
  }
  return std::unique_ptr<RpcServer>(std::move(server));
}

}  // namespace muster::coordinator
