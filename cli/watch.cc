#include "cli/watch.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cli/explain.h"
#include "cli/reconnect.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

constexpr absl::Duration kPlainInterval = absl::Seconds(5);
constexpr int kBarWidthMax = 30;
constexpr int kBarWidthMin = 8;

absl::Duration Elapsed(const v1::Job& job, absl::Time now) {
  if (job.started().seconds() == 0) return absl::ZeroDuration();
  return (job.ended().seconds() != 0 ? FromProto(job.ended()) : now) - FromProto(job.started());
}

// Prints the progress of a job: on a terminal one line that it redraws, elsewhere a line now and
// then, for scripts every update as JSON or YAML.
class ProgressView {
 public:
  ProgressView(Format format, Terminal& terminal) : format_(format), terminal_(terminal) {}

  void Show(const v1::Job& job) {
    const absl::Time now = absl::Now();
    if (format_ != Format::kTable) return PrintItem(ToJson(job), format_, terminal_.out);
    if (terminal_.is_tty) {
      Redraw(ProgressLine(job, now, terminal_.columns - 1));
      return;
    }
    const bool changed = job.state() != state_ || job.epoch() != epoch_ || job.phase() != phase_ ||
                         IsFinal(job.state());
    if (!changed && now - shown_ < kPlainInterval) return;
    state_ = job.state();
    epoch_ = job.epoch();
    phase_ = job.phase();
    shown_ = now;
    terminal_.out << ProgressLine(job, now, 200) << std::endl;
  }

  void Away(const absl::Status& status) {
    if (format_ != Format::kTable || away_) return;
    away_ = true;
    if (terminal_.is_tty) Redraw("");
    terminal_.err << "muster: " << status.message() << "; trying again" << std::endl;
  }
  void Back() { away_ = false; }

  void End() {
    if (format_ == Format::kTable && terminal_.is_tty && drawn_) terminal_.out << std::endl;
  }

 private:
  void Redraw(const std::string& line) {
    // Carriage return, the line, and clear to the end of a longer line before it.
    terminal_.out << "\r" << line << "\033[K" << std::flush;
    drawn_ = !line.empty();
  }

  const Format format_;
  Terminal& terminal_;
  absl::Time shown_ = absl::InfinitePast();
  v1::JobState state_ = v1::JOB_STATE_UNSPECIFIED;
  uint64_t epoch_ = 0;
  std::string phase_;
  bool away_ = false;
  bool drawn_ = false;
};

std::string Bar(double fraction, int width) {
  const int done = static_cast<int>(fraction * width);
  return absl::StrCat("[", std::string(done, '#'), std::string(width - done, '.'), "]");
}

}  // namespace

std::string ProgressLine(const v1::Job& job, absl::Time now, int columns) {
  const double fraction =
      job.steps() > 0 ? std::clamp(static_cast<double>(job.step()) / job.steps(), 0.0, 1.0) : 0;
  const std::string head = absl::StrCat(job.name(), "  ", spec::EnumName(job.state()), "  ");
  // A command need not say how many steps it takes, nor that it takes any.
  const bool bounded = job.steps() > 0;
  const std::string count = bounded || job.step() > 0 ? StepText(job) + " " : "";
  std::string tail = bounded ? absl::StrFormat(" %3.0f%%", 100 * fraction) : "";
  if (job.train_loss() != 0) absl::StrAppend(&tail, "  loss ", Loss(job.train_loss()));
  if (job.validation_loss() != 0) absl::StrAppend(&tail, "  val ", Loss(job.validation_loss()));
  if (job.tokens_per_second() > 0 && !IsFinal(job.state())) {
    absl::StrAppend(&tail, "  ", ShortNumber(job.tokens_per_second()), " tok/s");
    if (job.model_flops_utilization() > 0) {
      absl::StrAppendFormat(&tail, "  MFU %.1f%%", 100 * job.model_flops_utilization());
    }
  }
  if (job.started().seconds() != 0) {
    absl::StrAppend(&tail, "  ", ShortDuration(Elapsed(job, now)));
  }
  if (job.state() == v1::JOB_STATE_RUNNING && job.step_seconds() > 0 && bounded) {
    const double left = job.step_seconds() * static_cast<double>(job.steps() - job.step());
    absl::StrAppend(&tail, "  ETA ", ShortDuration(absl::Seconds(left)));
  }
  if (!IsFinal(job.state()) && !job.phase().empty() && job.phase() != "training" &&
      job.phase() != spec::EnumName(job.state())) {
    absl::StrAppend(&tail, "  ", job.phase());
  }
  if (job.has_waiting()) absl::StrAppend(&tail, "  ", WaitText(job.waiting()));
  const int bar_width = columns - static_cast<int>(head.size() + count.size() + tail.size()) - 2;
  std::string line = head + count;
  if (bounded && bar_width >= kBarWidthMin)
    line += Bar(fraction, std::min(bar_width, kBarWidthMax));
  line += tail;
  if (static_cast<int>(line.size()) > columns) line.resize(std::max(columns, 0));
  return line;
}

namespace {

// ": 600 steps in 1m14s, loss 1.5048, ...", without what a command has not reported.
std::string SuccessText(const v1::Job& job) {
  const bool command = job.spec().command_size() > 0;
  std::vector<std::string> parts;
  const std::string took = ShortDuration(Elapsed(job, absl::Now()));
  const int64_t steps = command ? job.step() : job.steps();
  parts.push_back(steps > 0 ? absl::StrCat(steps, " steps in ", took) : absl::StrCat("in ", took));
  if (!command || job.train_loss() != 0) {
    parts.push_back(absl::StrCat("loss ", Loss(job.train_loss())));
  }
  if (!command || job.validation_loss() != 0) {
    parts.push_back(absl::StrCat("validation loss ", Loss(job.validation_loss())));
  }
  parts.push_back(absl::StrCat(job.attempts(), job.attempts() == 1 ? " attempt" : " attempts"));
  return absl::StrCat(": ", absl::StrJoin(parts, ", "));
}

}  // namespace

std::string FailureText(const v1::Job& job) {
  std::string text = absl::StrCat(job.name(), " ", spec::EnumName(job.state()));
  if (!job.message().empty()) absl::StrAppend(&text, ": ", job.message());
  if (job.state() == v1::JOB_STATE_FAILED && !job.causes().empty()) {
    const v1::AttemptEnd& last = *job.causes().rbegin();
    if (job.message().find(last.message()) == std::string::npos || last.message().empty()) {
      absl::StrAppend(
          &text, "\n  attempt ", last.epoch(), " ended",
          last.step() > 0 || job.steps() > 0 ? absl::StrCat(" at step ", last.step()) : "", " (",
          spec::EnumName(last.cause()), "): ", last.message());
    }
    absl::StrAppend(&text, "\n  more: muster describe job ", job.name(), "; muster logs ",
                    job.name(), " --rank ", std::max(last.rank(), 0));
  }
  return text;
}

absl::Status Watch(CoordinatorClient& client, const std::string& name, Format format,
                   Terminal& terminal, absl::Duration patience) {
  ProgressView view(format, terminal);
  v1::Job last;
  Absence absence(patience);
  for (;;) {
    absence.Opened(absl::Now());
    // By id after the first answer: a newer job may have taken the name.
    const absl::Status status =
        client.WatchJob(last.id().empty() ? name : last.id(), [&](const v1::Job& job) {
          last = job;
          absence.Heard();
          view.Back();
          view.Show(job);
          return !IsFinal(job.state());
        });
    if (IsFinal(last.state())) break;
    const bool lost = status.ok() || status.code() == absl::StatusCode::kUnavailable ||
                      status.code() == absl::StatusCode::kCancelled;
    if (!lost || last.id().empty() || !absence.ShouldRetry(absl::Now())) {
      view.End();
      return status.ok() ? absl::UnavailableError("the coordinator ended the watch") : status;
    }
    if (!status.ok()) view.Away(status);
    absl::SleepFor(kReconnectInterval);
  }
  view.End();
  if (last.state() != v1::JOB_STATE_SUCCEEDED) return absl::AbortedError(FailureText(last));
  if (format == Format::kTable) {
    terminal.out << last.name() << " succeeded" << SuccessText(last) << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
