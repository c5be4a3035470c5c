#include "security/token.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace muster::security {
namespace {

constexpr char kPrefix[] = "muster_";
constexpr size_t kIdLetters = 10;
constexpr size_t kSecretBytes = 32;
constexpr size_t kSecretLettersMax = 64;

}  // namespace

TokenParts NewToken() {
  unsigned char bytes[kIdLetters + kSecretBytes];
  CHECK(RAND_bytes(bytes, sizeof(bytes)) == 1) << "the system gives no random numbers";
  TokenParts parts;
  for (size_t i = 0; i < kIdLetters; ++i) parts.id += static_cast<char>('a' + bytes[i] % 26);
  parts.secret = absl::WebSafeBase64Escape(
      absl::string_view(reinterpret_cast<char*>(bytes) + kIdLetters, kSecretBytes));
  OPENSSL_cleanse(bytes, sizeof(bytes));
  return parts;
}

std::string TokenText(const TokenParts& parts) {
  return absl::StrCat(kPrefix, parts.id, "_", parts.secret);
}

std::optional<TokenParts> ParseToken(absl::string_view text) {
  if (!absl::StartsWith(text, kPrefix)) return std::nullopt;
  text.remove_prefix(sizeof(kPrefix) - 1);
  if (text.size() < kIdLetters + 2 || text.size() > kIdLetters + 1 + kSecretLettersMax ||
      text[kIdLetters] != '_') {
    return std::nullopt;
  }
  for (const char c : text.substr(0, kIdLetters)) {
    if (c < 'a' || c > 'z') return std::nullopt;
  }
  return TokenParts{std::string(text.substr(0, kIdLetters)),
                    std::string(text.substr(kIdLetters + 1))};
}

std::string HashOf(absl::string_view secret) {
  unsigned char hash[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  CHECK(EVP_Digest(secret.data(), secret.size(), hash, &length, EVP_sha256(), nullptr) == 1);
  return std::string(reinterpret_cast<char*>(hash), length);
}

bool SameSecret(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace muster::security
