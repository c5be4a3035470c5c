// The bootstrap keys of live attempts: written once each, durable, gone with their epoch; and who
// waits for one. Fencing is the caller's: it only asks for live epochs.
#ifndef MUSTER_COORDINATOR_CORE_KEY_VALUE_H_
#define MUSTER_COORDINATOR_CORE_KEY_VALUE_H_

#include <map>
#include <set>
#include <string>
#include <utility>

#include "coordinator/core/core.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/turn.h"

namespace muster::coordinator {

// Bounds: k...PerEpochMax.
class KeyValue {
 public:
  // Answers the put, and everyone who waits for the key.
  void Put(SessionId session, const v1::KeyValuePut& put, Turn& turn);
  // Answers now when the key exists, else when it does or when the epoch ends.
  void Get(SessionId session, const v1::KeyValueGet& get, Turn& turn);
  // The epoch is over: its keys are deleted, who waits is told kAborted.
  void Drop(const JobId& job, Epoch epoch, Turn& turn);
  // Nobody is left to be answered there.
  void DropSession(SessionId session);
  void Recover(const schema::KeyValueKey& key, std::string value);

  size_t waiters() const;
  // Epochs that have keys or waiters.
  std::set<std::pair<JobId, Epoch>> Epochs() const;
  static void Reply(SessionId session, uint64_t request, const absl::Status& status,
                    const std::string& value, Turn& turn);

 private:
  using Waiter = std::pair<SessionId, uint64_t>;  // session, request
  struct Space {
    std::map<std::string, std::string> values;
    size_t bytes = 0;
    std::map<std::string, std::set<Waiter>> waiters;
    size_t waiter_count = 0;
  };

  std::map<std::pair<JobId, Epoch>, Space> spaces_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_KEY_VALUE_H_
