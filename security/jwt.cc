#include "security/jwt.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

#ifdef MUSTER_HAVE_JWT
#include <jwt.h>
#include <openssl/core_names.h>
#include <openssl/param_build.h>

#include "security/openssl.h"
#endif

namespace muster::security {

bool LooksLikeJwt(absl::string_view token) {
  return std::count(token.begin(), token.end(), '.') == 2 && !token.empty() && token[0] != '.';
}

#ifndef MUSTER_HAVE_JWT

absl::StatusOr<std::shared_ptr<const JwtVerifier>> JwtVerifier::Make(const Issuer&,
                                                                     const std::string&) {
  return absl::UnimplementedError(
      "oidc: this build has no libjwt (Debian's libjwt-dev), so that it cannot check identity "
      "tokens");
}

#else

namespace {

using Json = nlohmann::json;

constexpr size_t kTokenBytesMax = 16 << 10;
constexpr size_t kGroupsMax = 1000;

using ParamsPtr = std::unique_ptr<OSSL_PARAM, Freed<OSSL_PARAM_free>>;
using BuilderPtr = std::unique_ptr<OSSL_PARAM_BLD, Freed<OSSL_PARAM_BLD_free>>;
using KeyContextPtr = std::unique_ptr<EVP_PKEY_CTX, Freed<EVP_PKEY_CTX_free>>;

struct FreeJwt {
  void operator()(jwt_t* jwt) const { jwt_free(jwt); }
};
using JwtPtr = std::unique_ptr<jwt_t, FreeJwt>;

std::string Text(const Json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string Bytes(const Json& object, const char* field) {
  std::string out;
  return absl::WebSafeBase64Unescape(Text(object, field), &out) ? out : "";
}

// The public key of a member of a key set as PEM; empty: of another kind, or not sound.
std::string PemOf(const Json& key) {
  const std::string kind = Text(key, "kty");
  const BuilderPtr builder(OSSL_PARAM_BLD_new());
  BignumPtr modulus, exponent;  // until the key is made
  std::string point, group;
  if (kind == "RSA") {
    const std::string n = Bytes(key, "n"), e = Bytes(key, "e");
    if (n.size() < 256 || n.size() > 1024 || e.empty() || e.size() > 8) return "";
    const auto number = [](const std::string& bytes) {
      return BignumPtr(BN_bin2bn(reinterpret_cast<const unsigned char*>(bytes.data()),
                                 static_cast<int>(bytes.size()), nullptr));
    };
    modulus = number(n);
    exponent = number(e);
    OSSL_PARAM_BLD_push_BN(builder.get(), OSSL_PKEY_PARAM_RSA_N, modulus.get());
    OSSL_PARAM_BLD_push_BN(builder.get(), OSSL_PKEY_PARAM_RSA_E, exponent.get());
  } else if (kind == "EC") {
    static const std::map<std::string, std::pair<std::string, size_t>> kCurves = {
        {"P-256", {"prime256v1", 32}}, {"P-384", {"secp384r1", 48}}, {"P-521", {"secp521r1", 66}}};
    const auto curve = kCurves.find(Text(key, "crv"));
    if (curve == kCurves.end()) return "";
    const std::string x = Bytes(key, "x"), y = Bytes(key, "y");
    if (x.size() != curve->second.second || y.size() != curve->second.second) return "";
    group = curve->second.first;
    point = absl::StrCat("\x04", x, y);
    OSSL_PARAM_BLD_push_utf8_string(builder.get(), OSSL_PKEY_PARAM_GROUP_NAME, group.c_str(), 0);
    OSSL_PARAM_BLD_push_octet_string(builder.get(), OSSL_PKEY_PARAM_PUB_KEY, point.data(),
                                     point.size());
  } else {
    return "";
  }
  const ParamsPtr params(OSSL_PARAM_BLD_to_param(builder.get()));
  const KeyContextPtr context(EVP_PKEY_CTX_new_from_name(nullptr, kind.c_str(), nullptr));
  EVP_PKEY* made = nullptr;
  const bool sound =
      params != nullptr && EVP_PKEY_fromdata_init(context.get()) == 1 &&
      EVP_PKEY_fromdata(context.get(), &made, EVP_PKEY_PUBLIC_KEY, params.get()) == 1;
  const KeyPtr owned(made);
  ERR_clear_error();
  if (!sound) return "";
  const BioPtr bio(BIO_new(BIO_s_mem()));
  PEM_write_bio_PUBKEY(bio.get(), owned.get());
  char* data = nullptr;
  const long length = BIO_get_mem_data(bio.get(), &data);  // NOLINT(google-runtime-int)
  return std::string(data, static_cast<size_t>(std::max(length, 0L)));
}

// The part of a token as JSON; discarded when it is none.
Json Part(absl::string_view token, size_t index) {
  const std::vector<absl::string_view> parts = absl::StrSplit(token, '.');
  std::string text;
  if (parts.size() != 3 || !absl::WebSafeBase64Unescape(parts[index], &text)) {
    return Json(Json::value_t::discarded);
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

absl::Status Refused(const std::string& why) {
  return absl::UnauthenticatedError(absl::StrCat("the identity token: ", why));
}

struct Key {
  std::string pem;
  bool rsa = false;
};

class LibJwtVerifier : public JwtVerifier {
 public:
  LibJwtVerifier(Issuer issuer, std::map<std::string, Key> keys)
      : issuer_(std::move(issuer)), keys_(std::move(keys)) {}

  bool KnowsKeyOf(const std::string& token) const override {
    if (token.size() > kTokenBytesMax) return true;
    const Json header = Part(token, 0);
    const std::string kid = header.is_object() ? Text(header, "kid") : "";
    return kid.empty() || keys_.contains(kid);
  }

  absl::StatusOr<IdentityClaims> Verify(const std::string& token, absl::Time now) const override {
    if (token.size() > kTokenBytesMax || !LooksLikeJwt(token)) return Refused("malformed");
    const Json header = Part(token, 0);
    if (!header.is_object()) return Refused("malformed");
    // The algorithm is chosen here, by the kind of our key, and never by the token alone: neither
    // none nor a MAC with a public key as its secret gets to the library.
    const std::string algorithm = Text(header, "alg");
    const bool rsa = algorithm == "RS256" || algorithm == "RS384" || algorithm == "RS512";
    const bool ec = algorithm == "ES256" || algorithm == "ES384" || algorithm == "ES512";
    if (!rsa && !ec) {
      return Refused(absl::StrCat("its algorithm '", absl::CHexEscape(algorithm.substr(0, 16)),
                                  "' is not RS256, RS384, RS512, ES256, ES384 or ES512"));
    }
    const auto key = keys_.find(Text(header, "kid"));
    if (key == keys_.end()) {
      return Refused(absl::StrCat("its key '", absl::CHexEscape(Text(header, "kid").substr(0, 64)),
                                  "' is not in the key set ", issuer_.jwks));
    }
    if (key->second.rsa != rsa) return Refused("its algorithm is not that of its key");
    jwt_t* decoded = nullptr;
    const std::string& pem = key->second.pem;
    const int failed =
        jwt_decode(&decoded, token.c_str(), reinterpret_cast<const unsigned char*>(pem.data()),
                   static_cast<int>(pem.size()));
    const JwtPtr owned(decoded);
    ERR_clear_error();
    if (failed != 0 || jwt_get_alg(decoded) != jwt_str_alg(algorithm.c_str())) {
      return Refused("its signature is not that of its key");
    }
    const std::unique_ptr<char, Freed<::free>> text(jwt_get_grants_json(decoded, nullptr));
    const Json claims = Json::parse(text == nullptr ? "" : text.get(), nullptr, false);
    if (!claims.is_object()) return Refused("it has no claims");
    return Check(claims, now);
  }

 private:
  absl::StatusOr<IdentityClaims> Check(const Json& claims, absl::Time now) const {
    if (Text(claims, "iss") != issuer_.issuer) {
      return Refused(absl::StrCat("its issuer is not ", issuer_.issuer));
    }
    if (!IsFor(claims)) return Refused(absl::StrCat("its audience is not ", issuer_.audience));
    const auto time = [&claims](const char* field) -> std::optional<absl::Time> {
      const auto found = claims.find(field);
      if (found == claims.end() || !found->is_number()) return std::nullopt;
      const double seconds = found->get<double>();
      if (!(seconds > -1e11 && seconds < 1e11)) return std::nullopt;
      return absl::UnixEpoch() + absl::Seconds(seconds);
    };
    const std::optional<absl::Time> expires = time("exp");
    if (!expires.has_value()) return Refused("it has no end (exp)");
    if (now >= *expires + issuer_.clock_skew) return Refused("it has expired");
    for (const char* field : {"nbf", "iat"}) {
      if (claims.contains(field) && !time(field).has_value()) {
        return Refused(absl::StrCat(field, " is no time"));
      }
      if (time(field).value_or(absl::InfinitePast()) > now + issuer_.clock_skew) {
        return Refused("it is not valid yet");
      }
    }
    IdentityClaims out;
    out.user = Text(claims, issuer_.user_claim.c_str());
    if (const absl::Status named = CheckPrincipalName(out.user); !named.ok()) {
      return Refused(absl::StrCat("claim ", issuer_.user_claim, ": ", named.message()));
    }
    if (const auto groups = claims.find(issuer_.groups_claim);
        groups != claims.end() && groups->is_array()) {
      for (const Json& group : *groups) {
        if (group.is_string() && out.groups.size() < kGroupsMax) out.groups.push_back(group);
      }
    }
    return out;
  }

  bool IsFor(const Json& claims) const {
    const auto audience = claims.find("aud");
    if (audience == claims.end()) return false;
    if (audience->is_string()) return *audience == issuer_.audience;
    return audience->is_array() &&
           std::find(audience->begin(), audience->end(), Json(issuer_.audience)) != audience->end();
  }

  const Issuer issuer_;
  const std::map<std::string, Key> keys_;  // by kid
};

}  // namespace

absl::StatusOr<std::shared_ptr<const JwtVerifier>> JwtVerifier::Make(const Issuer& issuer,
                                                                     const std::string& jwks) {
  const Json set = Json::parse(jwks, nullptr, /*allow_exceptions=*/false);
  const auto members = set.is_object() ? set.find("keys") : set.end();
  if (!set.is_object() || members == set.end() || !members->is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat("oidc.jwks ", issuer.jwks, ": no JSON Web Key Set, {\"keys\": [...]}"));
  }
  std::map<std::string, Key> keys;
  for (const Json& member : *members) {
    if (!member.is_object() || Text(member, "kid").empty()) continue;
    if (member.contains("use") && Text(member, "use") != "sig") continue;
    if (std::string pem = PemOf(member); !pem.empty()) {
      keys[Text(member, "kid")] = {std::move(pem), Text(member, "kty") == "RSA"};
    }
  }
  if (keys.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("oidc.jwks ", issuer.jwks, ": no public RSA or EC key with a kid"));
  }
  return std::make_shared<LibJwtVerifier>(issuer, std::move(keys));
}

#endif

}  // namespace muster::security
