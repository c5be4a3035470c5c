#include "coordinator/store/store.h"

namespace muster::coordinator {

const char* Name(Table table) {
  switch (table) {
    case Table::kMeta:
      return "meta";
    case Table::kJobs:
      return "jobs";
    case Table::kEvents:
      return "events";
    case Table::kWorkers:
      return "workers";
    case Table::kKeyValue:
      return "key_value";
    case Table::kRequests:
      return "requests";
    case Table::kSpecs:
      return "specs";
    case Table::kStates:
      return "states";
    case Table::kProgress:
      return "progress";
    case Table::kAttempts:
      return "attempts";
    case Table::kEnds:
      return "attempt_ends";
    case Table::kCheckpoints:
      return "checkpoints";
    case Table::kCurves:
      return "loss_points";
    case Table::kLog:
      return "log";
    case Table::kUsage:
      return "usage";
    case Table::kTokens:
      return "tokens";
    case Table::kAudit:
      return "audit";
    case Table::kQueues:
      return "queues";
    case Table::kTableCount:
      break;
  }
  return "unknown";
}

std::optional<Table> TableNamed(const std::string& name) {
  for (size_t i = 0; i < static_cast<size_t>(Table::kTableCount); ++i) {
    if (name == Name(static_cast<Table>(i))) return static_cast<Table>(i);
  }
  return std::nullopt;
}

}  // namespace muster::coordinator
