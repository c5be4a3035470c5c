#include "cli/reconnect.h"

#include <utility>

#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace muster::cli {
namespace {

constexpr absl::Duration kFirstAnswerTimeout = absl::Seconds(5);

}  // namespace

absl::Status ReadReconnecting(CoordinatorClient& client, Terminal& terminal,
                              const std::function<absl::Status(Absence&)>& open) {
  RETURN_IF_ERROR(client.GetVersion(kFirstAnswerTimeout).status());
  Absence absence(kReconnectPatience);
  bool told = false;
  for (;;) {
    absence.Opened(absl::Now());
    const absl::Status status = open(absence);
    if (status.code() != absl::StatusCode::kUnavailable || !absence.ShouldRetry(absl::Now())) {
      return status;
    }
    if (!std::exchange(told, true)) {
      terminal.err << "muster: " << status.message() << "; trying again" << std::endl;
    }
    absl::SleepFor(kReconnectInterval);
  }
}

}  // namespace muster::cli
