#include "security/server_verification.h"

#include <openssl/x509.h>
#include <unistd.h>

#include <cstdlib>

namespace muster::security {
namespace {

// Debian and Ubuntu, Fedora and RHEL, SUSE.
constexpr const char* kBundles[] = {"/etc/ssl/certs/ca-certificates.crt",
                                    "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"};

}  // namespace

std::string SystemAuthorities() {
  if (std::getenv("SSL_CERT_FILE") != nullptr || std::getenv("SSL_CERT_DIR") != nullptr) return "";
  for (const char* bundle : kBundles) {
    if (access(bundle, R_OK) == 0) return bundle;
  }
  return "";
}

std::string VerifyError(int64_t result) {
  return result == X509_V_OK ? "" : X509_verify_cert_error_string(result);
}

}  // namespace muster::security
