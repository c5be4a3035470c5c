// Who calls the API, as the core keeps it: for events, for the audit log, and to decide what only
// it can, such as whose job is cancelled.
#ifndef MUSTER_COORDINATOR_CORE_CALLER_H_
#define MUSTER_COORDINATOR_CORE_CALLER_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "muster/v1/access.pb.h"
#include "security/principal.h"

namespace muster::coordinator {

struct Caller {
  // Not explicit: a caller of whom nothing but the actor is known may do everything, and leaves no
  // entry in the audit log.
  Caller(std::string actor = "client") : actor(std::move(actor)) {}  // NOLINT
  Caller(const char* actor) : actor(actor) {}                        // NOLINT

  std::string actor;  // Event.actor
  security::Principal principal;
  // For the audit log; an empty method stands for a call that it does not keep.
  std::string method;   // "JobService.Submit"
  std::string target;   // what the call names
  std::string address;  // without the port
  std::string proof;    // AuditEntry.proof
};

// The entry of a call that ended with `status`; the core gives it its number and time.
v1::AuditEntry EntryOf(const Caller& caller, const absl::Status& status);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CALLER_H_
