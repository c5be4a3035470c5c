// Which workers fell silent together with most of their zone, block or rack.
#ifndef MUSTER_COORDINATOR_CORE_DOMAIN_SILENCE_H_
#define MUSTER_COORDINATOR_CORE_DOMAIN_SILENCE_H_

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/core/workers.h"
#include "coordinator/scheduler/topology.h"

namespace muster::coordinator {

// The workers of a zone, a block or a rack share a network: when it fails they fall silent at once.
// An index of all workers that are not lost, so that a question costs O(log workers) also while
// thousands are silent. Thread: the core's.
class DomainSilence {
 public:
  // So many that fall silent together speak for their network. Two may well die of one cause, or by
  // chance.
  static constexpr int kTogetherMin = 3;

  // Workers fall silent together when their last messages are no further apart than `together`.
  explicit DomainSilence(absl::Duration together) : together_(together) {}

  // To be called after every change of the worker's state or labels.
  void Note(const WorkerEntry& worker, const TopologyRules& topology, absl::Time now);

  // Why the silence of this worker speaks for a network that has failed: most workers of a domain
  // of it, and at least kTogetherMin, fell silent together with it, and still are or were so less
  // than `grace` ago, since they return one by one. Empty: nothing says so, or it is not silent.
  std::string WhyKept(const WorkerId& id, absl::Time now, absl::Duration grace) const;

  // Adds what differs from the table; for tests and the simulator.
  void Check(const WorkerTable& workers, std::vector<std::string>& broken) const;

 private:
  static constexpr size_t kLevels = 3;  // of kDomainLevels, from the broadest
  // By the first of their last messages.
  struct Group {
    int silent = 0;                                // workers of it that still are
    absl::Time most_until = absl::InfinitePast();  // when it was the most of its domain last
  };
  struct Domain {
    int workers = 0;  // that are not lost
    std::map<absl::Time, Group> groups;
  };
  using Key = std::pair<size_t, DomainPath>;  // the level, and the names down to it
  struct Known {
    DomainPath path;
    bool silent = false;
    std::array<absl::Time, kLevels> group = {};  // of the domain of each level, if it is silent
  };

  static bool IsMost(const Domain& domain, const Group& group);
  static std::optional<Key> KeyOf(const DomainPath& path, size_t level);
  // Remembers which group of the domain is the most of it until now.
  static void Remember(Domain& domain, absl::Time now);
  void Add(Known& known, absl::Time last_heard, absl::Time now);
  void Drop(const Known& known, absl::Time now);

  const absl::Duration together_;
  std::map<Key, Domain> domains_;
  std::map<WorkerId, Known> workers_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DOMAIN_SILENCE_H_
