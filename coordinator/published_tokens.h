// Bearer tokens for the RPC services, which must not wait for the core to know who calls.
#ifndef MUSTER_COORDINATOR_PUBLISHED_TOKENS_H_
#define MUSTER_COORDINATOR_PUBLISHED_TOKENS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// Thread-safe. Bound: the tokens that the core keeps.
class PublishedTokens {
 public:
  void Put(const v1::TokenRow& row) {
    MutexLock lock(&mutex_);
    rows_[row.token().id()] = row;
  }
  void Remove(const std::string& id) {
    MutexLock lock(&mutex_);
    rows_.erase(id);
  }
  std::optional<v1::TokenRow> Find(const std::string& id) const {
    MutexLock lock(&mutex_);
    const auto row = rows_.find(id);
    return row == rows_.end() ? std::nullopt : std::make_optional(row->second);
  }
  // By id.
  std::vector<v1::Token> List() const {
    MutexLock lock(&mutex_);
    std::vector<v1::Token> out;
    for (const auto& [id, row] : rows_) out.push_back(row.token());
    return out;
  }

 private:
  mutable Mutex mutex_;
  std::map<std::string, v1::TokenRow> rows_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_PUBLISHED_TOKENS_H_
