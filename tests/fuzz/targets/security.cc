// What the coordinator reads of callers and of its operator's files.
#include <string>

#include "absl/time/time.h"
#include "base/check.h"
#include "security/access.h"
#include "security/certificates.h"
#include "security/jwt.h"
#include "security/token.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {
namespace {

using namespace security;  // NOLINT: the whole file is about it

constexpr char kKeys[] = R"({"keys":[{"kty":"EC","crv":"P-256","kid":"k","use":"sig",)"
                         R"("x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",)"
                         R"("y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]})";

}  // namespace

// The first byte says which reader gets the rest.
void CallerText(const std::string& bytes) {
  if (bytes.empty()) return;
  const std::string text = bytes.substr(1);
  const Issuer issuer{.issuer = "i", .audience = "a", .jwks = "keys"};
  switch (bytes[0] % 6) {
    case 0:
      if (const auto token = ParseToken(text)) CHECK(TokenText(*token) == text);
      break;
    case 1: {
      static const auto verifier = JwtVerifier::Make(issuer, kKeys);
      // Nobody signs by chance.
      if (verifier.ok()) CHECK(!(*verifier)->Verify(text, absl::UnixEpoch()).ok());
      break;
    }
    case 2:
      JwtVerifier::Make(issuer, text).status().IgnoreError();
      break;
    case 3:
      ParseAccess(text).status().IgnoreError();
      break;
    case 4:
      if (const auto certificate = ReadCertificate(text); certificate.ok()) {
        WhoIs(*certificate).status().IgnoreError();
      }
      break;
    default: {
      if (const auto authorities = Authorities::Make(text, ""); authorities.ok()) {
        (*authorities)->Verify(text, absl::UnixEpoch()).IgnoreError();
      }
      Authorities::Make(text, text).status().IgnoreError();
    }
  }
}

}  // namespace muster::fuzz
