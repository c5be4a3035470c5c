// The access file: which roles users and groups have whose certificates and tokens do not say, and
// which issuer of identity tokens is believed. docs/security.md describes it.
#ifndef MUSTER_SECURITY_ACCESS_H_
#define MUSTER_SECURITY_ACCESS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "security/principal.h"

namespace muster::security {

// An issuer of JSON Web Tokens (OpenID Connect).
struct Issuer {
  std::string issuer;    // claim `iss`
  std::string audience;  // claim `aud`
  std::string jwks;      // a file with its public keys, or the https:// address of one
  std::string user_claim = "sub";
  std::string groups_claim = "groups";
  absl::Duration clock_skew = absl::Seconds(60);

  bool KeysAreFetched() const { return jwks.find("://") != std::string::npos; }
};

struct Access {
  std::map<std::string, std::vector<Grant>> users;
  std::map<std::string, std::vector<Grant>> groups;
  std::vector<Grant> everyone;  // any authenticated user
  std::optional<Issuer> oidc;

  // Adds to a user's grants those that the file gives to them and their groups.
  void AddGrants(const std::vector<std::string>& groups_of_user, Principal& user) const;
};

// From YAML. kInvalidArgument: "line N: what is wrong".
absl::StatusOr<Access> ParseAccess(const std::string& text);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_ACCESS_H_
