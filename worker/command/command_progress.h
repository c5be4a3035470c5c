// What a command has reported so far, as the rank's progress.
#ifndef MUSTER_WORKER_COMMAND_COMMAND_PROGRESS_H_
#define MUSTER_WORKER_COMMAND_COMMAND_PROGRESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "muster/v1/rank.pb.h"
#include "worker/command/progress_file.h"

namespace muster::worker {

// Thread: its owner's.
class CommandProgress {
 public:
  explicit CommandProgress(const v1::RankAssignment& assignment) : assignment_(assignment) {}

  void SetPhase(const std::string& phase) { progress_.set_phase(phase); }
  void SetPid(int64_t pid) { progress_.set_command_pid(pid); }

  // Takes reports that were read at `now`, in order. Those taken before may come again. What it
  // does not take is said in problems().
  void Take(const std::vector<CommandReport>& reports, absl::Time now);

  // What to report now. Step times and tokens per second that the command does not give are
  // measured between reports.
  const v1::RankProgress& progress() const { return progress_; }

  // Checkpoints that are new since the last call, as commit requests; of rank 0 alone.
  std::vector<v1::CheckpointRecord> TakeCheckpoints();
  // New since the last call, each kind at most once.
  std::vector<std::string> TakeProblems();

 private:
  void TakeOne(const CommandReport& report);
  void TakeCheckpoint(const CommandReport::Checkpoint& checkpoint);
  void Measure(absl::Time now);
  void Complain(const std::string& kind, const std::string& message);

  const v1::RankAssignment& assignment_;
  v1::RankProgress progress_;
  bool gives_speed_ = false;
  // Where the last measurement of speed ended.
  std::optional<absl::Time> measured_at_;
  int64_t measured_step_ = 0;
  int64_t measured_tokens_ = 0;
  std::vector<v1::CheckpointRecord> fresh_;
  std::vector<std::pair<int64_t, std::string>> taken_;  // checkpoints, by step
  std::vector<std::string> kinds_;                      // of problems that were said
  std::vector<std::string> problems_;
};

// The path of a checkpoint as later attempts find it: relative ones start at the working directory.
// A path with "://" is an address that only the command understands.
std::string CheckpointPath(const std::string& path, const std::string& working_directory);
bool IsAddress(const std::string& path);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_COMMAND_COMMAND_PROGRESS_H_
