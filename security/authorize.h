// The one decision on who may call what. Pure: a table of every RPC, and functions of it.
#ifndef MUSTER_SECURITY_AUTHORIZE_H_
#define MUSTER_SECURITY_AUTHORIZE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "security/principal.h"

namespace muster::security {

// What a caller of an RPC must be.
enum class Need : uint8_t {
  kKnown,      // any user or worker
  kWorker,     // a worker
  kViewer,     // a user with this role in any queue, or in the queue that the call is about
  kSubmitter,  // in the same way
  kOperator,
  kAdmin,
};

struct Rule {
  const char* method;  // "JobService.Submit", without the package
  Need need;
  // It has one queue, which the handler names: a grant of another queue does not reach. Otherwise
  // needs above kViewer are met by grants of every queue alone.
  bool of_queue;
  bool audited;  // every call leaves an entry in the audit log; refused ones of any RPC do
};

// Every RPC of the coordinator.
absl::Span<const Rule> Rules();
// Null: there is no such RPC, and nobody may call it.
const Rule* FindRule(absl::string_view method);

// Whether `caller` may call the RPC. `queue`: that of the job which the call is about, where the
// rule has one and it is known; absent: any queue will do, since the caller is asked again once it
// is. kUnauthenticated: nobody knows who calls. kPermissionDenied: says which role is missing.
absl::Status Authorize(const Principal& caller, const Rule& rule,
                       const std::optional<std::string>& queue);

// Whether `caller` may cancel a job, stop it or hold it: its owner with the role of a submitter in
// its queue, or an operator of the queue. kPermissionDenied as above.
absl::Status AuthorizeChange(const Principal& caller, const std::string& owner,
                             const std::string& queue);

// Whether the daemon of `caller` may say Hello as `worker`.
absl::Status AuthorizeHello(const Principal& caller, const std::string& worker);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_AUTHORIZE_H_
