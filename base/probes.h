// What a service says about itself to those who start and stop it: /livez, /readyz and /startupz,
// as Kubernetes asks for them, on the port of its metrics.
//
//   /startupz  200 once it has rebuilt its state and listens
//   /readyz    200 while it serves
//   /livez     200 while its event loop turns: a slow disk or an absent peer does not fail it, so
//              that a restart is asked for only where one helps
// Otherwise 503. The body says in one line why.
#ifndef MUSTER_BASE_PROBES_H_
#define MUSTER_BASE_PROBES_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "base/mutex.h"

namespace muster {

// Thread-safe.
class Probes {
 public:
  // An event loop that has not turned for longer is stuck.
  static constexpr absl::Duration kSilenceMax = absl::Seconds(30);

  // `clock` outlives this object.
  explicit Probes(const Clock& clock) : clock_(clock) {}

  // The loop runs and has just turned; to be called on it every second or so.
  void Turned();
  void Started();
  void Ready();
  // `why` is for people: "the coordinator is stopping".
  void NotReady(const std::string& why);

  // This object must outlive the server that has them.
  metrics::Pages Pages();

 private:
  metrics::PageReply Live() const;
  metrics::PageReply Reply(const std::string& trouble) const;

  const Clock& clock_;
  mutable Mutex mutex_;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration turned_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteDuration();  // before the first
  std::string trouble_ ABSL_GUARDED_BY(mutex_) = "starting";                  // empty: ready
};

}  // namespace muster

#endif  // MUSTER_BASE_PROBES_H_
