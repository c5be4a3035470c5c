// Bearer tokens: "muster_ID_SECRET". The coordinator stores a hash of the secret alone, which has
// 256 random bits, so that nothing slower than SHA-256 is needed.
#ifndef MUSTER_SECURITY_TOKEN_H_
#define MUSTER_SECURITY_TOKEN_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::security {

struct TokenParts {
  std::string id;
  std::string secret;
};
// From the system's random numbers.
TokenParts NewToken();
std::string TokenText(const TokenParts& parts);
// No value: the text is no token of ours.
std::optional<TokenParts> ParseToken(absl::string_view text);
// 32 bytes.
std::string HashOf(absl::string_view secret);
// In a time that does not tell where they differ.
bool SameSecret(absl::string_view a, absl::string_view b);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_TOKEN_H_
