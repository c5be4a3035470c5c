#include "worker/daemon/rank_server.h"

#include <grpcpp/grpcpp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "muster/v1/rank_service.grpc.pb.h"
#include "worker/daemon/core/limits.h"

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

class GrpcRankServer : public RankServer, public v1::RankService::CallbackService {
 public:
  explicit GrpcRankServer(std::function<void(DaemonEvent)> post) : post_(std::move(post)) {}

  ~GrpcRankServer() override {
    std::map<CallId, Pending*> waiting;
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      waiting.swap(waiting_);
    }
    for (const auto& [call, pending] : waiting) pending->Complete(Stopping());
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
    server_->Wait();
  }

  absl::Status Listen(const std::string& socket) {
    ::unlink(socket.c_str());
    grpc::ServerBuilder builder;
    int bound = 0;
    builder.AddListeningPort(absl::StrCat("unix:", socket), grpc::InsecureServerCredentials(),
                             &bound);
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot listen on the unix socket ", socket));
    }
    ::chmod(socket.c_str(), 0600);
    return absl::OkStatus();
  }

  void Reply(ReplyToRank reply) override {
    Pending* pending = Take(reply.call);
    if (pending != nullptr) pending->Complete(reply.response);
  }

  grpc::ServerUnaryReactor* Report(grpc::CallbackServerContext*, const v1::ReportRequest* request,
                                   v1::ReportResponse* response) override {
    return Hold(*request, response);
  }
  grpc::ServerUnaryReactor* Put(grpc::CallbackServerContext*, const v1::PutRequest* request,
                                v1::PutResponse* response) override {
    return Hold(*request, response);
  }
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext*, const v1::GetRequest* request,
                                v1::GetResponse* response) override {
    return Hold(*request, response);
  }
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext*, const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override {
    return Hold(*request, response);
  }
  grpc::ServerUnaryReactor* Notify(grpc::CallbackServerContext*, const v1::NotifyRequest* request,
                                   v1::NotifyResponse* response) override {
    return Hold(*request, response);
  }

 private:
  static absl::Status Stopping() {
    return absl::UnavailableError("the worker daemon is stopping; try again");
  }

  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Hold(const Request& request, Response* response) {
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

  void Cancelled(CallId call) {
    Pending* pending = Take(call);
    if (pending == nullptr) return;  // finished already
    pending->Complete(absl::CancelledError("the caller is gone"));
    post_(RankCallCancelled{call});
  }

  Pending* Take(CallId call) {
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
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RankServer>> RankServer::Start(
    const std::string& socket, std::function<void(DaemonEvent)> post) {
  auto server = std::make_unique<GrpcRankServer>(std::move(post));
  const absl::Status status = server->Listen(socket);
  if (!status.ok()) return status;
  return std::unique_ptr<RankServer>(std::move(server));
}

}  // namespace muster::worker
