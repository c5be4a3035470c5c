// Reading a stream across restarts of the coordinator.
#ifndef MUSTER_CLI_RECONNECT_H_
#define MUSTER_CLI_RECONNECT_H_

#include <algorithm>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

constexpr absl::Duration kReconnectInterval = absl::Milliseconds(300);
// How long a command waits for a coordinator that went away.
constexpr absl::Duration kReconnectPatience = absl::Minutes(10);

// Decides whether to open a stream again after it ended, depending on how long the coordinator has
// been away. A stream without messages does not count as away: the time starts when a stream ends,
// and starts again after a stream that delivered something or lasted longer than the patience.
class Absence {
 public:
  explicit Absence(absl::Duration patience) : patience_(patience) {}

  // A stream was opened.
  void Opened(absl::Time now) {
    opened_ = now;
    heard_ = false;
  }
  // The stream delivered something.
  void Heard() { heard_ = true; }
  // The stream has ended. True: open another one.
  bool ShouldRetry(absl::Time now) {
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

// Calls `open`, which reads a stream to its end, again and again while it returns kUnavailable and
// the coordinator has not been away for longer than kReconnectPatience. Returns its last status.
// Fails at once when there is no coordinator from the start.
absl::Status ReadReconnecting(CoordinatorClient& client, Terminal& terminal,
                              const std::function<absl::Status(Absence&)>& open);

}  // namespace muster::cli

#endif  // MUSTER_CLI_RECONNECT_H_
