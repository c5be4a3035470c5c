#include "coordinator/rpc/issuer_keys.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "security/fetch.h"
#include "security/jwt.h"

namespace muster::coordinator {

absl::StatusOr<std::string> IssuerKeys::Get(const std::string& url) {
  MutexLock lock(&mutex_);
  if (url_ != url) {
    url_ = url;
    keys_.clear();
    last_ = absl::UnavailableError("they are being fetched");
    loop_.Post([this, round = ++round_] { FetchAndAgain(round); });
  }
  if (!keys_.empty()) return keys_;
  return absl::UnavailableError(
      absl::StrCat("there are no keys of ", url_, " yet: ", last_.message()));
}

void IssuerKeys::Refresh() {
  MutexLock lock(&mutex_);
  if (url_.empty() || clock_.Monotonic() - fetched_ < intervals_.retry) return;
  fetched_ = clock_.Monotonic();
  loop_.Post([this, round = ++round_] { FetchAndAgain(round); });
}

void IssuerKeys::FetchAndAgain(uint64_t round) {
  {
    MutexLock lock(&mutex_);
    if (round != round_) return;
  }
  FetchNow();
  MutexLock lock(&mutex_);
  if (round != round_) return;
  loop_.PostAfter(last_.ok() ? intervals_.refresh : intervals_.retry,
                  [this, round] { FetchAndAgain(round); });
}

void IssuerKeys::FetchNow() {
  std::string url;
  {
    MutexLock lock(&mutex_);
    url = url_;
    fetched_ = clock_.Monotonic();
  }
  absl::StatusOr<std::string> keys = security::Fetch(url, kKeysPatience);
  if (keys.ok()) {
    security::Issuer issuer;
    issuer.jwks = url;
    const auto sound = security::JwtVerifier::Make(issuer, *keys);
    if (!sound.ok()) keys = sound.status();
  }
  if (!keys.ok()) {
    log_.Error("the keys of the issuer of identity tokens cannot be fetched; those before count",
               {{"url", url}, {"error", keys.status().ToString()}});
  }
  MutexLock lock(&mutex_);
  if (url != url_) return;
  last_ = keys.status();
  if (keys.ok()) keys_ = *std::move(keys);
}

}  // namespace muster::coordinator
