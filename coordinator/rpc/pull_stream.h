// How every stream to clients works: it sends one message at a time, pulled from what is published.
#ifndef MUSTER_COORDINATOR_RPC_PULL_STREAM_H_
#define MUSTER_COORDINATOR_RPC_PULL_STREAM_H_

#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/requests.h"
#include "coordinator/rpc/status.h"
#include "coordinator/shell.h"

namespace muster::coordinator {

enum class Step {
  kSend,  // the message is filled in
  kWait,  // nothing to send before the next Wake(), or before the subclass calls Pump()
  kEnd,   // the stream ends with the status that is filled in
};

// Base of the streams. Thread: gRPC calls On...() on threads of its own; everything else runs on
// the watch loop, so that there is no lock. Owns itself until OnDone.
template <typename Message>
class PullStream : public grpc::ServerWriteReactor<Message>,
                   public Watcher,
                   public std::enable_shared_from_this<PullStream<Message>> {
 public:
  // `permit`: what the stream holds, or why it has none and is refused.
  PullStream(Shell& shell, const char* method, absl::StatusOr<Permit> permit)
      : shell_(shell), method_(method), permit_(std::move(permit)) {}

  // Finds `job`, watches it and starts to send. With WatchesEvents() an empty `job` stands for the
  // whole cluster.
  void Begin(const std::string& job) {
    self_ = this->shared_from_this();
    if (!permit_.ok()) {
      Post([](PullStream& stream) { stream.End(stream.permit_.status()); });
    } else if (job.empty() && WatchesEvents()) {
      Post([](PullStream& stream) { stream.Open(nullptr); });
    } else if (const absl::Status named = CheckJobName(job); !named.ok()) {
      Post([named](PullStream& stream) { stream.End(named); });
    } else {
      Post([found = shell_.GetJob(job)](PullStream& stream) {
        if (found.ok()) {
          stream.Open(*found);
        } else {
          stream.End(found.status());
        }
      });
    }
  }

  void Wake() final { Pump(); }
  void OnWriteDone(bool ok) final {
    Post([ok](PullStream& stream) {
      stream.writing_ = false;
      stream.cancelled_ |= !ok;
      stream.Pump();
    });
  }
  void OnCancel() final {
    Post([](PullStream& stream) {
      stream.cancelled_ = true;
      stream.Pump();
    });
  }
  void OnDone() final {
    shell_.watch_loop().Post([&shell = shell_, self = std::move(self_)]() mutable {
      const std::string key = self->watch_key_;
      self.reset();
      shell.published().DropExpiredWatchers(key);
    });
  }

 protected:
  // Checks the request; an error ends the stream. `job` is null when the stream is not of one job.
  virtual absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) = 0;
  // Fills in the next message, or the status with which the stream ends.
  virtual Step Next(Message* message, absl::Status* status) = 0;
  // True: the stream wakes when events were added, whichever job they are about.
  virtual bool WatchesEvents() const { return false; }

  Shell& shell() { return shell_; }

  // Runs work(*this) on the watch loop and keeps this alive until then.
  template <typename Work>
  void Post(Work work) {
    shell_.watch_loop().Post(
        [self = this->shared_from_this(), work = std::move(work)]() mutable { work(*self); });
  }
  // Calls Pump() after `delay`, unless this is gone by then.
  void PumpAfter(absl::Duration delay) {
    shell_.watch_loop().PostAfter(delay, [weak = this->weak_from_this()] {
      if (const auto self = weak.lock()) self->Pump();
    });
  }

  // Sends the next message, when there is one and none is in flight.
  void Pump() {
    if (!open_ || writing_ || finished_) return;
    if (cancelled_) return End(absl::CancelledError("the client went away"));
    if (!refused_.ok()) return End(refused_);
    if (shell_.draining())
      return End(absl::UnavailableError("the coordinator is stopping; resume"));
    absl::Status status;
    switch (Next(&message_, &status)) {
      case Step::kSend:
        writing_ = true;
        ++writes_;
        this->StartWrite(&message_);
        break;
      case Step::kWait:
        break;
      case Step::kEnd:
        End(status);
        break;
    }
  }

 private:
  void Open(const std::shared_ptr<const v1::Job>& job) {
    if (!WatchesEvents()) watch_key_ = job->id();
    if (!shell_.published().Watch(watch_key_, this->weak_from_this())) {
      return End(absl::ResourceExhaustedError(
          absl::StrCat("more than ", kWatchersMax, " streams are open")));
    }
    if (const absl::Status opened = OnOpen(job); !opened.ok()) return End(opened);
    open_ = true;
    Pump();
    LookAfterReader(0);
  }
  // From time to time: whether the caller still may read, and still reads. `writes`: those begun
  // when the stream was last looked at, while one was in flight.
  void LookAfterReader(uint64_t writes) {
    shell_.watch_loop().PostAfter(
        permit_->recheck_interval, [weak = this->weak_from_this(), writes] {
          const auto self = weak.lock();
          if (self == nullptr || self->finished_) return;
          if (self->permit_->recheck) {
            const absl::Status may = self->permit_->recheck();
            if (!may.ok()) self->refused_ = may;
          }
          const bool stuck = self->writing_ && self->writes_ == writes;
          self->ticks_stuck_ = stuck ? self->ticks_stuck_ + 1 : 0;
          // Nothing can be finished while a message waits for the reader.
          if (self->writing_ && (!self->refused_.ok() || self->ticks_stuck_ >= kStuckTicksMax)) {
            self->shell_.metrics().RpcDone(self->method_, "SLOW_READER");
            return self->permit_->cancel();
          }
          self->Pump();
          self->LookAfterReader(self->writes_);
        });
  }
  void End(const absl::Status& status) {
    if (std::exchange(finished_, true)) return;
    shell_.metrics().RpcDone(method_, absl::StatusCodeToString(status.code()));
    this->Finish(ToGrpc(status));
  }

  Shell& shell_;
  const char* const method_;
  const absl::StatusOr<Permit> permit_;
  std::shared_ptr<PullStream> self_;  // until OnDone
  std::string watch_key_;
  Message message_;
  absl::Status refused_;  // why the caller may not read any more
  uint64_t writes_ = 0;
  int ticks_stuck_ = 0;  // times in a row that the reader was seen not to have read
  bool open_ = false;
  bool writing_ = false;
  bool cancelled_ = false;
  bool finished_ = false;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_PULL_STREAM_H_
