#include <deque>
#include <map>
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
#include "tests/fuzz/targets/frames.h"
#include "tests/fuzz/targets/targets.h"
#include "worker/daemon/core/daemon_core.h"

namespace muster::fuzz {
namespace {

using namespace worker;  // NOLINT: the whole file is about it

DaemonCoreConfig Config() {
  DaemonCoreConfig config;
  config.hello.set_worker("w0");
  config.hello.set_boot_id("boot");
  for (int i = 0; i < 2; ++i) {
    v1::Device& device = *config.hello.add_devices();
    device.set_name(absl::StrCat("cpu:", i));
    device.set_kind(v1::DEVICE_KIND_CPU);
  }
  config.new_identity = "identity";
  config.rank_socket = "/state/rank.sock";
  config.cache_directory = "/state/cache";
  config.attempts_directory = "/state/attempts";
  return config;
}

// A core, its records, and a machine that does what the core asks for when the input says so.
class Play {
 public:
  Play() { Restart(); }

  void Restart() {
    session_.reset();
    asked_.clear();
    DaemonOutput output;
    absl::StatusOr<std::unique_ptr<DaemonCore>> core =
        DaemonCore::Recover(Config(), records_, now_, &output);
    CHECK(core.ok()) << core.status();
    core_ = *std::move(core);
    Take(std::move(output));
  }

  void Step(uint8_t what, const std::string& bytes) {
    switch (what % 8) {
      case 0:
      case 1: {
        v1::FromCoordinator message;
        if (!message.ParseFromString(bytes) || !session_.has_value()) return;
        if (message.cluster_id().empty()) message.set_cluster_id("fuzz");
        return Handle(CoordinatorMessage{*session_, std::move(message)});
      }
      case 2:
        if (session_.has_value()) return Down();
        session_ = SessionId(++sessions_);
        return Handle(SessionUp{*session_});
      case 3:
        now_ += absl::Milliseconds(100) * (1 + (what >> 3));
        return Handle(TimerFired{});
      case 4:
      case 5:
        return AnswerOne(/*well=*/what < 128);
      case 6:
        return Call(what >> 3, bytes);
      default:
        if (what < 128) return EndOneRank(what);
        return Restart();
    }
  }

 private:
  void Down() {
    const SessionId session = *std::exchange(session_, std::nullopt);
    Handle(SessionDown{session});
  }

  // A call of a rank that some frame has made known, or of any other.
  void Call(int which, const std::string& bytes) {
    RankCall call{CallId(++calls_), {}};
    const auto parse = [&](auto request) {
      if (!request.ParseFromString(bytes)) return false;
      if (request.identity().job_id().empty() && !running_.empty()) {
        const RankKey& rank = running_.begin()->first;
        request.mutable_identity()->set_job_id(rank.attempt.job.value());
        request.mutable_identity()->set_epoch(rank.attempt.epoch.value());
        request.mutable_identity()->set_rank(rank.rank);
      }
      call.request = std::move(request);
      return true;
    };
    bool parsed = false;
    switch (which % 6) {
      case 0:
        parsed = parse(v1::ReportRequest());
        break;
      case 1:
        parsed = parse(v1::PutRequest());
        break;
      case 2:
        parsed = parse(v1::GetRequest());
        break;
      case 3:
        parsed = parse(v1::CommitRequest());
        break;
      case 4:
        parsed = parse(v1::NotifyRequest());
        break;
      default:
        return Handle(RankCallCancelled{CallId(calls_ - 1)});
    }
    if (parsed) Handle(std::move(call));
  }

  // Answers the oldest question of the core.
  void AnswerOne(bool well) {
    if (asked_.empty()) return;
    const DaemonAction action = std::move(asked_.front());
    asked_.pop_front();
    if (const auto* prepare = std::get_if<PrepareAttempt>(&action)) {
      Handle(AttemptPrepared{prepare->attempt,
                             well ? absl::OkStatus() : absl::InternalError("no disk")});
    } else if (const auto* start = std::get_if<StartRank>(&action)) {
      Start(start->rank, well);
    } else if (const auto* attach = std::get_if<AttachRank>(&action)) {
      Start(attach->rank, well);
    } else if (const auto* verify = std::get_if<VerifyRelease>(&action)) {
      Handle(ReleaseProven{verify->rank});
    }
  }
  void Start(const RankKey& rank, bool well) {
    if (!well) return Handle(RankNotStarted{rank, absl::InternalError("no such program")});
    running_[rank] = ++pids_;
    Handle(RankStarted{rank, running_[rank]});
  }
  void EndOneRank(int code) {
    if (running_.empty()) return;
    const auto ended = *running_.begin();
    running_.erase(running_.begin());
    v1::RankExit exit;
    exit.set_code(code >> 3);
    exit.set_cause(code < 16 ? v1::CAUSE_UNSPECIFIED : v1::CAUSE_CRASH);
    Handle(RankExited{ended.first, ended.second, exit});
  }

  void Handle(const DaemonEvent& event) { Take(core_->Handle(event, now_)); }

  void Take(DaemonOutput output) {
    for (DaemonRecord& record : output.records) {
      CHECK(!record.name.empty() && record.name.find('/') == std::string::npos) << record.name;
      if (record.value.has_value()) {
        records_[record.name] = *std::move(record.value);
      } else {
        records_.erase(record.name);
      }
    }
    const std::vector<std::string> broken = core_->CheckInvariants();
    CHECK(broken.empty()) << absl::StrJoin(broken, "; ");
    bool reconnect = false;
    for (DaemonAction& action : output.actions) {
      if (std::holds_alternative<Reconnect>(action)) {
        reconnect = true;
      } else if (std::holds_alternative<PrepareAttempt>(action) ||
                 std::holds_alternative<StartRank>(action) ||
                 std::holds_alternative<AttachRank>(action) ||
                 std::holds_alternative<VerifyRelease>(action)) {
        asked_.push_back(std::move(action));
      }
    }
    if (reconnect && session_.has_value()) Down();
  }

  std::map<std::string, std::string> records_;
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  std::unique_ptr<DaemonCore> core_;
  std::optional<SessionId> session_;
  std::deque<DaemonAction> asked_;
  std::map<RankKey, int64_t> running_;  // pid
  uint64_t sessions_ = 0;
  uint64_t calls_ = 0;
  int64_t pids_ = 100;
};

}  // namespace

void DaemonFrames(const std::string& bytes) {
  Play play;
  Frames frames(bytes);
  uint8_t what = 0;
  std::string frame;
  for (int i = 0; i < kFramesMax && frames.Next(&what, &frame); ++i) play.Step(what, frame);
  play.Restart();
}

}  // namespace muster::fuzz
