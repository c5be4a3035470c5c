// What a library that verifies the certificates of servers by OpenSSL has to be told, and what its
// answer means.
#ifndef MUSTER_SECURITY_SERVER_VERIFICATION_H_
#define MUSTER_SECURITY_SERVER_VERIFICATION_H_

#include <cstdint>
#include <string>

namespace muster::security {

// The file with the authorities of this system. OpenSSL knows its own place for them alone, which a
// program that was built elsewhere, or a small container, does not have. Empty: leave it to
// OpenSSL, which $SSL_CERT_FILE and $SSL_CERT_DIR may tell.
std::string SystemAuthorities();

// Of a result of SSL_get_verify_result, such as "unable to get local issuer certificate". Empty:
// the certificate itself was accepted.
std::string VerifyError(int64_t result);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_SERVER_VERIFICATION_H_
