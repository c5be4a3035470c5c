#include "coordinator/rpc/gate.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "coordinator/shell.h"
#include "proto/spec/names.h"
#include "proto/time.h"
#include "security/token.h"

namespace muster::coordinator {
namespace {

constexpr char kAuthorization[] = "authorization";
constexpr char kBearer[] = "Bearer ";
// Authorities and revocation lists end, too.
constexpr absl::Duration kVerifiedFor = absl::Minutes(1);

// Its address without the port.
std::string HostOf(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

// The caller's certificate, whose key the handshake has proven, and behind it what else they sent,
// of which nothing is proven. Empty: they have none.
std::string ChainOf(const grpc::CallbackServerContext& context) {
  const auto auth = context.auth_context();
  if (auth == nullptr) return "";
  const auto property = [&auth](const char* name) {
    const auto values = auth->FindPropertyValues(name);
    return values.empty() ? std::string() : std::string(values[0].data(), values[0].size());
  };
  const std::string own = property(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  if (own.empty()) return "";
  return absl::StrCat(own, "\n", property(GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME));
}

std::string BearerOf(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kAuthorization);
  if (found == metadata.end()) return "";
  const std::string text(found->second.data(), found->second.size());
  // Another scheme is no token of ours, and not nothing either.
  return absl::StartsWithIgnoreCase(text, kBearer) ? text.substr(sizeof(kBearer) - 1) : "?";
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  if (path.empty()) return std::string();
  return PosixFileSystem()->Read(path);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Gate>> Gate::Make(Shell& shell, Slots& slots,
                                                 const GateOptions& options) {
  std::unique_ptr<Gate> gate(new Gate(shell, slots, options));
  if (options.tls) {
    ASSIGN_OR_RETURN(std::shared_ptr<const Trust> trust, gate->Load());
    MutexLock lock(&gate->mutex_);
    gate->trust_ = std::move(trust);
  }
  if (options.tls) gate->ReloadLater();
  return gate;
}

Gate::Gate(Shell& shell, Slots& slots, const GateOptions& options)
    : shell_(shell),
      slots_(slots),
      options_(options),
      calls_(options.calls_per_second, 2 * options.calls_per_second, kRateLimitedMax),
      refusals_(kRefusalsAuditedPerSecond, kRefusalsAuditedAtOnce, kRateLimitedMax),
      keys_(shell.clock(), shell.log(), options.keys),
      loop_(std::make_unique<ThreadLoop>(shell.clock())) {}

Gate::~Gate() { loop_->Stop(); }

absl::StatusOr<std::shared_ptr<const Gate::Trust>> Gate::Load() {
  const GateOptions& options = options_;
  auto trust = std::make_shared<Trust>();
  ASSIGN_OR_RETURN(const std::string ca, ReadFile(options.ca));
  ASSIGN_OR_RETURN(const std::string crl, ReadFile(options.crl));
  ASSIGN_OR_RETURN(const std::string access, ReadFile(options.access));
  if (!options.crl.empty() && crl.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(options.crl, ": the revocation list is empty"));
  }
  auto authorities = security::Authorities::Make(ca, crl);
  if (!authorities.ok()) {
    return Annotate(authorities.status(), absl::StrCat(options.ca, " or ", options.crl));
  }
  trust->authorities = *std::move(authorities);
  absl::StatusOr<security::Access> parsed = security::ParseAccess(access);
  if (!parsed.ok()) return Annotate(parsed.status(), options.access);
  trust->access = *std::move(parsed);
  std::string jwks;
  if (const auto& oidc = trust->access.oidc; oidc.has_value()) {
    absl::StatusOr<std::string> keys =
        oidc->KeysAreFetched() ? keys_.Get(oidc->jwks) : ReadFile(oidc->jwks);
    if (keys.ok()) {
      jwks = *std::move(keys);
      absl::StatusOr<std::shared_ptr<const security::JwtVerifier>> jwt =
          security::JwtVerifier::Make(*oidc, jwks);
      if (!jwt.ok()) return Annotate(jwt.status(), options.access);
      trust->jwt = *std::move(jwt);
    } else if (oidc->KeysAreFetched()) {
      // An issuer that is away keeps nobody else out.
      trust->no_keys = keys.status();
      jwks = keys.status().ToString();
    } else {
      return keys.status();
    }
  }
  trust->files = absl::StrCat(ca, "\n", crl, "\n", access, "\n", jwks);
  return std::shared_ptr<const Trust>(std::move(trust));
}

void Gate::ReloadLater() {
  loop_->PostAfter(options_.reload, [this] {
    Reload();
    ReloadLater();
  });
}

void Gate::Reload() {
  absl::StatusOr<std::shared_ptr<const Trust>> loaded = Load();
  if (!loaded.ok()) {
    const std::string text = loaded.status().ToString();
    if (text != last_failure_) {
      shell_.log().Error(
          "what callers are checked with cannot be read again; what was read before "
          "counts",
          {{"error", text}});
    }
    last_failure_ = text;
    return;
  }
  last_failure_.clear();
  MutexLock lock(&mutex_);
  if ((*loaded)->files == trust_->files) return;
  trust_ = *std::move(loaded);
  verified_.clear();
  shell_.log().Info("what callers are checked with was read again",
                    {{"ca", options_.ca}, {"crl", options_.crl}, {"access", options_.access}});
}

std::shared_ptr<const Gate::Trust> Gate::trust() const {
  MutexLock lock(&mutex_);
  return trust_;
}

absl::StatusOr<Gate::Identity> Gate::OfCertificate(const std::string& chain) {
  const absl::Time now = absl::Now();
  const std::shared_ptr<const Trust> trust = this->trust();
  {
    MutexLock lock(&mutex_);
    const auto known = verified_.find(chain);
    if (known != verified_.end() && known->second.trust == trust && now < known->second.until) {
      return known->second.identity;
    }
  }
  ASSIGN_OR_RETURN(const security::Certificate certificate, security::ReadCertificate(chain));
  const auto identify = [&]() -> absl::StatusOr<Identity> {
    if (const absl::Status sound = trust->authorities->Verify(chain, now); !sound.ok()) {
      return absl::UnauthenticatedError(absl::StrCat(
          "the certificate of ", spec::Quoted(certificate.common_name), ", serial ",
          certificate.serial, ", valid until ",
          absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", certificate.not_after, absl::UTCTimeZone()), ": ",
          sound.message()));
    }
    absl::StatusOr<security::Named> named = security::WhoIs(certificate);
    if (!named.ok()) return absl::UnauthenticatedError(named.status().message());
    if (named->principal.kind == security::Principal::Kind::kUser) {
      trust->access.AddGrants(named->groups, named->principal);
    }
    return Identity{std::move(named->principal), absl::StrCat("certificate ", certificate.serial)};
  };
  absl::StatusOr<Identity> identity = identify();
  if (identity.ok()) {
    MutexLock lock(&mutex_);
    if (verified_.size() >= kCertificatesKnownMax) verified_.clear();
    verified_.insert_or_assign(
        chain, Verified{trust, std::min(certificate.not_after, now + kVerifiedFor), identity});
  }
  return identity;
}

absl::StatusOr<Gate::Identity> Gate::OfToken(const std::string& bearer) {
  const std::optional<security::TokenParts> parts = security::ParseToken(bearer);
  if (!parts.has_value()) {
    return absl::UnauthenticatedError(
        "the bearer token is malformed; `muster admin token create` makes one");
  }
  const std::optional<v1::TokenRow> row = shell_.tokens().Find(parts->id);
  // The same words for both, so that ids cannot be found out.
  if (!row.has_value() ||
      !security::SameSecret(row->secret_hash(), security::HashOf(parts->secret))) {
    return absl::UnauthenticatedError("the bearer token is not one of this cluster");
  }
  const v1::Token& token = row->token();
  if (token.has_revoked()) {
    return absl::UnauthenticatedError(
        absl::StrCat("the bearer token ", token.id(), " was revoked; ask an admin for another"));
  }
  if (absl::Now() >= FromProto(token.expires())) {
    return absl::UnauthenticatedError(
        absl::StrCat("the bearer token ", token.id(), " has expired; ask an admin for another"));
  }
  Identity identity;
  identity.principal.kind = security::Principal::Kind::kUser;
  identity.principal.name = token.user();
  for (const std::string& role : token.roles()) {
    const absl::StatusOr<security::Grant> grant = security::ParseGrant(role);
    if (grant.ok()) identity.principal.grants.push_back(*grant);
  }
  identity.proof = absl::StrCat("token ", token.id());
  return identity;
}

absl::StatusOr<Gate::Identity> Gate::OfIdentityToken(const Trust& trust,
                                                     const std::string& bearer) {
  if (trust.jwt == nullptr) {
    return absl::UnauthenticatedError(
        absl::StrCat("the identity token: ", trust.no_keys.message()));
  }
  absl::StatusOr<security::IdentityClaims> verified = trust.jwt->Verify(bearer, absl::Now());
  if (!verified.ok()) {
    if (trust.access.oidc->KeysAreFetched() && !trust.jwt->KnowsKeyOf(bearer)) keys_.Refresh();
    return verified.status();
  }
  const security::IdentityClaims& claims = *verified;
  Identity identity;
  identity.principal.kind = security::Principal::Kind::kUser;
  identity.principal.name = claims.user;
  trust.access.AddGrants(claims.groups, identity.principal);
  identity.proof = absl::StrCat("jwt ", trust.access.oidc->issuer);
  return identity;
}

absl::StatusOr<Gate::Identity> Gate::Authenticate(const std::string& chain,
                                                  const std::string& bearer) {
  if (!options_.tls) return Identity{};
  // A token says more exactly who calls than a certificate that a machine's users share.
  if (!bearer.empty()) {
    const std::shared_ptr<const Trust> trust = this->trust();
    const bool identity = trust->access.oidc.has_value() && security::LooksLikeJwt(bearer);
    return identity ? OfIdentityToken(*trust, bearer) : OfToken(bearer);
  }
  if (!chain.empty()) return OfCertificate(chain);
  Identity nobody;
  nobody.principal.kind = security::Principal::Kind::kNobody;
  return nobody;
}

absl::Status Gate::Refuse(const Admitted& caller, const absl::Status& status) {
  Audit(caller, status);
  return status;
}

absl::StatusOr<Admitted> Gate::Admit(const grpc::CallbackServerContext& context, const char* method,
                                     const std::string& target,
                                     const std::optional<std::string>& queue) {
  Admitted caller;
  caller.rule = security::FindRule(method);
  CHECK(caller.rule != nullptr) << method << " is not in the table of security/authorize.cc";
  caller.method = method;
  caller.target = target;
  caller.address = HostOf(context.peer());
  caller.slot_key = context.peer();
  if (!options_.tls) {
    caller.actor = absl::StrCat("client ", caller.address);
    return caller;
  }
  caller.chain = ChainOf(context);
  caller.bearer = BearerOf(context);
  absl::StatusOr<Identity> identity = Authenticate(caller.chain, caller.bearer);
  if (!identity.ok()) {
    caller.principal.kind = security::Principal::Kind::kNobody;
    caller.actor = absl::StrCat("nobody at ", caller.address);
    return Refuse(caller, identity.status());
  }
  caller.principal = std::move(identity->principal);
  caller.proof = std::move(identity->proof);
  caller.actor = absl::StrCat(caller.principal.ToString(), " at ", caller.address);
  if (caller.principal.kind != security::Principal::Kind::kNobody) {
    caller.slot_key = caller.principal.ToString();
  }
  const absl::Status may = security::Authorize(caller.principal, *caller.rule, queue);
  if (!may.ok()) return Refuse(caller, may);
  if (options_.calls_per_second > 0 && caller.principal.kind == security::Principal::Kind::kUser &&
      !calls_.Take(caller.slot_key, absl::Now()).may) {
    return Refuse(caller, absl::ResourceExhaustedError(absl::StrCat(
                              caller.slot_key, " calls more than ", options_.calls_per_second,
                              " times a second; retry later")));
  }
  return caller;
}

absl::StatusOr<Admitted> Gate::AdmitFurther(const Admitted& caller, const std::string& target,
                                            const std::string& queue) {
  Admitted further = caller;
  further.target = target;
  if (!options_.tls) return further;
  const absl::Status may = security::Authorize(further.principal, *further.rule, queue);
  if (!may.ok()) return Refuse(further, may);
  return further;
}

absl::StatusOr<Permit> Gate::Open(grpc::CallbackServerContext& context, const char* method,
                                  SlotKind kind, const std::string& job) {
  std::optional<std::string> queue;
  if (options_.tls && !job.empty()) {
    const auto found = shell_.published().Find(job);
    if (found != nullptr) queue = found->spec().queue();
  }
  ASSIGN_OR_RETURN(Admitted caller, Admit(context, method, job, queue));
  if (caller.rule->audited) Audit(caller, absl::OkStatus());
  Permit permit;
  ASSIGN_OR_RETURN(permit.slot, TakeSlot(kind, caller));
  permit.cancel = [&context] { context.TryCancel(); };
  permit.recheck_interval = options_.recheck;
  if (options_.tls) {
    permit.recheck = [this, caller = std::make_shared<const Admitted>(std::move(caller))] {
      return Recheck(*caller);
    };
  }
  return permit;
}

absl::Status Gate::Recheck(const Admitted& caller) {
  if (!options_.tls) return absl::OkStatus();
  ASSIGN_OR_RETURN(const Identity identity, Authenticate(caller.chain, caller.bearer));
  if (identity.principal.ToString() != caller.principal.ToString()) {
    return absl::UnauthenticatedError("the caller is another one now; call again");
  }
  return security::Authorize(identity.principal, *caller.rule, std::nullopt);
}

void Gate::Audit(const Caller& caller, const absl::Status& status) {
  v1::AuditEntry entry = EntryOf(caller, status);
  if (!status.ok()) {
    // A caller who is refused costs no more than so many writes.
    const RateLimit::Answer answer =
        refusals_.Take(absl::StrCat(caller.address, " ", caller.method), absl::Now());
    if (!answer.may) return;
    entry.set_more(answer.refused_before);
  }
  shell_.Audit(std::move(entry));
}

absl::StatusOr<Slots::Slot> Gate::TakeSlot(SlotKind kind, const Admitted& caller) {
  return slots_.Take(kind, caller.slot_key);
}

}  // namespace muster::coordinator
