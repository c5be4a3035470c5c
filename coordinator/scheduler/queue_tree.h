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
    PerDevice<int64_t> guaranteed = {};
    PerDevice<std::optional<int64_t>> limit;  // guaranteed and what it may borrow
    std::optional<int64_t> running_jobs_max;
    PerDevice<std::optional<int64_t>> tenant_limit;
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
  absl::Duration half_life() const { return half_life_; }
  absl::Duration passed_over_max() const { return passed_over_max_; }

  // Why a job of this many ranks can never run, or wait, in the queue: kNotFound names the queues
  // that there are, kInvalidArgument the quota. The message begins with the field of the spec.
  absl::Status CheckJob(const std::string& queue, v1::DeviceKind device, int64_t ranks) const;

 private:
  std::vector<Queue> queues_;
  std::map<std::string, int> by_name_;
  std::vector<std::vector<int>> paths_;
  absl::Duration half_life_ = absl::Hours(24 * 7);
  absl::Duration passed_over_max_ = absl::Minutes(10);
};

constexpr int kQueuesMax = 1024;
constexpr int kQueueDepthMax = 16;

// The kinds of devices as policies name them: "cpu", "cuda". UNSPECIFIED for any other text.
v1::DeviceKind DeviceNamed(const std::string& name);

// What jobs use of every queue of a tree, in it and below it.
class QueueUse {
 public:
  struct Of {
    PerDevice<int64_t> devices = {};
    int64_t jobs = 0;
    std::map<std::string, PerDevice<int64_t>> tenants;

    friend bool operator==(const Of&, const Of&) = default;
  };

  explicit QueueUse(const QueueTree& tree) : by_queue_(tree.queues().size()) {}

  // Adds a job, or takes one away (sign -1). Requires: kNone or a queue of `tree`.
  void Count(const QueueTree& tree, int queue, v1::DeviceKind device, int64_t ranks,
             const std::string& tenant, int sign);
  const Of& at(int queue) const { return by_queue_[static_cast<size_t>(queue)]; }
  int64_t TenantDevices(int queue, const std::string& tenant, v1::DeviceKind device) const;

  friend bool operator==(const QueueUse&, const QueueUse&) = default;

 private:
  std::vector<Of> by_queue_;
};

// What queues used in the past: device-seconds that count half as much after half_life.
class QueueHistory {
 public:
  // Adds what was used since the last call.
  void Advance(const QueueTree& tree, const QueueUse& use, absl::Time now);
  // Devices that the queue has used on average, younger times counting more.
  double Average(const QueueTree& tree, int queue, v1::DeviceKind device) const;

  // By queue name, as stored. Restore before the first Advance.
  std::map<std::string, v1::QueueUsage> ToProto(const QueueTree& tree) const;
  void Restore(const std::string& queue, const v1::QueueUsage& usage);

 private:
  // By name, so that it outlives changes of the tree.
  std::map<std::string, PerDevice<double>> device_seconds_;
  std::optional<absl::Time> as_of_;
};

// The first limit that a job would break, if it started.
struct QueueLimit {
  enum class Kind { kDevices, kJobs, kTenant } kind = Kind::kDevices;
  int queue = QueueTree::kNone;
  int64_t limit = 0;
  int64_t used = 0;
};
std::optional<QueueLimit> FindLimit(const QueueTree& tree, const QueueUse& use, int queue,
                                    v1::DeviceKind device, int64_t ranks,
                                    const std::string& tenant);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_QUEUE_TREE_H_
