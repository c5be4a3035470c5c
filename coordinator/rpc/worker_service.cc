#include "coordinator/rpc/worker_service.h"

#include <iterator>
#include <list>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/status.h"
#include "coordinator/shell.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "security/authorize.h"

namespace muster::coordinator {
namespace {

// One daemon's stream. It reads the next message when the core has handled the last one, and sends
// messages in the order of Send. Owns itself until gRPC is done with it; the shell shares it until
// then.
class Session : public grpc::ServerBidiReactor<v1::FromWorker, v1::FromCoordinator>,
                public SessionStream,
                public std::enable_shared_from_this<Session> {
 public:
  Session(Shell& shell, Gate& gate) : shell_(shell), gate_(gate) {}

  void Begin(const grpc::CallbackServerContext& context, absl::Duration hello_timeout) {
    self_ = shared_from_this();
    absl::StatusOr<Admitted> caller = gate_.Admit(context, "WorkerService.Session");
    if (!caller.ok()) return Close(caller.status());
    caller_ = *std::move(caller);
    checked_ = shell_.clock().Monotonic();
    absl::StatusOr<Slots::Slot> opening = gate_.TakeSlot(SlotKind::kOpening, caller_);
    if (!opening.ok()) return Close(opening.status());
    slot_ = *std::move(opening);
    StartRead(&read_);
    shell_.watch_loop().PostAfter(hello_timeout, [weak = weak_from_this(), hello_timeout] {
      if (const auto self = weak.lock()) self->EndWithoutHello(hello_timeout);
    });
  }

  // ---- SessionStream
  void Send(v1::FromCoordinator message) override {
    MutexLock lock(&mutex_);
    if (closing_) return;
    // A Desired is the whole state, so that a newer one replaces those that have not left yet.
    if (message.has_desired()) DropWaitingDesired();
    bytes_ += message.ByteSizeLong();
    queue_.push_back(std::move(message));
    if (bytes_ > kSessionQueueBytesMax) {
      DropWaiting();
      CloseLocked(absl::ResourceExhaustedError(absl::StrCat(
          "the daemon left more than ", kSessionQueueBytesMax, " bytes unread; reconnect")));
    } else if (!writing_) {
      WriteNext();
    }
  }

  void Close(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    CloseLocked(status);
  }

  // ---- gRPC
  void OnReadDone(bool ok) override {
    if (!ok) return Close(absl::CancelledError("the daemon closed the stream"));
    if (!session_.has_value()) return Open();
    if (read_.has_hello()) {
      return Close(absl::InvalidArgumentError("hello: only the first message can be one"));
    }
    if (read_.incarnation() != incarnation_.value()) {
      return Close(absl::AbortedError(absl::StrCat("incarnation ", read_.incarnation(),
                                                   " on the stream of incarnation ",
                                                   incarnation_.value(), " of worker ", worker_)));
    }
    // A daemon whose certificate has ended or was revoked dials again, with its newest.
    if (const absl::Duration now = shell_.clock().Monotonic(); now - checked_ > kRecheckInterval) {
      checked_ = now;
      if (const absl::Status may = gate_.Recheck(caller_); !may.ok()) {
        gate_.Audit(caller_, may);
        return Close(may);
      }
    }
    shell_.Deliver(*session_, std::move(read_), [self = shared_from_this()] { self->ReadOn(); });
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mutex_);
    writing_ = false;
    bytes_ -= queue_.front().ByteSizeLong();
    queue_.pop_front();
    if (!ok) {
      DropWaiting();
      CloseLocked(absl::CancelledError("the daemon is gone"));
    }
    if (!queue_.empty()) {
      WriteNext();
    } else if (closing_) {
      FinishOnce();
    }
  }

  void OnCancel() override {
    MutexLock lock(&mutex_);
    DropWaiting();
    CloseLocked(absl::CancelledError("the connection to the daemon was lost"));
  }

  void OnDone() override {
    if (session_.has_value()) shell_.CloseSession(*session_);
    absl::StatusCode code;
    {
      MutexLock lock(&mutex_);
      code = status_.code();
    }
    shell_.metrics().RpcDone("Session", absl::StatusCodeToString(code));
    const std::shared_ptr<Session> last = std::move(self_);
  }

 private:
  void EndWithoutHello(absl::Duration timeout) {
    MutexLock lock(&mutex_);
    if (greeted_) return;
    CloseLocked(absl::DeadlineExceededError(
        absl::StrCat("no hello within ", absl::FormatDuration(timeout),
                     " of the opening of the stream; it must be the first message of a session")));
  }

  void Open() {
    {
      MutexLock lock(&mutex_);
      if (closing_) return;
      greeted_ = true;
    }
    if (!read_.has_hello()) {
      return Close(absl::InvalidArgumentError("hello: must be the first message of a session"));
    }
    worker_ = read_.hello().worker();
    if (worker_.empty() || worker_.size() > kNameBytesMax) {
      return Close(absl::InvalidArgumentError(
          absl::StrCat("hello.worker: ", worker_.size(), " bytes, must be 1 to ", kNameBytesMax)));
    }
    if (const absl::Status may = security::AuthorizeHello(caller_.principal, worker_); !may.ok()) {
      caller_.target = worker_;
      gate_.Audit(caller_, may);
      return Close(may);
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kSession, caller_);
    if (!slot.ok()) return Close(slot.status());
    slot_ = *std::move(slot);
    incarnation_ = Incarnation(read_.incarnation());
    const absl::StatusOr<SessionId> session =
        shell_.OpenSession(incarnation_, std::move(*read_.mutable_hello()), shared_from_this());
    if (!session.ok()) return Close(session.status());
    session_ = *session;
    ReadOn();
  }

  void ReadOn() {
    MutexLock lock(&mutex_);
    if (!closing_) StartRead(&read_);
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    StartWrite(&queue_.front());
  }

  void CloseLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (closing_) {
      // The daemon went away while the last messages were being sent.
      if (!writing_) FinishOnce();
      return;
    }
    closing_ = true;
    status_ = status;
    if (!writing_) FinishOnce();
  }

  void FinishOnce() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(finished_, true)) return;
    Finish(ToGrpc(status_));
  }

  // Drops the messages that gRPC does not have yet.
  void DropWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    queue_.resize(writing_ ? 1 : 0);
    bytes_ = writing_ ? queue_.front().ByteSizeLong() : 0;
  }
  void DropWaitingDesired() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto message = std::next(queue_.begin(), writing_ ? 1 : 0); message != queue_.end();) {
      if (message->has_desired()) {
        bytes_ -= message->ByteSizeLong();
        message = queue_.erase(message);
      } else {
        ++message;
      }
    }
  }

  Shell& shell_;
  Gate& gate_;
  std::shared_ptr<Session> self_;  // until OnDone

  // Used by the one read under way and what follows it, never by two threads at a time.
  v1::FromWorker read_;
  Admitted caller_;
  absl::Duration checked_;  // when the caller was last, on the monotonic clock
  Slots::Slot slot_;
  std::string worker_;
  Incarnation incarnation_;
  std::optional<SessionId> session_;

  Mutex mutex_;
  // gRPC has the first message while writing_.
  std::list<v1::FromCoordinator> queue_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool greeted_ ABSL_GUARDED_BY(mutex_) = false;  // the first message has come
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

class WorkerService : public v1::WorkerService::CallbackService {
 public:
  WorkerService(Shell& shell, Gate& gate, absl::Duration hello_timeout)
      : shell_(shell), gate_(gate), hello_timeout_(hello_timeout) {}

  grpc::ServerBidiReactor<v1::FromWorker, v1::FromCoordinator>* Session(
      grpc::CallbackServerContext* context) override {
    const auto session = std::make_shared<coordinator::Session>(shell_, gate_);
    session->Begin(*context, hello_timeout_);
    return session.get();
  }

 private:
  Shell& shell_;
  Gate& gate_;
  const absl::Duration hello_timeout_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeWorkerService(Shell& shell, Gate& gate,
                                                 absl::Duration hello_timeout) {
  return std::make_unique<WorkerService>(shell, gate, hello_timeout);
}

}  // namespace muster::coordinator
