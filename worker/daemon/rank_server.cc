#include "worker/daemon/rank_server.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "muster/v1/rank_service.grpc.pb.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/rank_files.h"

namespace muster::worker {
namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

// One call in flight. The thread that takes it out of the table finishes it, exactly one of Reply,
// cancellation and shutdown; gRPC then calls OnDone.
class Pending : public grpc::ServerUnaryReactor {
 public:
  virtual void Complete(const absl::StatusOr<RankResponse>& response) = 0;

  std::function<void()> cancelled;
  void OnCancel() override { cancelled(); }
  void OnDone() override { delete this; }
};

template <typename Response>
class TypedPending : public Pending {
 public:
  explicit TypedPending(Response* response) : response_(response) {}
  void Complete(const absl::StatusOr<RankResponse>& response) override {
    if (!response.ok()) return Finish(ToGrpc(response.status()));
    *response_ = std::get<Response>(*response);
    Finish(grpc::Status::OK);
  }

 private:
  Response* response_;
};

// Calls that wait, of all sockets. Thread-safe.
class WaitingCalls {
 public:
  explicit WaitingCalls(std::function<void(DaemonEvent)> post) : post_(std::move(post)) {}

  // Ends every waiting call, and each that comes from now on.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::map<CallId, Pending*> waiting;
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      waiting.swap(waiting_);
    }
    for (const auto& [call, pending] : waiting) pending->Complete(Stopping());
  }

  void Reply(const ReplyToRank& reply) {
    Pending* pending = Take(reply.call);
    if (pending != nullptr) pending->Complete(reply.response);
  }

  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Hold(const Request& request, Response* response)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    auto* pending = new TypedPending<Response>(response);
    CallId call;
    bool refused = false;
    {
      MutexLock lock(&mutex_);
      call = CallId(++last_call_);
      pending->cancelled = [this, call] { Cancelled(call); };
      refused = stopping_;
      if (!refused) waiting_[call] = pending;
    }
    if (refused) {
      pending->Complete(Stopping());
    } else {
      post_(RankCall{call, request});
    }
    return pending;
  }

 private:
  static absl::Status Stopping() {
    return absl::UnavailableError("the worker daemon is stopping; try again");
  }

  void Cancelled(CallId call) {
    Pending* pending = Take(call);
    if (pending == nullptr) return;  // finished already
    pending->Complete(absl::CancelledError("the caller is gone"));
    post_(RankCallCancelled{call});
  }

  Pending* Take(CallId call) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto found = waiting_.find(call);
    if (found == waiting_.end()) return nullptr;
    Pending* pending = found->second;
    waiting_.erase(found);
    return pending;
  }

  const std::function<void(DaemonEvent)> post_;
  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_call_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<CallId, Pending*> waiting_ ABSL_GUARDED_BY(mutex_);
};

// RankService on one socket: that of the daemon's user, or of one account.
class Service : public v1::RankService::CallbackService {
 public:
  Service(WaitingCalls& calls, const std::string& attempts_directory, std::optional<uid_t> uid)
      : calls_(calls), attempts_directory_(attempts_directory), uid_(uid) {}

  grpc::ServerUnaryReactor* Report(grpc::CallbackServerContext* context,
                                   const v1::ReportRequest* request,
                                   v1::ReportResponse* response) override {
    return Hold(context, *request, response);
  }
  grpc::ServerUnaryReactor* Put(grpc::CallbackServerContext* context, const v1::PutRequest* request,
                                v1::PutResponse* response) override {
    return Hold(context, *request, response);
  }
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const v1::GetRequest* request,
                                v1::GetResponse* response) override {
    return Hold(context, *request, response);
  }
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override {
    return Hold(context, *request, response);
  }
  grpc::ServerUnaryReactor* Notify(grpc::CallbackServerContext* context,
                                   const v1::NotifyRequest* request,
                                   v1::NotifyResponse* response) override {
    return Hold(context, *request, response);
  }

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Hold(grpc::CallbackServerContext* context, const Request& request,
                                 Response* response) {
    if (uid_.has_value()) {
      const RankKey rank{KeyOf(request.identity()), request.identity().rank()};
      const RankFiles files(absl::StrCat(attempts_directory_, "/", RunDirectoryName(rank)));
      if (files.uid() != uid_) {
        grpc::ServerUnaryReactor* refused = context->DefaultReactor();
        refused->Finish(ToGrpc(absl::PermissionDeniedError(
            absl::StrCat(ToString(rank), " does not run as user ", *uid_, ", who calls"))));
        return refused;
      }
    }
    return calls_.Hold(request, response);
  }

  WaitingCalls& calls_;
  const std::string& attempts_directory_;
  const std::optional<uid_t> uid_;  // of the only callers
};

void ShutDown(grpc::Server& server) {
  server.Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  server.Wait();
}

// The socket of one account: connections are taken here, so that the kernel is asked who they are
// from before anything is read from them.
class UserListener {
 public:
  UserListener(WaitingCalls& calls, const std::string& attempts_directory, uid_t uid)
      : uid_(uid), service_(calls, attempts_directory, uid), wake_(::eventfd(0, EFD_CLOEXEC)) {}
  ~UserListener() {
    if (thread_.joinable()) {
      const uint64_t one = 1;
      (void)!::write(wake_.get(), &one, sizeof(one));
      thread_.join();
    }
    if (server_ != nullptr) ShutDown(*server_);
  }

  absl::Status Listen(const std::string& path, gid_t gid) {
    const auto failed = [&path](const char* what) {
      return absl::UnavailableError(
          absl::StrCat("cannot ", what, " the unix socket ", path, ": ", std::strerror(errno)));
    };
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
      return absl::UnavailableError(absl::StrCat(path, " is too long a path for a unix socket"));
    }
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    listener_.Reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_.valid() || !wake_.valid()) return failed("make");
    ::unlink(path.c_str());
    // Before it has a name, so that it never has another mode under it.
    if (::fchmod(listener_.get(), 0600) != 0 ||
        ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
        ::chmod(path.c_str(), 0600) != 0 || ::lchown(path.c_str(), uid_, gid) != 0 ||
        ::listen(listener_.get(), SOMAXCONN) != 0) {
      return failed("listen on");
    }
    grpc::ServerBuilder builder;
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot serve the unix socket ", path));
    }
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

 private:
  void Run() {
    // Second descriptors of the connections that are open: gRPC does not tell when it closes its
    // own, but the kernel tells here that the other end is gone.
    std::vector<UniqueFd> open;
    while (true) {
      const bool full = open.size() >= RankServer::kUserConnectionsMax;
      std::vector<pollfd> wait = {{wake_.get(), POLLIN, 0}};
      for (const UniqueFd& connection : open) wait.push_back({connection.get(), POLLRDHUP, 0});
      wait.push_back({full ? -1 : listener_.get(), POLLIN, 0});
      if (::poll(wait.data(), wait.size(), -1) < 0 && errno != EINTR) return;
      if (wait.front().revents != 0) return;
      size_t kept = 0;
      for (size_t i = 0; i < open.size(); ++i) {
        if (wait[i + 1].revents != 0) continue;
        if (kept != i) open[kept] = std::move(open[i]);
        ++kept;
      }
      open.resize(kept);
      if (wait.back().revents == 0) continue;
      UniqueFd connection(
          ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!connection.valid()) {
        // No descriptor is free: connections that wait are taken once one is.
        if (errno == EMFILE || errno == ENFILE) ::poll(wait.data(), 1, kFullRetryMs);
        continue;
      }
      ucred peer = {};
      socklen_t size = sizeof(peer);
      if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
          peer.uid != uid_) {
        continue;  // closes it
      }
      UniqueFd second(::fcntl(connection.get(), F_DUPFD_CLOEXEC, 0));
      if (!second.valid()) continue;  // no descriptor is free: the caller tries again
      open.push_back(std::move(second));
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
      parameters.listener_fd = listener_.get();
      parameters.fd = connection.Release();
      acceptor_->HandleNewConnection(&parameters);
    }
  }

  static constexpr int kFullRetryMs = 100;

  const uid_t uid_;
  Service service_;
  const UniqueFd wake_;  // an eventfd: the thread is to end
  UniqueFd listener_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
  std::thread thread_;
};

class GrpcRankServer : public RankServer {
 public:
  GrpcRankServer(std::string attempts_directory, std::function<void(DaemonEvent)> post)
      : attempts_directory_(std::move(attempts_directory)),
        calls_(std::move(post)),
        service_(calls_, attempts_directory_, std::nullopt) {}

  ~GrpcRankServer() override {
    calls_.Stop();
    {
      MutexLock lock(&mutex_);
      users_.clear();
    }
    if (server_ != nullptr) ShutDown(*server_);
  }

  absl::Status Listen(const std::string& socket) override {
    ::unlink(socket.c_str());
    grpc::ServerBuilder builder;
    int bound = 0;
    builder.AddListeningPort(absl::StrCat("unix:", socket), grpc::InsecureServerCredentials(),
                             &bound);
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot listen on the unix socket ", socket));
    }
    ::chmod(socket.c_str(), 0600);
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> ListenForUser(const std::string& users_directory, uid_t uid,
                                            gid_t gid) override ABSL_LOCKS_EXCLUDED(mutex_) {
    const std::string path = absl::StrCat(users_directory, "/", uid, "/rank.sock");
    MutexLock lock(&mutex_);
    if (users_.count(uid) > 0) return path;
    auto listener = std::make_unique<UserListener>(calls_, attempts_directory_, uid);
    const absl::Status status = listener->Listen(path, gid);
    if (!status.ok()) return status;
    users_[uid] = std::move(listener);
    return path;
  }

  void Reply(ReplyToRank reply) override { calls_.Reply(reply); }

 private:
  const std::string attempts_directory_;
  WaitingCalls calls_;
  Service service_;  // of the daemon's own user
  std::unique_ptr<grpc::Server> server_;
  Mutex mutex_;
  std::map<uid_t, std::unique_ptr<UserListener>> users_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<RankServer> RankServer::Make(std::string attempts_directory,
                                             std::function<void(DaemonEvent)> post) {
  return std::make_unique<GrpcRankServer>(std::move(attempts_directory), std::move(post));
}

}  // namespace muster::worker
