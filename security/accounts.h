// The Unix accounts of this machine as which ranks run, where they do not run as the daemon's own
// user (--job-user, docs/security.md).
#ifndef MUSTER_SECURITY_ACCOUNTS_H_
#define MUSTER_SECURITY_ACCOUNTS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::security {

struct Account {
  std::string name;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // with gid
  std::string home;
  std::string shell;
};

// JobUserPolicy::user: the account of the user who submitted the job.
constexpr char kJobUserOwner[] = "owner";

struct JobUserPolicy {
  std::string user;           // an account, or kJobUserOwner; empty: the daemon's own user
  std::string map_file;       // identities to accounts (ParseAccountMap); empty: same names
  int64_t lowest_uid = 1000;  // of accounts of owners
  bool any() const { return !user.empty(); }
};

// Whether a daemon of this process may do what `policy` asks for. kFailedPrecondition names the
// capabilities that it lacks; kNotFound, kInvalidArgument: the account or the file.
absl::Status CheckJobUser(const JobUserPolicy& policy);

// As whom a rank of `owner`'s job runs; no value: as the daemon's user. Reads the map again at each
// call. kNotFound: there is no such account; kPermissionDenied: it may not be used; both name the
// owner and the account.
absl::StatusOr<std::optional<Account>> AccountOf(const JobUserPolicy& policy,
                                                 const std::string& owner);

// Identities by line: "IDENTITY ACCOUNT"; "*" stands for every identity that has no line; what
// follows a # is a remark. kInvalidArgument: "line N: what is wrong".
absl::StatusOr<std::map<std::string, std::string>> ParseAccountMap(const std::string& text);

// While it lives, what its thread does with files is what the account may do: a daemon that is root
// is no help to look at what the account itself may not see. Other threads are not affected, and
// the thread must not start any. Without an account it does nothing.
class ActAs {
 public:
  // Aborts when the kernel refuses: CheckJobUser has found that it does not.
  explicit ActAs(const std::optional<Account>& account);
  ~ActAs();
  ActAs(const ActAs&) = delete;
  ActAs& operator=(const ActAs&) = delete;

 private:
  void SetFileCapabilities(bool on);

  bool active_ = false;
  uid_t uid_ = 0;
  gid_t gid_ = 0;
  std::vector<gid_t> groups_;
  uint32_t capabilities_ = 0;  // that were effective, of those over files
};

// Makes this process the account's for good: user, groups, no capabilities, and no way to gain
// any. Between fork and exec, in a process of one thread; it allocates nothing. False: errno says
// why, and the process must end.
bool BecomeAccount(uid_t uid, gid_t gid, const std::vector<gid_t>& groups);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_ACCOUNTS_H_
