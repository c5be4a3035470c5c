// Who calls, and what roles they have. Pure.
#ifndef MUSTER_SECURITY_PRINCIPAL_H_
#define MUSTER_SECURITY_PRINCIPAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::security {

// Each may do what those before it may.
enum class Role : uint8_t {
  kViewer = 1,  // reads jobs, workers, events and logs
  kSubmitter,   // submits jobs, and cancels those that they own
  kOperator,    // cancels the jobs of others, removes workers
  kAdmin,       // makes and revokes tokens, reads the audit log, takes backups
};
const char* Name(Role role);

// A role, in one queue or in all.
struct Grant {
  Role role = Role::kViewer;
  std::string queue;  // empty: every queue, and what belongs to no queue

  bool operator==(const Grant& other) const = default;
};
// "operator", or "operator@research" for one queue. kInvalidArgument names what is wrong.
absl::StatusOr<Grant> ParseGrant(absl::string_view text);
std::string ToString(const Grant& grant);

struct Principal {
  enum class Kind : uint8_t {
    kTrusted,  // the coordinator asks nobody who they are: may do everything
    kNobody,   // gave no proof of who they are
    kUser,
    kWorker,
  };
  Kind kind = Kind::kTrusted;
  // Of a user or worker. "*" of a worker: its certificate is good for every worker's name.
  std::string name;
  std::vector<Grant> grants;  // of a user

  // "user alice", "worker gpu-3", "nobody", "client".
  std::string ToString() const;
  // Job.owner of what they submit; empty unless a user.
  std::string Owner() const { return kind == Kind::kUser ? name : ""; }
};

// Names of users and workers: 1 to 253 printable ASCII characters without spaces.
constexpr size_t kPrincipalNameBytesMax = 253;
absl::Status CheckPrincipalName(absl::string_view name);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_PRINCIPAL_H_
