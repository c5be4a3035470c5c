// The queues of a cluster as a tree, what each may use, and what it uses.
#ifndef MUSTER_COORDINATOR_SCHEDULER_QUEUE_TREE_H_
#define MUSTER_COORDINATOR_SCHEDULER_QUEUE_TREE_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/queue.pb.h"
#include "proto/spec/share.h"

namespace muster::coordinator {

// By kind of device.
template <typename Value>
using PerDevice = std::array<Value, v1::DeviceKind_ARRAYSIZE>;

// Value type; never changes.
class QueueTree {
 public:
  static constexpr int kNone = -1;

  struct Queue {
    std::string name;
    int parent = kNone;
    bool leaf = true;  // no queue is below it: jobs wait here
    double weight = 1;
    double weight_part = 1;  // its weight as a part of that of the queues beside it and its own
    PerDevice<int64_t> guaranteed = {};
    PerDevice<std::optional<int64_t>> limit;  // guaranteed and what it may borrow
    std::optional<int64_t> running_jobs_max;
    PerDevice<std::optional<int64_t>> tenant_limit;
  };
  // Devices that are kept free in every domain of the level (SparePolicy).
  struct Spares {
    v1::TopologyLevel level = v1::TOPOLOGY_LEVEL_UNSPECIFIED;
    PerDevice<int64_t> devices = {};
  };

  // Only the queue "default", without quota.
  QueueTree();
  // kInvalidArgument: one line per broken rule, "queues[2].parent: why".
  static absl::StatusOr<QueueTree> Make(const v1::QueuePolicy& policy);

  // A queue comes behind the one above it.
  const std::vector<Queue>& queues() const { return queues_; }
  const Queue& at(int queue) const { return queues_[static_cast<size_t>(queue)]; }
  // kNone when there is no such queue.
  int Find(const std::string& name) const;
  // From the topmost queue down to this one.
  const std::vector<int>& Path(int queue) const { return paths_[static_cast<size_t>(queue)]; }
  // The queues right below this one; with kNone the topmost ones.
  const std::vector<int>& Below(int queue) const { return below_[static_cast<size_t>(queue + 1)]; }
  absl::Duration half_life() const { return half_life_; }
  absl::Duration passed_over_max() const { return passed_over_max_; }
  absl::Duration turn_after() const { return turn_after_; }
  // The narrowest level first.
  const std::vector<Spares>& spares() const { return spares_; }
  // ReputationPolicy.
  absl::Duration fault_half_life() const { return fault_half_life_; }
  double avoid_above() const { return avoid_above_; }

  // Why a job of this many ranks can never run, or wait, in the queue: kNotFound names the queues
  // that there are, kInvalidArgument the quota. The message begins with the field of the spec.
  // `share`: thousandths that each rank takes of its device.
  absl::Status CheckJob(const std::string& queue, v1::DeviceKind device, int64_t ranks,
                        int32_t share = spec::kWholeDevice) const;

 private:
  // Once all queues are known.
  void SortBelow();

  std::vector<Queue> queues_;
  std::map<std::string, int> by_name_;
  std::vector<std::vector<int>> paths_;
  std::vector<std::vector<int>> below_;  // by queue + 1
  absl::Duration half_life_ = absl::Hours(24 * 7);
  absl::Duration passed_over_max_ = absl::Minutes(10);
  absl::Duration turn_after_ = absl::Hours(24);
  std::vector<Spares> spares_;
  absl::Duration fault_half_life_ = absl::Hours(24 * 7);
  double avoid_above_ = 2;
};

constexpr int kQueuesMax = 1024;
constexpr int kQueueDepthMax = 16;
constexpr int kSparePoliciesMax = 16;

// The kinds of devices as policies name them: "cpu", "cuda". UNSPECIFIED for any other text.
v1::DeviceKind DeviceNamed(const std::string& name);

// What jobs use of every queue of a tree, in it and below it.
class QueueUse {
 public:
  struct Of {
    PerDevice<int64_t> thousandths = {};  // of devices: shared ones count by their shares
    int64_t jobs = 0;
    std::map<std::string, PerDevice<int64_t>> tenants;

    friend bool operator==(const Of&, const Of&) = default;
  };

  explicit QueueUse(const QueueTree& tree) : by_queue_(tree.queues().size()) {}

  // Adds a job, or takes one away (sign -1), whose ranks take `share` thousandths of a device each.
  // Requires: kNone or a queue of `tree`.
  void Count(const QueueTree& tree, int queue, v1::DeviceKind device, int64_t ranks,
             const std::string& tenant, int sign, int32_t share = spec::kWholeDevice);
  const Of& at(int queue) const { return by_queue_[static_cast<size_t>(queue)]; }
  int64_t TenantThousandths(int queue, const std::string& tenant, v1::DeviceKind device) const;

  friend bool operator==(const QueueUse&, const QueueUse&) = default;

 private:
  std::vector<Of> by_queue_;
};

// What queues used in the past: device-seconds that count half as much after half_life. They are
// added up whenever a queue begins to use another number of devices; between two such times nothing
// changes, so that what is stored then says all.
class QueueHistory {
 public:
  // Adds what the queue used since the last call. To be called before what it uses changes.
  void Accrue(const QueueTree& tree, const QueueUse& use, int queue, absl::Time now);
  // A queue that has no history yet has one from now on.
  void Begin(const std::string& queue, absl::Time now);
  void Forget(const std::string& queue) { queues_.erase(queue); }
  // A job started that was the first of its queue.
  void TookTurn(const std::string& queue, absl::Time now);
  // When that was last; InfinitePast: never.
  absl::Time LastTurn(const std::string& queue) const;
  // Devices that the queue has used on average up to `now`, younger times counting more. `use`:
  // what it has used since the last Accrue.
  double Average(const QueueTree& tree, const QueueUse& use, int queue, v1::DeviceKind device,
                 absl::Time now) const;

  // As stored. No value: it has no history.
  std::optional<v1::QueueUsage> Stored(const std::string& queue) const;
  void Restore(const std::string& queue, const v1::QueueUsage& usage);

 private:
  struct Past {
    PerDevice<double> device_seconds = {};  // decayed up to as_of
    std::optional<absl::Time> as_of;
    absl::Time last_turn = absl::InfinitePast();
  };
  static double UpTo(const QueueTree& tree, const Past& past, int64_t thousandths, size_t kind,
                     absl::Time now);

  std::map<std::string, Past> queues_;  // by name
};

// The part of what a queue uses that is beyond its fair share, from 0 (none) to below 1: of it, or
// of a queue above it where that is more. Its fair share of `total` devices is, by weight, its part
// of what the queue above it should have, the topmost ones of all devices; and at least what is
// guaranteed to it. What it uses is the mean of `use`, that of now, and of its average in the past
// (`past`: what it has used since the last Accrue). O(depth of the tree).
double DebtOf(const QueueTree& tree, const QueueUse& use, const QueueHistory& history,
              const QueueUse& past, int queue, v1::DeviceKind device, int64_t total,
              absl::Time now);

// The first limit that a job would break, if it started.
struct QueueLimit {
  enum class Kind { kDevices, kJobs, kTenant } kind = Kind::kDevices;
  int queue = QueueTree::kNone;
  int64_t limit = 0;
  int64_t used = 0;         // devices, rounded up, or jobs
  int64_t thousandths = 0;  // of devices
};
std::optional<QueueLimit> FindLimit(const QueueTree& tree, const QueueUse& use, int queue,
                                    v1::DeviceKind device, int64_t ranks, const std::string& tenant,
                                    int32_t share = spec::kWholeDevice);
// Devices that so many thousandths are, rounded up.
constexpr int64_t DevicesOf(int64_t thousandths) {
  return (thousandths + spec::kWholeDevice - 1) / spec::kWholeDevice;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_QUEUE_TREE_H_
