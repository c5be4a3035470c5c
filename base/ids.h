// Strong id types: a JobId is not a WorkerId even though both are text.
#ifndef MUSTER_BASE_IDS_H_
#define MUSTER_BASE_IDS_H_

#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>

namespace muster {

// A value type that only compares with, and is only made from, its own tag. `Value` is std::string
// or an integer.
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
  template <typename H>
  friend H AbslHashValue(H h, const StrongId& id) {
    return H::combine(std::move(h), id.value_);
  }

 private:
  Value value_{};
};

// Unique in a cluster for ever, e.g. "gpt-kjv-x7k2p": the name plus five random letters.
using JobId = StrongId<struct JobIdTag, std::string>;
// A worker's configured name; stable across restarts of its daemon.
using WorkerId = StrongId<struct WorkerIdTag, std::string>;
// Per job; grows with every attempt and is durable before any message of the attempt leaves. 0 =
// none.
using Epoch = StrongId<struct EpochTag, uint64_t>;
// New for every start of a daemon process.
using Incarnation = StrongId<struct IncarnationTag, uint64_t>;

}  // namespace muster

#endif  // MUSTER_BASE_IDS_H_
