// The open streams of worker daemons.
#ifndef MUSTER_COORDINATOR_SESSIONS_H_
#define MUSTER_COORDINATOR_SESSIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"

namespace muster::coordinator {

// One daemon's stream. Any thread may call it; calls do not block and never call back.
class SessionStream {
 public:
  virtual ~SessionStream() = default;
  virtual void Send(v1::FromCoordinator message) = 0;
  // Ends the stream after what was sent before. Later calls do nothing.
  virtual void Close(const absl::Status& status) = 0;
};

// Thread-safe. Bound: kSessionsMax.
class Sessions {
 public:
  // What every message says of its sender.
  struct Leader {
    std::string cluster_id;
    std::string history_id;
    uint64_t term = 0;
  };
  // `metrics` outlives this.
  Sessions(Leader leader, Metrics& metrics) : leader_(std::move(leader)), metrics_(metrics) {}

  // Keeps `stream` until Remove. The status given to Refuse, or kResourceExhausted.
  absl::StatusOr<SessionId> Add(std::shared_ptr<SessionStream> stream);
  // False: it was removed before.
  bool Remove(SessionId session);

  // False, and nothing is sent: there is no such session.
  bool Send(SessionId session, v1::FromCoordinator message);
  void Close(SessionId session, const absl::Status& status);

  // From now on every new session is refused with `status`.
  void Refuse(const absl::Status& status);
  void CloseAll(const absl::Status& status);

 private:
  std::shared_ptr<SessionStream> Find(SessionId session);

  const Leader leader_;
  Metrics& metrics_;
  Mutex mutex_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<SessionId, std::shared_ptr<SessionStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SESSIONS_H_
