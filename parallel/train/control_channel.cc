#include "parallel/train/control_channel.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/tensor.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/failure.h"

namespace muster::parallel {

using Clock = std::chrono::steady_clock;

// One Run(): what this rank has done, and what the polling thread has learnt of all ranks.
class ControlChannel::Running : public Work {
 public:
  // In the all-reduce. Bytes travel as MiB: fp32 sums of them need not be exact.
  enum Value { kFinished, kFailed, kDone, kExpected, kValues };
  using Values = std::array<float, kValues>;

  Running(int ranks, absl::Duration interval, absl::FunctionRef<void(double)> report)
      : ranks_(ranks),
        interval_(absl::ToChronoNanoseconds(interval)),
        report_(report),
        reported_(Clock::now()) {}

  void Expect(int64_t bytes) override {
    MutexLock lock(&mutex_);
    expected_ += bytes;
  }
  void Advance(int64_t bytes) override {
    {
      MutexLock lock(&mutex_);
      done_ += bytes;
    }
    if (Clock::now() - reported_ >= interval_) Report();
  }
  bool pointless() const override {
    MutexLock lock(&mutex_);
    return ended_ || all_[kFailed] > 0;
  }

  void Finish(bool ok) {
    MutexLock lock(&mutex_);
    finished_ = true;
    failed_ = !ok;
  }
  void Report() {
    reported_ = Clock::now();
    Values values;
    {
      MutexLock lock(&mutex_);
      values = ranks_ == 1 ? Own() : all_;
    }
    if (values[kExpected] > 0) report_(std::min(1.0f, values[kDone] / values[kExpected]));
  }

  // Of the polling thread. Waits until this rank has finished, at most `interval`.
  Values Wait(absl::Duration interval) {
    MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(Condition(&finished_), interval);
    return Own();
  }
  // False: that was the last poll.
  bool Learn(const absl::Status& status, const Values& all) {
    MutexLock lock(&mutex_);
    status_ = status;
    if (status.ok()) all_ = all;
    ended_ = !status.ok() || all[kFinished] == static_cast<float>(ranks_);
    return !ended_;
  }

  // False: the time is over, and ranks are still at work.
  bool AwaitEnd(absl::Duration interval) {
    MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(Condition(&ended_), interval);
  }
  absl::StatusOr<bool> Result() {
    MutexLock lock(&mutex_);
    if (!status_.ok()) return Mark(status_, FailureDomain::kCommunication);
    return all_[kFailed] == 0;
  }
  // Of a job of one rank.
  absl::StatusOr<bool> ResultAlone() {
    MutexLock lock(&mutex_);
    return !failed_;
  }

 private:
  Values Own() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    constexpr float kMiB = 1 << 20;
    return {finished_ ? 1.0f : 0.0f, failed_ ? 1.0f : 0.0f, static_cast<float>(done_) / kMiB,
            static_cast<float>(expected_) / kMiB};
  }

  const int ranks_;
  const std::chrono::nanoseconds interval_;
  const absl::FunctionRef<void(double)> report_;
  Clock::time_point reported_;  // of the calling thread
  mutable Mutex mutex_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t done_ ABSL_GUARDED_BY(mutex_) = 0, expected_ ABSL_GUARDED_BY(mutex_) = 0;
  Values all_ ABSL_GUARDED_BY(mutex_) = {};  // sums over the ranks
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

ControlChannel::ControlChannel(Communicator& world, absl::Duration interval)
    : world_(world), interval_(interval), host_(kernels::MakeCpuDevice(/*threads=*/1)) {}

ControlChannel::~ControlChannel() = default;

absl::StatusOr<std::unique_ptr<ControlChannel>> ControlChannel::Make(Communicator& world,
                                                                     absl::Duration interval) {
  std::unique_ptr<ControlChannel> channel(new ControlChannel(world, interval));
  ASSIGN_OR_RETURN(channel->stream_, channel->host_->MakeStream());
  return channel;
}

void ControlChannel::Poll(Running& running) {
  bool more = true;
  while (more) {
    Running::Values values = running.Wait(interval_);
    world_.AllReduce(*stream_,
                     kernels::Tensor(values.data(), kernels::DType::kF32, {Running::kValues}),
                     ReduceOp::kSum);
    const absl::Status status = stream_->Synchronize();
    more = running.Learn(status, values);
  }
}

absl::StatusOr<bool> ControlChannel::Run(absl::FunctionRef<absl::Status(Work& work)> body,
                                         absl::FunctionRef<void(double fraction)> report) {
  Running running(world_.size(), interval_, report);
  if (world_.size() == 1) {
    running.Finish(body(running).ok());
    return running.ResultAlone();
  }
  // The body stays on this thread, because it uses the device that is current here.
  std::thread poller([&] { Poll(running); });
  running.Finish(body(running).ok());
  while (!running.AwaitEnd(interval_)) running.Report();
  poller.join();
  return running.Result();
}

absl::StatusOr<std::vector<std::string>> ControlChannel::Gather(const std::string& text) {
  if (world_.size() == 1) return std::vector<std::string>{text};
  auto texts = GatherTexts(world_, *stream_, text);
  if (!texts.ok()) return Mark(texts.status(), FailureDomain::kCommunication);
  return texts;
}

}  // namespace muster::parallel
