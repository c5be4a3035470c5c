// The public keys that an issuer of identity tokens serves, fetched on a thread of its own.
#ifndef MUSTER_COORDINATOR_RPC_ISSUER_KEYS_H_
#define MUSTER_COORDINATOR_RPC_ISSUER_KEYS_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

// Thread-safe. What was fetched last counts until something better was; after a failure it is tried
// again every `retry`, else every `refresh`.
class IssuerKeys {
 public:
  struct Intervals {
    absl::Duration refresh = kKeysRefresh;
    absl::Duration retry = kKeysRetry;  // also between two calls of Refresh that do something
  };
  // `clock` and `log` outlive it.
  IssuerKeys(const Clock& clock, Logger& log, const Intervals& intervals)
      : clock_(clock), log_(log), intervals_(intervals), loop_(clock) {}
  ~IssuerKeys() { loop_.Stop(); }

  // The key set of `url`, whose keys JwtVerifier takes. The first call begins to fetch it, and of
  // another URL forgets the former's. kUnavailable: there is none yet, and why.
  absl::StatusOr<std::string> Get(const std::string& url);
  // A token names a key that the set lacks: it is fetched again, unless that was done just now.
  void Refresh();

 private:
  void FetchAndAgain(uint64_t round);
  void FetchNow();

  const Clock& clock_;
  Logger& log_;
  const Intervals intervals_;
  Mutex mutex_;
  std::string url_ ABSL_GUARDED_BY(mutex_);
  std::string keys_ ABSL_GUARDED_BY(mutex_);  // empty: none yet
  absl::Status last_ ABSL_GUARDED_BY(mutex_);
  absl::Duration fetched_ ABSL_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;  // of timers: those of an older one do nothing
  ThreadLoop loop_;                             // last: its work uses the rest
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_ISSUER_KEYS_H_
