#include "worker/command/command_progress.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace muster::worker {
namespace {

// Speed is measured over at least this long.
constexpr absl::Duration kMeasureOver = absl::Seconds(1);
// A checkpoint that was taken comes again with every reading of the file: so many are remembered.
constexpr size_t kTakenMax = 4096;

}  // namespace

bool IsAddress(const std::string& path) { return absl::StrContains(path, "://"); }

std::string CheckpointPath(const std::string& path, const std::string& working_directory) {
  if (path[0] == '/' || IsAddress(path) || working_directory.empty()) return path;
  return absl::StrCat(working_directory, "/", path);
}

void CommandProgress::Take(const std::vector<CommandReport>& reports, absl::Time now) {
  if (reports.empty()) return;
  progress_.set_reports(true);
  for (const CommandReport& report : reports) TakeOne(report);
  Measure(now);
}

void CommandProgress::TakeOne(const CommandReport& report) {
  if (report.step.has_value() && *report.step > progress_.step()) progress_.set_step(*report.step);
  if (report.steps.has_value()) progress_.set_steps(*report.steps);
  if (report.tokens.has_value()) progress_.set_consumed_tokens(*report.tokens);
  if (report.loss.has_value()) progress_.set_train_loss(*report.loss);
  if (report.validation_loss.has_value()) {
    progress_.set_validation_loss(*report.validation_loss);
    progress_.set_validation_step(report.step.value_or(progress_.step()));
  }
  if (report.tokens_per_second.has_value()) {
    gives_speed_ = true;
    progress_.set_tokens_per_second(*report.tokens_per_second);
  }
  if (report.phase.has_value()) progress_.set_phase(*report.phase);
  if (report.checkpoint.has_value()) TakeCheckpoint(*report.checkpoint);
}

void CommandProgress::TakeCheckpoint(const CommandReport::Checkpoint& checkpoint) {
  if (assignment_.rank() != 0) {
    Complain("rank", "checkpoints are taken from the progress file of rank 0 alone");
    return;
  }
  const std::string path = CheckpointPath(checkpoint.path, assignment_.spec().working_directory());
  const auto known = std::find_if(taken_.begin(), taken_.end(), [&](const auto& entry) {
    return entry.first == checkpoint.step;
  });
  if (known != taken_.end()) {
    if (known->second != path) {
      Complain("path", absl::StrCat("the checkpoint of step ", checkpoint.step, " was reported as ",
                                    known->second, " and now as ", path, "; the first one counts"));
    }
    return;
  }
  struct stat info = {};
  if (!IsAddress(path) && ::stat(path.c_str(), &info) != 0) {
    Complain("missing", absl::StrCat("the checkpoint of step ", checkpoint.step, ", ", path,
                                     ", does not exist; report it once it is written"));
    return;  // it counts when it is there by the next report
  }
  if (taken_.size() >= kTakenMax) taken_.erase(taken_.begin());
  taken_.emplace_back(checkpoint.step, path);
  v1::CheckpointRecord& record = fresh_.emplace_back();
  record.set_step(checkpoint.step);
  record.set_epoch(assignment_.epoch());
  record.set_membership(assignment_.membership());
  record.set_path(path);
  if (S_ISREG(info.st_mode)) record.set_bytes(info.st_size);
  progress_.set_last_saved_step(std::max(progress_.last_saved_step(), checkpoint.step));
}

void CommandProgress::Measure(absl::Time now) {
  if (!measured_at_.has_value()) {
    measured_at_ = now;
    measured_step_ = progress_.step();
    measured_tokens_ = progress_.consumed_tokens();
    return;
  }
  const absl::Duration passed = now - *measured_at_;
  if (passed < kMeasureOver || progress_.step() <= measured_step_) return;
  const double seconds = absl::ToDoubleSeconds(passed);
  progress_.set_step_seconds(seconds / static_cast<double>(progress_.step() - measured_step_));
  if (!gives_speed_ && progress_.consumed_tokens() > measured_tokens_) {
    progress_.set_tokens_per_second(
        static_cast<double>(progress_.consumed_tokens() - measured_tokens_) / seconds);
  }
  measured_at_ = now;
  measured_step_ = progress_.step();
  measured_tokens_ = progress_.consumed_tokens();
}

void CommandProgress::Complain(const std::string& kind, const std::string& message) {
  if (std::find(kinds_.begin(), kinds_.end(), kind) != kinds_.end()) return;
  kinds_.push_back(kind);
  problems_.push_back(message);
}

std::vector<v1::CheckpointRecord> CommandProgress::TakeCheckpoints() {
  return std::exchange(fresh_, {});
}

std::vector<std::string> CommandProgress::TakeProblems() { return std::exchange(problems_, {}); }

}  // namespace muster::worker
