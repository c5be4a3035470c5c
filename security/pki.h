// A certificate authority in a directory, for clusters without their own: `muster admin pki`.
//
//   ca.crt              the authorities that are trusted: for --tls-ca everywhere
//   ca.key              their keys, newest first: stay where certificates are issued
//   ca.crl              what was revoked: for the coordinator's --tls-crl
//   coordinator.crt .key, worker-NAME.crt .key, user-NAME.crt .key, metrics-HOST.crt .key
//
// Keys are P-256, files of keys have mode 0600, and no existing file is overwritten except by
// Rotate. Each pair of files is replaced key first and by renaming, so that a reader that looks
// between the two sees a pair that does not match, and looks again.
#ifndef MUSTER_SECURITY_PKI_H_
#define MUSTER_SECURITY_PKI_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "security/principal.h"

namespace muster::security {

struct Issued {
  std::string certificate, key;  // paths
  absl::Time not_after;
};

// Thread: one. Errors name the file: kAlreadyExists one that would be overwritten, kNotFound one
// that is missing, kUnavailable one that cannot be written or read, kInvalidArgument a name, role,
// host or time that cannot be, kDataLoss a file that is not what it should be.
class Pki {
 public:
  static constexpr absl::Duration kAuthorityLifetime = absl::Hours(24 * 3650);
  static constexpr absl::Duration kLifetime = absl::Hours(24 * 365);

  Pki(std::string directory, absl::Time now) : directory_(std::move(directory)), now_(now) {}

  // Makes the directory (0700), an authority and the coordinator's certificate for `hosts` (DNS
  // names and IP addresses; localhost and loopback addresses are added).
  absl::StatusOr<Issued> Init(const std::string& cluster, const std::vector<std::string>& hosts,
                              absl::Duration lifetime);
  // "*" for `worker` is good for every name.
  absl::StatusOr<Issued> IssueWorker(const std::string& worker, absl::Duration lifetime);
  absl::StatusOr<Issued> IssueUser(const std::string& user, const std::vector<Grant>& roles,
                                   absl::Duration lifetime);

  // A server's, for a daemon's metrics on `hosts` (DNS names and IP addresses, at least one). The
  // files are called by the first.
  absl::StatusOr<Issued> IssueMetrics(const std::vector<std::string>& hosts,
                                      absl::Duration lifetime);

  // Issues every certificate in the directory again that expires within `before`, with the names
  // and for as long as it had. Returns those.
  absl::StatusOr<std::vector<Issued>> Rotate(absl::Duration before);
  // A new authority, trusted beside the others. What is issued from now on is of it, and nothing is
  // issued: ca.crt must reach every machine before.
  absl::Status AddAuthority();
  // Ends the trust in all authorities but the newest. kFailedPrecondition: a certificate in the
  // directory is of another; Rotate first.
  absl::Status RetireAuthorities();
  // Adds the certificate in the file to ca.crl, and renews that; "": only renews it.
  absl::Status Revoke(const std::string& certificate_path);

 private:
  struct Names;
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  absl::StatusOr<Issued> Issue(const std::string& base, const Names& names, absl::Duration lifetime,
                               bool replace);

  const std::string directory_;
  const absl::Time now_;
};

}  // namespace muster::security

#endif  // MUSTER_SECURITY_PKI_H_
