// Strong id types: a JobId is not a WorkerId even though both are text.
#ifndef MUSTER_BASE_IDS_H_
#define MUSTER_BASE_IDS_H_

#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>

namespace muster {

// A value type that compares only with ids of the same Tag. `Value` is std::string or an integer.
template <typename Tag, typename Value>
class StrongId {
 public:
  StrongId() = default;
  explicit StrongId(Value value) : value_(std::move(value)) {}

  const Value& value() const { return value_; }

  friend auto operator<=>(const StrongId&, const StrongId&) = default;
  friend bool operator==(const StrongId&, const StrongId&) = default;
  friend std::ostream& operator<<(std::ostream& out, const StrongId& id) {
    return out << id.value_;
  }

 private:
  Value value_{};
};

// Unique in a cluster for ever, e.g. "gpt-kjv-x7k2p": the name plus five random letters.
using JobId = StrongId<struct JobIdTag, std::string>;
// A worker's configured name; stable across restarts of its daemon.
using WorkerId = StrongId<struct WorkerIdTag, std::string>;
// Numbers the attempts of a job: 1, 2, 3, ...; 0 = none. Durable before any message of the attempt
// leaves.
using Epoch = StrongId<struct EpochTag, uint64_t>;
// Of a daemon process; a restarted daemon has a larger one.
using Incarnation = StrongId<struct IncarnationTag, uint64_t>;

}  // namespace muster

#endif  // MUSTER_BASE_IDS_H_
