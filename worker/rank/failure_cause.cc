#include "worker/rank/failure_cause.h"

#include "parallel/comm/peer_failure.h"
#include "parallel/train/failure.h"

namespace muster::worker {

using parallel::FailureDomain;

v1::Cause CauseOf(const absl::Status& status) {
  if (const auto failure = parallel::PeerFailureOf(status); failure.has_value()) {
    return failure->kind == parallel::PeerFailure::Kind::kLost ? v1::CAUSE_NETWORK
                                                               : v1::CAUSE_LAUNCH;
  }
  switch (parallel::DomainOf(status)) {
    case FailureDomain::kData:
      return v1::CAUSE_DATA;
    case FailureDomain::kStorage:
      return v1::CAUSE_STORAGE;
    case FailureDomain::kMemory:
      return v1::CAUSE_OUT_OF_MEMORY;
    case FailureDomain::kCommunication:
      return v1::CAUSE_COMMUNICATION;
    case FailureDomain::kNumeric:
      return v1::CAUSE_NUMERIC;
    case FailureDomain::kConfiguration:
      return v1::CAUSE_USER_ERROR;
    case FailureDomain::kDevice:
      return v1::CAUSE_DEVICE;
    case FailureDomain::kUnknown:
      break;
  }
  return v1::CAUSE_UNKNOWN;
}

std::optional<int> UnreachablePeerOf(const absl::Status& status) {
  const auto failure = parallel::PeerFailureOf(status);
  return failure.has_value() ? std::optional<int>(failure->rank) : std::nullopt;
}

}  // namespace muster::worker
