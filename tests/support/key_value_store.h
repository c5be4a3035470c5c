#ifndef MUSTER_TESTS_SUPPORT_KEY_VALUE_STORE_H_
#define MUSTER_TESTS_SUPPORT_KEY_VALUE_STORE_H_

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "parallel/comm/communicator.h"

namespace muster::testing {

// The bootstrap keys of ranks that are threads of one process.
class MemoryKeyValueStore : public parallel::KeyValueStore {
 public:
  absl::Status Put(const std::string& key, const std::string& value) override {
    MutexLock lock(&mutex_);
    values_[key] = value;
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    MutexLock lock(&mutex_);
    auto known = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return values_.contains(key); };
    if (!mutex_.AwaitWithTimeout(Condition(&known), timeout)) {
      return absl::DeadlineExceededError(key);
    }
    return values_[key];
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_KEY_VALUE_STORE_H_
