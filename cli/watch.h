// Following one job to its end: the live progress line and its plain form.
#ifndef MUSTER_CLI_WATCH_H_
#define MUSTER_CLI_WATCH_H_

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

// "gpt-kjv running 120/600 [####....] 20% loss 2.3451 val 2.4000 12.3k tok/s 42s ETA 2m48s", cut to
// `columns`.
std::string ProgressLine(const v1::Job& job, absl::Time now, int columns);

bool IsFinal(v1::JobState state);
// Why a job that is not SUCCEEDED ended, in one or two lines.
std::string FailureText(const v1::Job& job);

// How long a coordinator has been away from one who follows a stream of it. Quiet is not away: what
// counts starts when a stream ends, and starts over after one that said something or that lasted.
class Absence {
 public:
  explicit Absence(absl::Duration patience) : patience_(patience) {}

  void Opened(absl::Time now) {
    opened_ = now;
    heard_ = false;
  }
  void Heard() { heard_ = true; }
  // The stream has ended: whether to open another.
  bool Bearable(absl::Time now) {
    if (heard_ || now - opened_ > patience_) since_ = absl::InfiniteFuture();
    since_ = std::min(since_, now);
    return now - since_ <= patience_;
  }

 private:
  const absl::Duration patience_;
  absl::Time opened_ = absl::InfinitePast();
  absl::Time since_ = absl::InfiniteFuture();
  bool heard_ = false;
};

// Shows progress until the job has ended; a coordinator that goes away is waited for. OK when the
// job succeeded; kAborted with FailureText when it ended otherwise; the first error when there is
// no such job or no coordinator from the start; kUnavailable when it stayed away for longer than
// `patience`.
absl::Status Watch(CoordinatorClient& client, const std::string& name, Format format,
                   Terminal& terminal, absl::Duration patience);

}  // namespace muster::cli

#endif  // MUSTER_CLI_WATCH_H_
