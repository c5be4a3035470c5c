#include "coordinator/rpc/streams.h"

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/status.h"

namespace muster::coordinator {
namespace {

enum class Step {
  kSend,  // the message is filled in
  kWait,  // until the next wake
  kEnd,   // the status is filled in
};

// Everything but gRPC's callbacks runs on the watch loop, so there is no lock.
template <typename Message>
class PullStream : public grpc::ServerWriteReactor<Message>,
                   public Watcher,
                   public std::enable_shared_from_this<PullStream<Message>> {
 public:
  PullStream(Shell& shell, const char* method) : shell_(shell), method_(method) {}

  // Watches `job` once it is found (empty: the events of the whole cluster), then pumps.
  void Begin(const std::string& job) {
    self_ = this->shared_from_this();
    if (job.empty() && WatchesEvents()) {
      Post([](PullStream& stream) { stream.Open(nullptr); });
    } else if (const absl::Status named = CheckName(job); !named.ok()) {
      Post([named](PullStream& stream) { stream.End(named); });
    } else {
      shell_.GetJob(job, [self = self_](absl::StatusOr<std::shared_ptr<const v1::Job>> found) {
        self->Post([found = std::move(found)](PullStream& stream) {
          if (found.ok()) {
            stream.Open(*found);
          } else {
            stream.End(found.status());
          }
        });
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
      shell.shown().Unwatch(key);
    });
  }

 protected:
  // `job` is null when the stream is not of one job.
  virtual absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) = 0;
  virtual Step Next(Message* message, absl::Status* status) = 0;
  // What a resumed stream of this kind watches besides `job`.
  virtual bool WatchesEvents() const { return false; }

  Shell& shell() { return shell_; }

  template <typename Work>
  void Post(Work work) {
    shell_.watch_loop().Post(
        [self = this->shared_from_this(), work = std::move(work)]() mutable { work(*self); });
  }
  void PumpAfter(absl::Duration delay) {
    shell_.watch_loop().PostAfter(delay, [weak = this->weak_from_this()] {
      if (const auto self = weak.lock()) self->Pump();
    });
  }

  void Pump() {
    if (!open_ || writing_ || finished_) return;
    if (cancelled_) return End(absl::CancelledError("the client went away"));
    if (shell_.draining()) return End(absl::UnavailableError("the coordinator stops; resume"));
    absl::Status status;
    switch (Next(&message_, &status)) {
      case Step::kSend:
        writing_ = true;
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
    if (!shell_.shown().Watch(watch_key_, this->weak_from_this())) {
      return End(absl::ResourceExhaustedError(
          absl::StrCat("more than ", kWatchersMax, " streams are open")));
    }
    if (const absl::Status opened = OnOpen(job); !opened.ok()) return End(opened);
    open_ = true;
    Pump();
  }
  void End(const absl::Status& status) {
    if (std::exchange(finished_, true)) return;
    shell_.metrics().RpcDone(method_, absl::StatusCodeToString(status.code()));
    this->Finish(ToGrpc(status));
  }

  Shell& shell_;
  const char* const method_;
  std::shared_ptr<PullStream> self_;  // until OnDone
  std::string watch_key_;
  Message message_;
  bool open_ = false;
  bool writing_ = false;
  bool cancelled_ = false;
  bool finished_ = false;
};

class EventStream : public PullStream<v1::Event> {
 public:
  EventStream(Shell& shell, const v1::WatchEventsRequest& request)
      : PullStream(shell, "WatchEvents"), job_(request.job()), cursor_(request.after_sequence()) {}

 private:
  bool WatchesEvents() const override { return true; }

  absl::Status OnOpen(const std::shared_ptr<const v1::Job>&) override {
    const uint64_t last = shell().shown().last_event();
    if (cursor_ <= last) return absl::OkStatus();
    return absl::OutOfRangeError(absl::StrCat("after_sequence: ", cursor_,
                                              " is beyond the newest event (", last,
                                              "); does it come from another cluster?"));
  }

  Step Next(v1::Event* message, absl::Status* status) override {
    if (ready_.empty()) {
      *status = ReadOn();
      if (!status->ok()) return Step::kEnd;
    }
    if (ready_.empty()) {
      // Events of other jobs were passed over: give way before reading on.
      if (cursor_ < shell().shown().last_event()) PumpAfter(absl::ZeroDuration());
      return Step::kWait;
    }
    *message = std::move(ready_.front());
    ready_.pop_front();
    return Step::kSend;
  }

  absl::Status ReadOn() {
    const uint64_t last = shell().shown().last_event();
    if (cursor_ >= last) return absl::OkStatus();
    absl::Status bad;
    size_t rows = 0;
    const absl::Status scanned = shell().store().Scan(
        Table::kEvents, schema::EventKey(cursor_ + 1), schema::EventKey(last + 1),
        [&](const std::string& key, const std::string& value) {
          v1::Event event;
          bad = schema::Parse(Table::kEvents, key, value, event);
          if (bad.ok() && cursor_ != 0 && event.sequence() != cursor_ + 1) {
            bad = absl::OutOfRangeError(
                absl::StrCat("events ", cursor_ + 1, " to ", event.sequence() - 1,
                             " are no longer kept; start again with after_sequence 0"));
          }
          if (!bad.ok()) return false;
          cursor_ = event.sequence();
          if (IsOf(event, job_)) ready_.push_back(std::move(event));
          return ++rows < kEventsReadAtOnce;
        });
    return scanned.ok() ? bad : scanned;
  }

  const std::string job_;
  uint64_t cursor_;  // last event read
  std::deque<v1::Event> ready_;
};

class JobStream : public PullStream<v1::Job> {
 public:
  explicit JobStream(Shell& shell) : PullStream(shell, "WatchJob") {}

 private:
  absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) override {
    id_ = job->id();
    return absl::OkStatus();
  }

  Step Next(v1::Job* message, absl::Status* status) override {
    if (last_ != nullptr && IsFinal(last_->state())) return Step::kEnd;
    if (resting_) return Step::kWait;
    const std::shared_ptr<const v1::Job> job = shell().shown().Find(id_);
    if (job == nullptr) {
      *status = absl::NotFoundError(absl::StrCat("job ", id_, " is no longer kept"));
      return Step::kEnd;
    }
    if (job == last_) return Step::kWait;
    last_ = job;
    *message = *job;
    resting_ = true;
    shell().watch_loop().PostAfter(kWatchJobInterval, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) static_cast<JobStream&>(*self).Rested();
    });
    return Step::kSend;
  }

  void Rested() {
    resting_ = false;
    Pump();
  }

  std::string id_;
  std::shared_ptr<const v1::Job> last_;
  bool resting_ = false;
};

// Reads one rank's log piece by piece through its worker; following goes on with the next attempt
// when an attempt's log is closed, and ends with the job.
class LogStream : public PullStream<v1::LogChunk> {
 public:
  LogStream(Shell& shell, const v1::GetLogsRequest& request)
      : PullStream(shell, "GetLogs"), request_(request), epoch_(request.epoch()) {}

 private:
  absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) override {
    id_ = job->id();
    const int ranks = job->spec().resources().ranks();
    if (request_.rank() < 0 || request_.rank() >= ranks) {
      return absl::InvalidArgumentError(absl::StrCat("rank: ", request_.rank(), " is not in 0 to ",
                                                     ranks - 1, ", the ranks of job ", id_));
    }
    if (request_.has_profile()) RETURN_IF_ERROR(CheckProfile(*job));
    if (request_.tail_bytes() < 0) return absl::InvalidArgumentError("tail_bytes: negative");
    if (request_.collectives() != 0) {
      if (job->state() != v1::JOB_STATE_RUNNING) {
        return absl::FailedPreconditionError(
            absl::StrCat("job ", id_, " is ", StateName(job->state()), ": no rank of it runs"));
      }
      if (!job->spec().has_engine()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "job ", id_, " runs a command of its own; collectives are recorded by the engine"));
      }
    }
    if (epoch_ > job->epoch()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "epoch: ", epoch_, " of job ", id_, " is not there yet; the newest is ", job->epoch()));
    }
    if (job->epoch() == 0 && !request_.follow()) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", id_, " has not started: ", job->waiting()));
    }
    if (epoch_ == 0) epoch_ = job->epoch();
    offset_ = -request_.tail_bytes();
    return absl::OkStatus();
  }

  Step Next(v1::LogChunk* message, absl::Status* status) override {
    if (asking_ || resting_) return Step::kWait;
    if (reply_.has_value()) {
      const absl::StatusOr<v1::LogReply> reply = *std::exchange(reply_, std::nullopt);
      if (!reply.ok()) return Failed(reply.status(), status);
      at_end_ = reply->end();
      closed_ = reply->closed() && reply->end();
      offset_ = reply->offset() + static_cast<int64_t>(reply->data().size());
      if (!reply->data().empty()) {
        message->set_epoch(epoch_);
        message->set_rank(request_.rank());
        message->set_offset(reply->offset());
        message->set_data(reply->data());
        return Step::kSend;
      }
    }
    if (!at_end_) return Ask();
    if (request_.collectives() != 0) {
      return offset_ > 0 ? Step::kEnd : AskAgainAfter(kLogFollowInterval);
    }
    if (!request_.follow()) return Step::kEnd;
    if (!closed_) return AskAgainAfter(kLogFollowInterval);
    return AfterClosed();
  }

  absl::Status CheckProfile(const v1::Job& job) const {
    const v1::ProfileSteps& profile = request_.profile();
    if (profile.steps() < 1 || profile.steps() > kProfileStepsMax) {
      return absl::InvalidArgumentError(absl::StrCat("profile.steps: ", profile.steps(),
                                                     " is out of range; 1 to ", kProfileStepsMax));
    }
    if (profile.first_step() < 1) return absl::InvalidArgumentError("profile.first_step: below 1");
    if (request_.epoch() != 0 && request_.epoch() != job.epoch()) {
      return absl::InvalidArgumentError("epoch: only the newest attempt can be profiled");
    }
    // Not their sum: a first step may be any number of 64 bits.
    if (profile.first_step() > job.steps() - profile.steps() + 1) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", job.id(), " ends at step ", job.steps(), ", before ",
                       profile.steps(), " steps from ", profile.first_step(), " on"));
    }
    if (job.state() != v1::JOB_STATE_RUNNING) {
      return absl::FailedPreconditionError(absl::StrCat("job ", job.id(), " is ",
                                                        StateName(job.state()),
                                                        "; only one that trains has a profile"));
    }
    return absl::OkStatus();
  }

  // The attempt's log is complete, or will never come.
  Step AfterClosed() {
    if (request_.epoch() != 0 || request_.has_profile()) return Step::kEnd;
    const std::shared_ptr<const v1::Job> job = shell().shown().Find(id_);
    if (job == nullptr) return Step::kEnd;
    if (job->epoch() > epoch_) {
      epoch_ = job->epoch();
      offset_ = 0;
      closed_ = false;
      return Ask();
    }
    return IsFinal(job->state()) ? Step::kEnd : Step::kWait;
  }

  Step Failed(const absl::Status& why, absl::Status* status) {
    const std::shared_ptr<const v1::Job> job = shell().shown().Find(id_);
    const bool retryable = absl::IsUnavailable(why) || absl::IsNotFound(why);
    if (!request_.follow() || !retryable || job == nullptr) {
      *status = why;
      return Step::kEnd;
    }
    if (request_.epoch() == 0 && job->epoch() > epoch_) {
      at_end_ = closed_ = true;
      return AfterClosed();
    }
    if (IsFinal(job->state())) {
      *status = why;
      return Step::kEnd;
    }
    return AskAgainAfter(kLogRetryInterval);
  }

  Step Ask() {
    if (epoch_ == 0) {  // no attempt yet: the job's change wakes this
      at_end_ = closed_ = true;
      return AfterClosed();
    }
    asking_ = true;
    at_end_ = false;
    v1::LogRequest ask;
    ask.set_job_id(id_);
    ask.set_epoch(epoch_);
    ask.set_rank(request_.rank());
    ask.set_offset(offset_);
    ask.set_length_max(kLogChunkBytes);
    ask.set_collectives(request_.collectives());
    if (request_.has_profile()) *ask.mutable_profile() = request_.profile();
    shell().ReadLog(std::move(ask),
                    [self = shared_from_this()](absl::StatusOr<v1::LogReply> reply) {
                      auto& stream = static_cast<LogStream&>(*self);
                      stream.Post([reply = std::move(reply)](PullStream& base) mutable {
                        auto& log = static_cast<LogStream&>(base);
                        log.asking_ = false;
                        log.reply_ = std::move(reply);
                        log.Pump();
                      });
                    });
    return Step::kWait;
  }

  Step AskAgainAfter(absl::Duration delay) {
    resting_ = true;
    at_end_ = false;
    shell().watch_loop().PostAfter(delay, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      auto& log = static_cast<LogStream&>(*self);
      log.resting_ = false;
      log.Pump();
    });
    return Step::kWait;
  }

  const v1::GetLogsRequest request_;
  std::string id_;
  uint64_t epoch_;
  int64_t offset_ = 0;
  bool asking_ = false;   // a reply will come
  bool resting_ = false;  // a timer will ring
  bool at_end_ = false;   // of what there was at the last reply
  bool closed_ = false;   // nothing more will be written
  std::optional<absl::StatusOr<v1::LogReply>> reply_;
};

}  // namespace

grpc::ServerWriteReactor<v1::Event>* StartEventStream(Shell& shell,
                                                      const v1::WatchEventsRequest& request) {
  const auto stream = std::make_shared<EventStream>(shell, request);
  stream->Begin(request.job());
  return stream.get();
}

grpc::ServerWriteReactor<v1::Job>* StartJobStream(Shell& shell, const v1::GetJobRequest& request) {
  const auto stream = std::make_shared<JobStream>(shell);
  stream->Begin(request.name());
  return stream.get();
}

grpc::ServerWriteReactor<v1::LogChunk>* StartLogStream(Shell& shell,
                                                       const v1::GetLogsRequest& request) {
  const auto stream = std::make_shared<LogStream>(shell, request);
  stream->Begin(request.name());
  return stream.get();
}

absl::Status CheckName(const std::string& name) {
  if (name.empty()) return absl::InvalidArgumentError("name: a job's name or id is required");
  if (name.size() > kNameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", name.size(), " bytes, at most ", kNameBytesMax, " are possible"));
  }
  return absl::OkStatus();
}

bool IsOf(const v1::Event& event, const std::string& job) {
  return job.empty() || event.job_id() == job || event.job_name() == job;
}

}  // namespace muster::coordinator
