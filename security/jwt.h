// Identity tokens of an OpenID Connect issuer (JSON Web Tokens), checked by libjwt.
#ifndef MUSTER_SECURITY_JWT_H_
#define MUSTER_SECURITY_JWT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "security/access.h"

namespace muster::security {

struct IdentityClaims {
  std::string user;
  std::vector<std::string> groups;
};

// Immutable, thread-safe.
class JwtVerifier {
 public:
  virtual ~JwtVerifier() = default;
  // `jwks`: a JSON Web Key Set with public keys, RSA or P-256, P-384 and P-521, each with a `kid`;
  // others in it are passed over. kInvalidArgument: it cannot be read, or has no such key.
  // kUnimplemented: this build has no libjwt.
  static absl::StatusOr<std::shared_ptr<const JwtVerifier>> Make(const Issuer& issuer,
                                                                 const std::string& jwks);
  // False: `token` names a key that the set lacks.
  virtual bool KnowsKeyOf(const std::string& token) const = 0;
  // Who calls. kUnauthenticated says why nobody does: no token, an algorithm other than RS256 to
  // RS512 and ES256 to ES512 (`none` above all), a `kid` that the set lacks, a signature, issuer or
  // audience that is another, or a time before `nbf` or behind `exp`, by more than the clock skew.
  virtual absl::StatusOr<IdentityClaims> Verify(const std::string& token, absl::Time now) const = 0;
};

// Whether a bearer token may be one: three parts of base64 with dots between.
bool LooksLikeJwt(absl::string_view token);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_JWT_H_
