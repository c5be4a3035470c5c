#include <ctype.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/store/store.h"
#include "proto/spec/spec.h"
#include "tests/fuzz/targets/frames.h"
#include "tests/fuzz/targets/targets.h"
#include "tests/support/job_spec.h"

namespace muster::fuzz {
namespace {

using namespace coordinator;  // NOLINT: the whole file is about it

// With defaults, as the RPC service submits it.
const v1::JobSpec& ValidSpec() {
  static const v1::JobSpec* const spec = [] {
    auto* valid = new v1::JobSpec(testing::SmallJobSpec("job"));
    spec::ApplyDefaults(*valid);
    CHECK(spec::Validate(*valid).ok());
    return valid;
  }();
  return *spec;
}

// A core, its store, and the streams of two daemons.
class Play {
 public:
  Play() { Restart(); }

  void Restart() {
    CoreOutput output;
    absl::StatusOr<std::unique_ptr<Core>> core =
        Core::Recover(CoreConfig(), *store_, Rng(7), now_, &output);
    CHECK(core.ok()) << core.status();
    core_ = *std::move(core);
    for (Stream& stream : streams_) stream.session.reset();
    Take(std::move(output));
  }

  void Step(uint8_t what, const std::string& bytes) {
    Stream& stream = streams_[what & 1];
    switch ((what >> 1) % 7) {
      case 0:
      case 1:
        return Say(stream, bytes);
      case 2:
        return Close(stream);
      case 3:
        now_ += absl::Milliseconds(100) * (1 + (what >> 4) * (what >> 4));
        return Handle(TimerFired{});
      case 4: {
        v1::JobSpec spec = ValidSpec();
        spec.set_name(absl::StrCat("job-", what >> 4));
        // The RPC service has refused longer ids, and gRPC those that are no text.
        const bool is_id = bytes.size() <= 128 && std::all_of(bytes.begin(), bytes.end(), isascii);
        return Handle(SubmitEvent{CallId(++calls_), std::move(spec), is_id ? bytes : ""});
      }
      case 5:
        return Handle(CancelEvent{CallId(++calls_), absl::StrCat("job-", what >> 4)});
      default:
        return Restart();
    }
  }

 private:
  struct Stream {
    std::optional<SessionId> session;
    uint64_t incarnation = 1;
  };

  // What the RPC service does with a message: the first one of a stream must be a Hello, later ones
  // must not.
  void Say(Stream& stream, const std::string& bytes) {
    v1::FromWorker message;
    if (!message.ParseFromString(bytes)) return;
    if (message.has_hello()) {
      if (stream.session.has_value()) Close(stream);
      v1::Hello& hello = *message.mutable_hello();
      if (hello.worker().empty() || hello.worker().size() > 253) return;
      FillIn(*hello.mutable_observed());
      stream.session = SessionId(++sessions_);
      const SessionId session = *stream.session;
      return Handle(SessionOpened{session, Incarnation(message.incarnation()), std::move(hello)});
    }
    if (!stream.session.has_value()) return;
    if (message.has_observed()) FillIn(*message.mutable_observed());
    if (message.has_put()) FillIn(*message.mutable_put());
    if (message.has_get()) FillIn(*message.mutable_get());
    if (message.has_commit()) FillIn(*message.mutable_commit());
    if (message.has_notice()) FillIn(*message.mutable_notice());
    Handle(SessionMessage{*stream.session, std::move(message)});
  }

  void Close(Stream& stream) {
    if (!stream.session.has_value()) return;
    const SessionId session = *std::exchange(stream.session, std::nullopt);
    Handle(SessionClosed{session});
  }

  // Messages that leave the job or the epoch out are about the newest job: ids are random letters,
  // which no mutation finds.
  template <typename Message>
  void FillIn(Message& message) {
    uint64_t next = 0;
    const std::vector<v1::Job> jobs = core_->ListJobs(0, 1, &next);
    if (jobs.empty()) return;
    if (message.job_id().empty()) message.set_job_id(jobs[0].id());
    if (message.epoch() == 0) message.set_epoch(jobs[0].epoch());
  }
  void FillIn(v1::Observed& observed) {
    for (v1::ObservedAttempt& attempt : *observed.mutable_attempts()) FillIn(attempt);
    if (observed.applied_revision() == 0) observed.set_applied_revision(revision_);
  }

  void Handle(const CoreEvent& event) { Take(core_->Handle(event, now_)); }

  void Take(CoreOutput output) {
    if (!output.batch.empty()) CHECK(store_->Write({output.batch}).ok());
    const std::vector<std::string> broken = core_->CheckInvariants();
    CHECK(broken.empty()) << absl::StrJoin(broken, "; ");
    std::vector<SessionId> closed;
    for (const CoreAction& action : output.actions) {
      if (const auto* send = std::get_if<SendAction>(&action)) {
        if (send->message.has_desired()) revision_ = send->message.desired().revision();
      } else if (const auto* close = std::get_if<CloseAction>(&action)) {
        closed.push_back(close->session);
      }
    }
    for (const SessionId session : closed) {
      for (Stream& stream : streams_) {
        if (stream.session == session) Close(stream);
      }
    }
  }

  const std::unique_ptr<MemoryStore> store_ = MemoryStore::Make("fuzz");
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  std::unique_ptr<Core> core_;
  Stream streams_[2];
  uint64_t sessions_ = 0;
  uint64_t calls_ = 0;
  uint64_t revision_ = 0;  // of the newest Desired
};

}  // namespace

void CoordinatorFrames(const std::string& bytes) {
  Play play;
  Frames frames(bytes);
  uint8_t what = 0;
  std::string frame;
  for (int i = 0; i < kFramesMax && frames.Next(&what, &frame); ++i) play.Step(what, frame);
  play.Restart();
}

}  // namespace muster::fuzz
