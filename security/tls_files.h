// The files of one end of a TLS link, checked before they are used, so that a mistake is told with
// the name of its file and not as a failed handshake.
#ifndef MUSTER_SECURITY_TLS_FILES_H_
#define MUSTER_SECURITY_TLS_FILES_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "security/certificates.h"

namespace muster::security {

struct TlsFiles {
  std::string certificate;  // PEM, with those between it and the authority behind it
  std::string key;
  std::string authorities;  // PEM: those that signed the other end's certificate

  bool any() const { return !certificate.empty() || !key.empty() || !authorities.empty(); }
};

// kInvalidArgument: a file is missing, cannot be read, is not what it should be, or the certificate
// has ended; says which file and what to do. A client needs the authorities alone; a server all
// three.
absl::Status CheckServerFiles(const TlsFiles& files, absl::Time now);
absl::Status CheckClientFiles(const TlsFiles& files, absl::Time now);

// When what these files hold begins and ends, by the flags that name them ("tls-cert", "tls-ca",
// "tls-crl", and those of `more`, which are paths by flag), of those that are given. Both times are
// the Unix epoch where a file cannot be read.
std::map<std::string, Validity> ReadValidities(const TlsFiles& files,
                                               const std::string& revocations = "",
                                               const std::map<std::string, std::string>& more = {});

}  // namespace muster::security

#endif  // MUSTER_SECURITY_TLS_FILES_H_
