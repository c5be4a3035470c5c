#include "worker/rank/daemon_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "muster/v1/rank_service.grpc.pb.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

// Calls that wait for the coordinator (keys, notices) are cancelled and repeated after this long,
// which bounds the cost of a lost reply.
constexpr absl::Duration kAnswerInterval = absl::Seconds(1);
constexpr absl::Duration kPollTimeout = absl::Seconds(10);
constexpr absl::Duration kPutTimeout = absl::Minutes(1);

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// The daemon is away or did not answer in time; another try may succeed.
bool Retryable(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable ||
         status.code() == absl::StatusCode::kDeadlineExceeded ||
         status.code() == absl::StatusCode::kCancelled ||
         status.code() == absl::StatusCode::kUnknown;
}

class GrpcDaemonClient : public DaemonClient {
 public:
  explicit GrpcDaemonClient(DaemonClientOptions options) : options_(std::move(options)) {
    grpc::ChannelArguments arguments;
    // A restarted daemon must be found at once. MIN bounds the time of one attempt to connect, and
    // is generous: ranks keep every core busy, and a handshake that is cut short begins again after
    // the back-off.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
    // A connection of its own: not shared with another client of this process.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::RankService::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("unix:", options_.socket), grpc::InsecureChannelCredentials(), arguments));
    threads_.emplace_back([this] { ReportLoop(); });
    threads_.emplace_back([this] { DeliverLoop(kCommits); });
    threads_.emplace_back([this] { DeliverLoop(kNotices); });
  }

  ~GrpcDaemonClient() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      CancelCalls();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  void Report(const v1::RankProgress& progress) override {
    MutexLock lock(&mutex_);
    progress_ = progress;
    ++progress_version_;
  }
  void ReportNow(const v1::RankProgress& progress) override {
    MutexLock lock(&mutex_);
    progress_ = progress;
    ++progress_version_;
    report_now_ = true;
  }
  bool stop_requested() const override { return stop_requested_; }
  int64_t last_committed_step() const override { return last_committed_step_; }
  bool aborted() const override {
    MutexLock lock(&mutex_);
    return aborted_;
  }

  void Commit(const v1::CheckpointRecord& checkpoint) override {
    v1::CommitRequest request;
    *request.mutable_identity() = Identity();
    *request.mutable_checkpoint() = checkpoint;
    std::string file;
    if (!options_.run_directory.empty()) {
      file = options_.run_directory + CommitFile(checkpoint.step());
      absl::Status written = files_->MakeDirectory(options_.run_directory + kCommitDirectory);
      if (written.ok()) written = files_->WriteAtomically(file, request.SerializeAsString());
      // On a full disk the call below still delivers the commit, as long as the daemon is up.
      if (!written.ok()) file.clear();
    }
    Enqueue(kCommits, [this, request, file](grpc::ClientContext& context) {
      v1::CommitResponse response;
      const grpc::Status status = stub_->Commit(&context, request, &response);
      if (status.ok() && !file.empty()) files_->RemoveFile(file).IgnoreError();
      return status;
    });
  }
  void Notify(const v1::DamagedCheckpoint& damaged) override {
    v1::NotifyRequest request;
    *request.mutable_damaged() = damaged;
    EnqueueNotice(std::move(request));
  }
  void Notify(const v1::RemovedCheckpoint& removed) override {
    v1::NotifyRequest request;
    *request.mutable_removed() = removed;
    EnqueueNotice(std::move(request));
  }
  void Notify(const v1::Evaluation& evaluation) override {
    v1::NotifyRequest request;
    *request.mutable_evaluation() = evaluation;
    EnqueueNotice(std::move(request));
  }

  absl::Status Flush(absl::Duration timeout) override {
    MutexLock lock(&mutex_);
    const uint64_t version = progress_version_;
    const uint64_t commits = queues_[kCommits].added;
    const uint64_t notices = queues_[kNotices].added;
    report_now_ = true;
    auto done = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return aborted_ || (reported_version_ >= version && queues_[kCommits].delivered >= commits &&
                          queues_[kNotices].delivered >= notices);
    };
    const bool in_time = mutex_.AwaitWithTimeout(Condition(&done), timeout);
    if (aborted_) return AbortedStatus();
    if (!in_time) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the daemon at ", options_.socket, " did not take everything within ",
          absl::FormatDuration(timeout), ": ",
          commits - std::min(commits, queues_[kCommits].delivered), " commits and ",
          notices - std::min(notices, queues_[kNotices].delivered), " notices remain"));
    }
    return refused_;
  }

  absl::Status WaitCommitted(int64_t step, absl::Duration timeout) override {
    MutexLock lock(&mutex_);
    auto done = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return aborted_ || last_committed_step_ >= step;
    };
    mutex_.AwaitWithTimeout(Condition(&done), timeout);
    if (last_committed_step_ >= step) return absl::OkStatus();
    if (aborted_) return AbortedStatus();
    return absl::DeadlineExceededError(absl::StrCat("the checkpoint of step ", step,
                                                    " was not committed within ",
                                                    absl::FormatDuration(timeout)));
  }

  absl::Status Put(const std::string& key, const std::string& value) override {
    v1::PutRequest request;
    *request.mutable_identity() = Identity();
    request.set_key(key);
    request.set_value(value);
    return Repeat(absl::Now() + kPutTimeout, absl::StrCat("put of bootstrap key ", key),
                  [&](grpc::ClientContext& context) {
                    v1::PutResponse response;
                    return stub_->Put(&context, request, &response);
                  });
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    v1::GetRequest request;
    *request.mutable_identity() = Identity();
    request.set_key(key);
    v1::GetResponse response;
    absl::Status status = Repeat(
        absl::Now() + timeout, absl::StrCat("get of bootstrap key ", key),
        [&](grpc::ClientContext& context) { return stub_->Get(&context, request, &response); });
    if (!status.ok()) return status;
    return std::move(*response.mutable_value());
  }

 private:
  using Call = std::function<grpc::Status(grpc::ClientContext&)>;
  // Commits and notices have a thread each: a notice waits for the coordinator, a commit must not.
  enum Lane { kCommits, kNotices };
  struct Queue {
    std::deque<Call> calls;
    uint64_t added = 0;
    uint64_t delivered = 0;
  };

  v1::RankIdentity Identity() const {
    v1::RankIdentity identity;
    identity.set_job_id(options_.job_id);
    identity.set_epoch(options_.epoch);
    identity.set_rank(options_.rank);
    identity.set_membership(options_.membership);
    return identity;
  }

  absl::Status AbortedStatus() const {
    return absl::AbortedError(absl::StrCat(options_.job_id, " epoch ", options_.epoch, " rank ",
                                           options_.rank, ": the attempt has ended"));
  }

  void CancelCalls() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
  }

  // One try. Ends early when the client stops or the attempt has ended.
  absl::Status TryOnce(const Call& call, absl::Time deadline) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    {
      MutexLock lock(&mutex_);
      if (aborted_ || stopping_) return AbortedStatus();
      contexts_.insert(&context);
    }
    const absl::Status status = FromGrpc(call(context));
    bool tell = false;
    {
      MutexLock lock(&mutex_);
      contexts_.erase(&context);
      if (status.code() == absl::StatusCode::kAborted && !aborted_) {
        aborted_ = tell = true;
        CancelCalls();
      }
    }
    if (tell && options_.on_aborted) std::move(options_.on_aborted)(status);
    return status;
  }

  absl::Status Repeat(absl::Time deadline, const std::string& what, const Call& call) {
    while (true) {
      const absl::Time now = absl::Now();
      if (now >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat(what, " of ", options_.job_id, " epoch ", options_.epoch,
                         " was not answered in time by the daemon at ", options_.socket));
      }
      const absl::Status status = TryOnce(call, std::min(deadline, now + kPollTimeout));
      if (!Retryable(status)) return status;
      if (!Pause(std::min(options_.retry_interval, deadline - absl::Now()))) {
        return AbortedStatus();
      }
    }
  }

  // False when the client stops or the attempt has ended meanwhile.
  bool Pause(absl::Duration duration) {
    MutexLock lock(&mutex_);
    auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return aborted_ || stopping_; };
    return !mutex_.AwaitWithTimeout(Condition(&done), duration);
  }

  void EnqueueNotice(v1::NotifyRequest request) {
    *request.mutable_identity() = Identity();
    Enqueue(kNotices, [this, request = std::move(request)](grpc::ClientContext& context) {
      v1::NotifyResponse response;
      return stub_->Notify(&context, request, &response);
    });
  }

  void Enqueue(Lane lane, Call call) {
    MutexLock lock(&mutex_);
    Queue& queue = queues_[lane];
    queue.calls.push_back(std::move(call));
    ++queue.added;
  }

  void DeliverLoop(Lane lane) {
    while (true) {
      Call call;
      {
        MutexLock lock(&mutex_);
        auto ready = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          return stopping_ || aborted_ || !queues_[lane].calls.empty();
        };
        mutex_.Await(Condition(&ready));
        if (stopping_ || aborted_) return;
        call = queues_[lane].calls.front();
      }
      const absl::Status status =
          TryOnce(call, absl::Now() + (lane == kCommits ? options_.attempt_timeout : kPollTimeout));
      if (Retryable(status)) {
        if (!Pause(options_.retry_interval)) return;
        continue;
      }
      MutexLock lock(&mutex_);
      queues_[lane].calls.pop_front();
      ++queues_[lane].delivered;
      if (!status.ok()) refused_ = status;
    }
  }

  // Tells a rank that waits from one whose process is stopped.
  void AddAnswer(uint64_t version, v1::RankProgress& progress) {
    const absl::Time now = absl::Now();
    if (version != answered_version_) {
      answered_version_ = version;
      answered_since_ = answered_at_ = now;
      stuck_ = v1::RankProgress();
      return;
    }
    if (now - answered_since_ < options_.stuck_after) return;
    if (stuck_.answers() == 0 || now - answered_at_ >= kAnswerInterval) {
      answered_at_ = now;
      stuck_.set_answers(stuck_.answers() + 1);
      if (options_.on_stuck) options_.on_stuck(stuck_);
    }
    progress.set_answers(stuck_.answers());
    *progress.mutable_groups() = stuck_.groups();
  }

  void ReportLoop() {
    while (true) {
      v1::ReportRequest request;
      uint64_t version = 0;
      {
        MutexLock lock(&mutex_);
        auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          return stopping_ || aborted_ || report_now_;
        };
        mutex_.AwaitWithTimeout(Condition(&ready), options_.report_interval);
        if (stopping_ || aborted_) return;
        report_now_ = false;
        *request.mutable_progress() = progress_;
        version = progress_version_;
      }
      AddAnswer(version, *request.mutable_progress());
      *request.mutable_identity() = Identity();
      v1::ReportResponse response;
      const absl::Status status = TryOnce(
          [&](grpc::ClientContext& context) { return stub_->Report(&context, request, &response); },
          absl::Now() + options_.attempt_timeout);
      if (!status.ok()) {
        if (!Pause(options_.retry_interval)) return;
        continue;
      }
      if (response.stop()) stop_requested_ = true;
      if (response.membership() > options_.membership && options_.on_membership) {
        options_.on_membership(response.membership());
      }
      if (response.collectives() != collectives_) {
        collectives_ = response.collectives();
        if (collectives_ != 0 && options_.on_collectives) options_.on_collectives(collectives_);
      }
      MutexLock lock(&mutex_);
      reported_version_ = version;
      if (response.last_committed_step() > last_committed_step_) {
        last_committed_step_ = response.last_committed_step();
      }
    }
  }

  DaemonClientOptions options_;
  std::unique_ptr<v1::RankService::Stub> stub_;
  std::atomic<bool> stop_requested_{false};
  // Of the reporting thread: the last number it was asked for; the version of the progress that it
  // reports, since when, and what it adds while that does not change.
  uint64_t collectives_ = 0;
  uint64_t answered_version_ = 0;
  absl::Time answered_since_ = absl::Now(), answered_at_;
  v1::RankProgress stuck_;
  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::atomic<int64_t> last_committed_step_{0};

  mutable Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
  v1::RankProgress progress_ ABSL_GUARDED_BY(mutex_);
  uint64_t progress_version_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t reported_version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool report_now_ ABSL_GUARDED_BY(mutex_) = false;
  std::array<Queue, 2> queues_ ABSL_GUARDED_BY(mutex_);  // by lane
  // The daemon's answer to a commit or notice that it will never take (our bug).
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace

DaemonClientOptions DaemonClientOptions::From(const v1::RankAssignment& assignment) {
  DaemonClientOptions options;
  options.job_id = assignment.job_id();
  options.epoch = assignment.epoch();
  options.rank = assignment.rank();
  options.membership = std::max<uint32_t>(1, assignment.membership());
  options.socket = assignment.daemon_socket();
  options.run_directory = assignment.run_directory();
  return options;
}

absl::StatusOr<std::unique_ptr<DaemonClient>> DaemonClient::Make(DaemonClientOptions options) {
  if (options.socket.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the assignment of ", options.job_id, " names no daemon socket"));
  }
  return std::make_unique<GrpcDaemonClient>(std::move(options));
}

}  // namespace muster::worker
