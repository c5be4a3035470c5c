#include "worker/daemon/session_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "security/credentials.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/outgoing_queue.h"

namespace muster::worker {
namespace {

constexpr char kFilePrefix[] = "file:";

absl::StatusOr<std::string> ResolveAddress(const std::string& coordinator) {
  if (!absl::StartsWith(coordinator, kFilePrefix)) return coordinator;
  const std::string path = coordinator.substr(sizeof(kFilePrefix) - 1);
  ASSIGN_OR_RETURN(std::string address, PosixFileSystem()->Read(path));
  absl::StripAsciiWhitespace(&address);
  if (address.empty()) {
    return absl::UnavailableError(absl::StrCat("the address file ", path, " is empty"));
  }
  return address;
}

// kFailedPrecondition: without TLS the coordinator must be on this machine.
absl::Status CheckLink(const std::string& address, const SessionClientOptions& options) {
  if (options.tls.any() || options.insecure) return absl::OkStatus();
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  const std::string host = parsed.ok() ? parsed->host : address;
  if (IsLoopbackAddress(host) || host == "localhost") return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the coordinator at ", address,
      " is another machine, and without TLS anybody on the way may run programs here: give "
      "--tls-cert, --tls-key and --tls-ca (`muster admin pki issue-worker` makes them; "
      "docs/security.md), or --insecure where the network lets nobody else in"));
}

std::shared_ptr<grpc::Channel> Dial(const std::string& address,
                                    const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                    const SessionClientOptions& options) {
  grpc::ChannelArguments arguments;
  if (!options.server_name.empty()) {
    arguments.SetString(GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, options.server_name);
  }
  // Every dial makes a connection of its own, and the back-off is ours, not the channel's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  // TCP's user timeout (gRPC sets it to the keepalive timeout) sees a machine that is gone; only
  // pings see a peer or a middlebox that acknowledges bytes and answers nothing.
  const int timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(options.dead_peer_timeout));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, timeout_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, timeout_ms);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // any number
  // Despite its name this is also the time that gRPC allows one attempt to connect.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.connect_timeout)));
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.connect_timeout)));
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// One stream. Owns itself from Start until OnDone, which hands it to `ended`. It must not be
// destroyed on a thread of gRPC: with the last stream goes the channel, and with the last channel
// go gRPC's callback threads, which cannot wait for themselves.
class Stream final : public grpc::ClientBidiReactor<v1::FromWorker, v1::FromCoordinator> {
 public:
  using Received = std::function<void(v1::FromCoordinator)>;
  using Ended = std::function<void(std::unique_ptr<Stream>, absl::Status)>;

  Stream(std::shared_ptr<grpc::Channel> channel, Received received, Ended ended)
      : stub_(v1::WorkerService::NewStub(std::move(channel))),
        received_(std::move(received)),
        ended_(std::move(ended)) {}

  void Start() {
    stub_->async()->Session(&context_, this);
    // Held until Cancel or the first failed operation: Write may be called from outside until then.
    AddHold();
    StartRead(&incoming_);
    StartCall();
  }

  void Write(v1::FromWorker message) {
    {
      MutexLock lock(&mutex_);
      if (ending_) return;
      const bool idle = outgoing_.empty();
      if (outgoing_.Push(std::move(message))) {
        if (idle) StartWrite(&outgoing_.Send());
        return;
      }
      full_ = true;
    }
    End();  // everything that matters is said again on the next stream
  }

  void Cancel() {
    context_.TryCancel();
    End();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End();
    received_(std::move(incoming_));
    incoming_ = v1::FromCoordinator();
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return End();
    MutexLock lock(&mutex_);
    outgoing_.Pop();
    if (!ending_ && !outgoing_.empty()) StartWrite(&outgoing_.Send());
  }
  void OnDone(const grpc::Status& status) override {
    const Ended ended = ended_;
    absl::Status why(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    {
      MutexLock lock(&mutex_);
      if (full_) {
        why = absl::ResourceExhaustedError(
            absl::StrCat("the coordinator reads too slowly: more than ", kOutgoingBytesMax,
                         " bytes waited for the stream"));
      }
    }
    ended(std::unique_ptr<Stream>(this), std::move(why));
  }

 private:
  void End() {
    {
      MutexLock lock(&mutex_);
      if (ending_) return;
      ending_ = true;
    }
    context_.TryCancel();
    RemoveHold();
  }

  grpc::ClientContext context_;
  std::unique_ptr<v1::WorkerService::Stub> stub_;
  const Received received_;
  const Ended ended_;
  v1::FromCoordinator incoming_;
  Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool full_ ABSL_GUARDED_BY(mutex_) = false;  // the queue took no more
  OutgoingQueue outgoing_ ABSL_GUARDED_BY(mutex_);
};

class GrpcSessionClient : public SessionClient {
 public:
  GrpcSessionClient(SessionClientOptions options, Loop& loop, Rng rng, std::shared_ptr<Logger> log,
                    SessionEvents events)
      : options_(std::move(options)),
        loop_(loop),
        rng_(rng),
        log_(std::move(log)),
        events_(std::move(events)),
        credentials_(options_.tls.any() ? security::ChannelCredentials(options_.tls)
                                        : grpc::InsecureChannelCredentials()),
        backoff_(options_.backoff_initial) {}

  ~GrpcSessionClient() override {
    MutexLock lock(&mutex_);
    CHECK(stopped_ && open_streams_ == 0) << "a session client is stopped before it is destroyed";
  }

  void Start() override { Connect(); }

  void Send(SessionId session, v1::FromWorker message) override {
    MutexLock lock(&mutex_);
    if (stream_ != nullptr && session == session_) stream_->Write(std::move(message));
  }

  void Reconnect(SessionId session) override {
    MutexLock lock(&mutex_);
    if (stream_ != nullptr && session == session_) stream_->Cancel();
  }

  void Stop() override {
    CHECK(!loop_.OnLoop());
    std::thread locator;
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
      if (stream_ != nullptr) stream_->Cancel();
      auto closed = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return open_streams_ == 0; };
      mutex_.Await(Condition(&closed));
      locator.swap(locator_);
    }
    if (locator.joinable()) locator.join();
  }

 private:
  void Connect() {
    absl::StatusOr<std::string> address = ResolveAddress(options_.coordinator);
    if (!address.ok()) {
      LogFailure(address.status());
      return ConnectLater();
    }
    if (const absl::Status link = CheckLink(*address, options_); !link.ok()) {
      LogFailure(link);
      return ConnectLater();
    }
    if (!options_.locate) return Open(*address, {});
    MutexLock lock(&mutex_);
    if (stopped_) return;
    if (locator_.joinable()) locator_.join();  // it has posted its result, and is ending
    locator_ = std::thread([this, address = *address] {
      loop_.Post([this, address, found = options_.locate(address)] {
        if (!found.ok()) LogFailure(Annotate(found.status(), "the address of this worker"));
        Open(address, found.ok() ? *found : WorkerAddress());
      });
    });
  }

  void Open(const std::string& address, const WorkerAddress& own) {
    SessionId session;
    {
      MutexLock lock(&mutex_);
      if (stopped_) return;
      session_ = session = SessionId(++last_session_);
      ++open_streams_;
      stream_ = new Stream(
          Dial(address, credentials_, options_),
          [this, session](v1::FromCoordinator message) {
            loop_.Post([this, session, message = std::move(message)]() mutable {
              OnMessage(session, std::move(message));
            });
          },
          [this, session](std::unique_ptr<Stream> stream, absl::Status status) {
            OnEnded(session, std::move(stream), std::move(status));
          });
      stream_->Start();
    }
    events_.up(session, own);
  }

  void OnMessage(SessionId session, v1::FromCoordinator message) {
    if (IsStopped()) return;
    if (message.has_welcome()) {
      backoff_ = options_.backoff_initial;
      last_failure_.clear();
    }
    events_.message(session, std::move(message));
  }

  // On a thread of gRPC. The loop destroys the stream, even when it drops the work.
  void OnEnded(SessionId session, std::unique_ptr<Stream> stream, absl::Status status) {
    MutexLock lock(&mutex_);
    stream_ = nullptr;
    if (stopped_) {
      loop_.Post([stream = std::move(stream)] {});
    } else {
      loop_.Post([this, session, stream = std::move(stream), status = std::move(status)] {
        if (IsStopped()) return;
        LogFailure(status);
        events_.down(session, status);
        ConnectLater();
      });
    }
    --open_streams_;  // last: Stop may return once this is zero
  }

  void ConnectLater() {
    const absl::Duration delay = backoff_ * (0.5 + 0.5 * rng_.Uniform());
    backoff_ = std::min(backoff_ * 2, options_.backoff_max);
    loop_.PostAfter(delay, [this] {
      if (!IsStopped()) Connect();
    });
  }

  // Logged once for each time that the coordinator goes away, not for every dial.
  void LogFailure(const absl::Status& status) {
    const std::string text = status.ToString();
    if (text == last_failure_) return;
    last_failure_ = text;
    log_->Warning("no session with the coordinator; ranks train on",
                  {{"coordinator", options_.coordinator}, {"error", text}});
  }

  bool IsStopped() {
    MutexLock lock(&mutex_);
    return stopped_;
  }

  const SessionClientOptions options_;
  Loop& loop_;
  Rng rng_;
  const std::shared_ptr<Logger> log_;
  const SessionEvents events_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  absl::Duration backoff_;
  std::string last_failure_;
  uint64_t last_session_ = 0;

  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  int open_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  SessionId session_ ABSL_GUARDED_BY(mutex_);
  Stream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;  // deletes itself after OnEnded
  std::thread locator_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<SessionClient> SessionClient::Make(SessionClientOptions options, Loop& loop,
                                                   Rng rng, std::shared_ptr<Logger> log,
                                                   SessionEvents events) {
  return std::make_unique<GrpcSessionClient>(std::move(options), loop, rng, std::move(log),
                                             std::move(events));
}

}  // namespace muster::worker
