// X.509 certificates by OpenSSL: who they name, and whether an authority signed them.
#ifndef MUSTER_SECURITY_CERTIFICATES_H_
#define MUSTER_SECURITY_CERTIFICATES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "security/principal.h"

namespace muster::security {

// What a certificate says of its holder.
struct Certificate {
  std::string serial;  // hex digits
  std::string common_name;
  std::vector<std::string> organizations;
  std::vector<std::string> uris;   // subject alternative names
  std::vector<std::string> hosts;  // DNS names and IP addresses among them
  absl::Time not_before, not_after;
};
// Of the first certificate in PEM text. kInvalidArgument: there is none that can be read.
absl::StatusOr<Certificate> ReadCertificate(const std::string& pem);
// When the first of several certificates, or revocation lists, ends and the last one begins.
struct Validity {
  absl::Time not_before, not_after;
};
// Of all certificates and revocation lists in PEM text. kInvalidArgument: there is none.
absl::StatusOr<Validity> ReadValidity(const std::string& pem);
// kInvalidArgument when the private key is not that of the certificate, or either cannot be read;
// says which.
absl::Status CheckKeyPair(const std::string& certificate_pem, const std::string& key_pem);

// Who the certificate names:
//   a worker  by a URI whose path ends in /worker/NAME (spiffe://DOMAIN/worker/NAME), or by
//             organization muster:worker with the worker's name as common name
//   a user    by a URI whose path ends in /user/NAME, else by its common name; organizations
//             muster:ROLE and muster:ROLE@QUEUE are roles of theirs, the others groups
// kInvalidArgument: it names nobody, a name or role that cannot be, or both a worker and a user.
struct Named {
  Principal principal;
  std::vector<std::string> groups;  // of a user: organizations that are no roles
};
absl::StatusOr<Named> WhoIs(const Certificate& certificate);

// Authorities that sign the certificates of callers, and what they revoked. Immutable, thread-safe.
class Authorities {
 public:
  virtual ~Authorities() = default;
  // `ca_pem`: one or several certificates of authorities. `crl_pem`: their revocation lists, empty
  // for none; then every authority must have one that is current. kInvalidArgument says which of
  // the two cannot be read.
  static absl::StatusOr<std::shared_ptr<const Authorities>> Make(const std::string& ca_pem,
                                                                 const std::string& crl_pem);
  // Whether the first certificate of `chain_pem` is that of a client, signed by an authority
  // through the others, in its time at `now`, and not revoked. kUnauthenticated says why not.
  virtual absl::Status Verify(const std::string& chain_pem, absl::Time now) const = 0;
};

}  // namespace muster::security

#endif  // MUSTER_SECURITY_CERTIFICATES_H_
