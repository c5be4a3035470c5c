// The bootstrap keys of live attempts and the gets that wait for one. A key is written once, is
// durable, and is deleted with its epoch or membership. The caller fences: it passes only those of
// live epochs and current memberships, so that the keys of an epoch are of one membership.
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

// Bounds: kKeysPerEpochMax, kKeyValueBytesPerEpochMax, kWaitersPerEpochMax.
class KeyValue {
 public:
  // Answers the put and every get that waits for the key.
  void Put(SessionId session, const v1::KeyValuePut& put, Turn& turn);
  // Answers at once when the key exists, else when it is put or dropped.
  void Get(SessionId session, const v1::KeyValueGet& get, Turn& turn);
  // The epoch, or its membership, is over: deletes its keys and answers the gets that wait with
  // `over`.
  void Drop(const JobId& job, Epoch epoch, const absl::Status& over, Turn& turn);
  // The session is closed: its gets are dropped.
  void DropSession(SessionId session);
  void Recover(const schema::KeyValueKey& key, std::string value);

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
