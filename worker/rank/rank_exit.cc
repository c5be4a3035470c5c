#include "worker/rank/rank_exit.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {

void ExitReporter::SetProgress(const v1::RankProgress& progress) {
  MutexLock lock(&mutex_);
  progress_ = progress;
}

void ExitReporter::Write(v1::Cause cause, const std::string& message, std::optional<int> peer) {
  MutexLock lock(&mutex_);
  if (written_) return;
  written_ = true;
  if (run_directory_.empty()) return;
  v1::RankExitReport report;
  report.set_cause(cause);
  report.set_message(message);
  if (peer.has_value()) report.set_peer(*peer);
  *report.mutable_progress() = progress_;
  const std::string path = run_directory_ + kRankExitFile;
  const absl::Status status = PosixFileSystem()->WriteAtomically(path, report.SerializeAsString());
  if (!status.ok()) {
    std::cerr << "muster-rank: cannot write the exit report " << path << ": " << status
              << std::endl;
  }
}

void ExitReporter::EndProcess(v1::Cause cause, const std::string& message, int code,
                              std::optional<int> peer) {
  Write(cause, message, peer);
  std::fflush(nullptr);
  _exit(code);
}

StopSignals::StopSignals(ExitReporter& exit) : exit_(exit) {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGTERM);
  sigaddset(&signals_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  thread_ = std::thread([this] { Run(); });
}

StopSignals::~StopSignals() {
  ending_ = true;
  // Wakes the thread: the signal is blocked everywhere, so its sigwait takes it.
  pthread_kill(thread_.native_handle(), SIGTERM);
  thread_.join();
}

void StopSignals::Run() {
  for (;;) {
    int signal = 0;
    sigwait(&signals_, &signal);
    if (ending_) return;
    if (stop_ || !training_) {
      exit_.EndProcess(
          v1::CAUSE_PREEMPTED,
          absl::StrCat("ended at once on signal ", signal, stop_ ? ", the second one" : ""),
          kExitStopped);
    }
    stop_ = true;
  }
}

}  // namespace muster::worker
