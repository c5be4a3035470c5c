#include "coordinator/scheduler/queue_tree.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr int64_t kDevicesMax = 1'000'000'000;  // of a quota
constexpr double kWeightMax = 1e6;
constexpr double kAvoidAboveMax = 1e6;
constexpr size_t kProblemsMax = 100;
constexpr size_t kNamedMax = 16;  // queues that a message names
constexpr char kDefaultQueue[] = "default";

// 1-63 characters of [a-z0-9-], starting with a letter, not ending with '-'.
bool IsQueueName(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  };
  return !name.empty() && name.size() <= 63 && name[0] >= 'a' && name[0] <= 'z' &&
         name.back() != '-' && std::all_of(name.begin(), name.end(), allowed);
}

class Problems {
 public:
  template <typename... Parts>
  void Add(const std::string& field, const Parts&... why) {
    if (lines_.size() < kProblemsMax) lines_.push_back(absl::StrCat(field, ": ", why...));
  }
  absl::Status status() const {
    if (lines_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrJoin(lines_, "\n"));
  }

 private:
  std::vector<std::string> lines_;
};

// Reads a map of kind to number.
template <typename Value>
void ReadDevices(const google::protobuf::Map<std::string, int64_t>& given, const std::string& field,
                 PerDevice<Value>& out, Problems& problems) {
  for (const auto& [name, devices] : std::map<std::string, int64_t>(given.begin(), given.end())) {
    const v1::DeviceKind kind = DeviceNamed(name);
    if (kind == v1::DEVICE_KIND_UNSPECIFIED) {
      problems.Add(field, "there are no devices of kind ", spec::Quoted(name), "; cpu or cuda");
    } else if (devices < 0 || devices > kDevicesMax) {
      problems.Add(absl::StrCat(field, ".", name), devices, " is out of range; 0 to ", kDevicesMax);
    } else {
      out[static_cast<size_t>(kind)] = devices;
    }
  }
}

// `given`, or `standard` where it is absent.
absl::Duration ReadDuration(bool has, const google::protobuf::Duration& given,
                            const std::string& field, absl::Duration least, absl::Duration most,
                            absl::Duration standard, Problems& problems) {
  if (!has) return standard;
  constexpr int64_t kSecondsMax = int64_t{366} * 86'400;
  const absl::Duration value =
      std::abs(given.seconds()) > kSecondsMax ? absl::InfiniteDuration() : FromProto(given);
  if (given.seconds() < 0 || given.nanos() < 0 || given.nanos() > 999'999'999 || value < least ||
      value > most) {
    problems.Add(field, absl::FormatDuration(value), " is out of range; ",
                 absl::FormatDuration(least), " to ", absl::FormatDuration(most));
    return standard;
  }
  return value;
}

// The narrowest level first.
std::vector<QueueTree::Spares> ReadSpares(const v1::QueuePolicy& policy, Problems& problems) {
  using Spares = QueueTree::Spares;
  std::vector<Spares> all;
  if (policy.spares_size() > kSparePoliciesMax) {
    problems.Add("spares", policy.spares_size(), " of at most ", kSparePoliciesMax);
    return all;
  }
  for (int i = 0; i < policy.spares_size(); ++i) {
    const v1::SparePolicy& given = policy.spares(i);
    const std::string field = absl::StrCat("spares[", i, "]");
    Spares spares{given.level(), {}};
    if (given.level() == v1::TOPOLOGY_LEVEL_HOST) {
      problems.Add(
          field + ".level",
          "spares of a host are lost with it; nvlink_domain, rack, block, zone or cluster");
    } else if (!v1::TopologyLevel_IsValid(given.level()) ||
               given.level() == v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
      problems.Add(field + ".level", "required; nvlink_domain, rack, block, zone or cluster");
    } else if (std::any_of(all.begin(), all.end(),
                           [&](const Spares& other) { return other.level == given.level(); })) {
      problems.Add(field + ".level", "there are two of level ", spec::EnumName(given.level()),
                   "; add their devices up in one");
    }
    ReadDevices(given.devices(), field + ".devices", spares.devices, problems);
    if (given.devices().empty()) {
      problems.Add(field + ".devices", "required: how many of each kind, such as {cuda: 8}");
    }
    all.push_back(spares);
  }
  // Narrow levels have small numbers.
  std::stable_sort(all.begin(), all.end(),
                   [](const Spares& a, const Spares& b) { return a.level < b.level; });
  return all;
}

}  // namespace

v1::DeviceKind DeviceNamed(const std::string& name) {
  if (name == "cpu") return v1::DEVICE_KIND_CPU;
  if (name == "cuda") return v1::DEVICE_KIND_CUDA;
  return v1::DEVICE_KIND_UNSPECIFIED;
}

QueueTree::QueueTree() {
  queues_.emplace_back().name = kDefaultQueue;
  by_name_.emplace(kDefaultQueue, 0);
  paths_.push_back({0});
  SortBelow();
}

void QueueTree::SortBelow() {
  below_.assign(queues_.size() + 1, {});
  for (size_t queue = 0; queue < queues_.size(); ++queue) {
    below_[static_cast<size_t>(queues_[queue].parent + 1)].push_back(static_cast<int>(queue));
  }
  for (const std::vector<int>& beside : below_) {
    double weights = 0;
    for (const int queue : beside) weights += at(queue).weight;
    for (const int queue : beside) {
      queues_[static_cast<size_t>(queue)].weight_part = at(queue).weight / weights;
    }
  }
}

absl::StatusOr<QueueTree> QueueTree::Make(const v1::QueuePolicy& policy) {
  Problems problems;
  QueueTree tree;
  tree.half_life_ =
      ReadDuration(policy.has_half_life(), policy.half_life(), "half_life", absl::Minutes(1),
                   absl::Hours(24 * 365), tree.half_life_, problems);
  tree.passed_over_max_ =
      ReadDuration(policy.has_passed_over_max(), policy.passed_over_max(), "passed_over_max",
                   absl::ZeroDuration(), absl::Hours(24 * 365), tree.passed_over_max_, problems);
  tree.turn_after_ =
      ReadDuration(policy.has_turn_after(), policy.turn_after(), "turn_after", absl::Minutes(1),
                   absl::Hours(24 * 365), tree.turn_after_, problems);
  tree.spares_ = ReadSpares(policy, problems);
  tree.fault_half_life_ = ReadDuration(
      policy.reputation().has_half_life(), policy.reputation().half_life(), "reputation.half_life",
      absl::Minutes(1), absl::Hours(24 * 365), tree.fault_half_life_, problems);
  if (policy.reputation().has_avoid_above()) tree.avoid_above_ = policy.reputation().avoid_above();
  if (!(tree.avoid_above_ > 0) || tree.avoid_above_ > kAvoidAboveMax) {
    problems.Add("reputation.avoid_above", tree.avoid_above_, " is out of range; above 0, at most ",
                 kAvoidAboveMax);
  }
  if (policy.queues_size() > kQueuesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("queues: ", policy.queues_size(), " of at most ", kQueuesMax));
  }
  // By name: where each is in the policy.
  std::map<std::string, int> given;
  for (int i = 0; i < policy.queues_size(); ++i) {
    const v1::QueueSpec& spec = policy.queues(i);
    const std::string field = absl::StrCat("queues[", i, "]");
    if (!IsQueueName(spec.name())) {
      problems.Add(
          field + ".name", spec::Quoted(spec.name()),
          " is not a queue name: 1-63 characters of [a-z0-9-], starting with a letter, not "
          "ending with '-'");
    } else if (!given.emplace(spec.name(), i).second) {
      problems.Add(field + ".name", "there are two queues ", spec::Quoted(spec.name()));
    }
  }
  for (int i = 0; i < policy.queues_size(); ++i) {
    const v1::QueueSpec& spec = policy.queues(i);
    if (!spec.parent().empty() && !given.contains(spec.parent())) {
      problems.Add(absl::StrCat("queues[", i, "].parent"), "there is no queue ",
                   spec::Quoted(spec.parent()), "; define it, or leave the parent out");
    }
  }
  // Every queue behind the one above it; what is left when no more can be placed is in a cycle.
  tree.queues_.clear();
  tree.by_name_.clear();
  tree.paths_.clear();
  std::vector<int> pending;
  for (const auto& [name, i] : given) pending.push_back(i);
  std::sort(pending.begin(), pending.end());
  for (bool moved = true; moved && !pending.empty();) {
    moved = false;
    std::vector<int> left;
    for (const int i : pending) {
      const v1::QueueSpec& spec = policy.queues(i);
      const auto parent = tree.by_name_.find(spec.parent());
      if (!spec.parent().empty() && parent == tree.by_name_.end()) {
        left.push_back(i);
        continue;
      }
      moved = true;
      const std::string field = absl::StrCat("queues[", i, "]");
      const int index = static_cast<int>(tree.queues_.size());
      Queue& queue = tree.queues_.emplace_back();
      queue.name = spec.name();
      std::vector<int> path;
      if (!spec.parent().empty()) {
        queue.parent = parent->second;
        path = tree.paths_[static_cast<size_t>(queue.parent)];
        tree.queues_[static_cast<size_t>(queue.parent)].leaf = false;
      }
      path.push_back(index);
      if (path.size() > static_cast<size_t>(kQueueDepthMax)) {
        problems.Add(field + ".parent", "more than ", kQueueDepthMax, " queues above each other");
      }
      tree.paths_.push_back(std::move(path));
      tree.by_name_.emplace(spec.name(), index);
      if (spec.has_weight()) queue.weight = spec.weight();
      if (!(queue.weight > 0) || queue.weight > kWeightMax) {
        problems.Add(field + ".weight", queue.weight, " is out of range; above 0, at most ",
                     kWeightMax);
        queue.weight = 1;
      }
      if (spec.has_running_jobs_max()) {
        queue.running_jobs_max = spec.running_jobs_max();
        if (spec.running_jobs_max() < 0) {
          problems.Add(field + ".running_jobs_max", spec.running_jobs_max(), " is below 0");
        }
      }
      ReadDevices(spec.guaranteed(), field + ".guaranteed", queue.guaranteed, problems);
      PerDevice<std::optional<int64_t>> borrowing;
      ReadDevices(spec.borrowing_limit(), field + ".borrowing_limit", borrowing, problems);
      ReadDevices(spec.tenant_limit(), field + ".tenant_limit", queue.tenant_limit, problems);
      for (size_t kind = 0; kind < borrowing.size(); ++kind) {
        if (borrowing[kind].has_value())
          queue.limit[kind] = queue.guaranteed[kind] + *borrowing[kind];
      }
    }
    pending = std::move(left);
  }
  for (const int i : pending) {
    if (!given.contains(policy.queues(i).parent())) continue;  // reported above
    problems.Add(absl::StrCat("queues[", i, "].parent"), "queue ",
                 spec::Quoted(policy.queues(i).name()), " is below ",
                 spec::Quoted(policy.queues(i).parent()),
                 ", and that below it: let one of the cycle have no parent");
  }
  // What is guaranteed below a queue is part of what it has itself.
  std::vector<PerDevice<int64_t>> below(tree.queues_.size());
  for (const Queue& queue : tree.queues_) {
    if (queue.parent == kNone) continue;
    for (size_t kind = 0; kind < queue.guaranteed.size(); ++kind) {
      below[static_cast<size_t>(queue.parent)][kind] += queue.guaranteed[kind];
    }
  }
  for (size_t q = 0; q < tree.queues_.size(); ++q) {
    const Queue& queue = tree.queues_[q];
    const int i = given[queue.name];
    for (size_t kind = 0; kind < queue.guaranteed.size(); ++kind) {
      if (below[q][kind] <= queue.guaranteed[kind]) continue;
      problems.Add(absl::StrCat("queues[", i, "].guaranteed.",
                                spec::EnumName(static_cast<v1::DeviceKind>(kind))),
                   "the queues below ", spec::Quoted(queue.name), " are guaranteed ",
                   below[q][kind], " together, more than its own ", queue.guaranteed[kind],
                   "; raise this one or lower theirs");
    }
  }
  if (!tree.by_name_.contains(kDefaultQueue)) {
    tree.by_name_.emplace(kDefaultQueue, static_cast<int>(tree.queues_.size()));
    tree.paths_.push_back({static_cast<int>(tree.queues_.size())});
    tree.queues_.emplace_back().name = kDefaultQueue;
  }
  if (const absl::Status status = problems.status(); !status.ok()) return status;
  tree.SortBelow();
  return tree;
}

int QueueTree::Find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? kNone : found->second;
}

absl::Status QueueTree::CheckJob(const std::string& queue, v1::DeviceKind device, int64_t ranks,
                                 int32_t share) const {
  const int found = Find(queue);
  if (found == kNone || !at(found).leaf) {
    std::vector<std::string> leaves;
    for (const Queue& other : queues_) {
      if (!other.leaf) continue;
      if (leaves.size() == kNamedMax) {
        leaves.push_back("...");
        break;
      }
      leaves.push_back(other.name);
    }
    const std::string there = absl::StrJoin(leaves, ", ");
    if (found == kNone) {
      return absl::NotFoundError(
          absl::StrCat("queue: there is no queue ", spec::Quoted(queue), "; there are ", there));
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "queue: ", spec::Quoted(queue), " has queues below it, in which jobs wait; of ", there));
  }
  const int64_t thousandths = ranks * share;
  const std::string asked =
      share == spec::kWholeDevice
          ? absl::StrCat(ranks, " ", spec::EnumName(device), " devices are")
          : absl::StrCat(ranks, " shares of ", static_cast<double>(share) / spec::kWholeDevice,
                         " of ", spec::EnumName(device), " devices are");
  for (const int above : Path(found)) {
    const std::optional<int64_t> limit = at(above).limit[static_cast<size_t>(device)];
    const std::optional<int64_t> tenant = at(above).tenant_limit[static_cast<size_t>(device)];
    if (limit.has_value() && thousandths > *limit * spec::kWholeDevice) {
      return absl::InvalidArgumentError(absl::StrCat(
          "resources.ranks: ", asked, " more than queue ", spec::Quoted(at(above).name),
          " may ever use, ", *limit,
          "; lower it, choose another queue or raise the queue's guaranteed or borrowing_limit"));
    }
    if (tenant.has_value() && thousandths > *tenant * spec::kWholeDevice) {
      return absl::InvalidArgumentError(
          absl::StrCat("resources.ranks: ", asked, " more than one tenant may use of queue ",
                       spec::Quoted(at(above).name), ", ", *tenant,
                       "; lower it, choose another queue or raise the queue's tenant_limit"));
    }
  }
  return absl::OkStatus();
}

// ---- use ----------------------------------------------------------------------------------------

void QueueUse::Count(const QueueTree& tree, int queue, v1::DeviceKind device, int64_t ranks,
                     const std::string& tenant, int sign, int32_t share) {
  if (queue == QueueTree::kNone) return;
  const int64_t thousandths = sign * ranks * share;
  const size_t kind = static_cast<size_t>(device);
  for (const int above : tree.Path(queue)) {
    Of& of = by_queue_[static_cast<size_t>(above)];
    of.thousandths[kind] += thousandths;
    of.jobs += sign;
    const auto known = of.tenants.try_emplace(tenant).first;
    known->second[kind] += thousandths;
    if (known->second == PerDevice<int64_t>{}) of.tenants.erase(known);
  }
}

int64_t QueueUse::TenantThousandths(int queue, const std::string& tenant,
                                    v1::DeviceKind device) const {
  const Of& of = at(queue);
  const auto known = of.tenants.find(tenant);
  return known == of.tenants.end() ? 0 : known->second[static_cast<size_t>(device)];
}

std::optional<QueueLimit> FindLimit(const QueueTree& tree, const QueueUse& use, int queue,
                                    v1::DeviceKind device, int64_t ranks, const std::string& tenant,
                                    int32_t share) {
  const size_t kind = static_cast<size_t>(device);
  const int64_t more = ranks * share;
  for (const int above : tree.Path(queue)) {
    const QueueTree::Queue& limits = tree.at(above);
    const QueueUse::Of& of = use.at(above);
    const int64_t used = of.thousandths[kind];
    if (limits.limit[kind].has_value() && used + more > *limits.limit[kind] * spec::kWholeDevice) {
      return QueueLimit{QueueLimit::Kind::kDevices, above, *limits.limit[kind], DevicesOf(used),
                        used};
    }
    if (limits.running_jobs_max.has_value() && of.jobs + 1 > *limits.running_jobs_max) {
      return QueueLimit{QueueLimit::Kind::kJobs, above, *limits.running_jobs_max, of.jobs, 0};
    }
    if (limits.tenant_limit[kind].has_value()) {
      const int64_t theirs = use.TenantThousandths(above, tenant, device);
      if (theirs + more > *limits.tenant_limit[kind] * spec::kWholeDevice) {
        return QueueLimit{QueueLimit::Kind::kTenant, above, *limits.tenant_limit[kind],
                          DevicesOf(theirs), theirs};
      }
    }
  }
  return std::nullopt;
}

// ---- history ------------------------------------------------------------------------------------

// What the queue has used up to `now`, if it has used so much of devices since `past.as_of`.
double QueueHistory::UpTo(const QueueTree& tree, const Past& past, int64_t thousandths, size_t kind,
                          absl::Time now) {
  const absl::Duration passed = past.as_of.has_value()
                                    ? std::max(absl::ZeroDuration(), now - *past.as_of)
                                    : absl::ZeroDuration();
  const double half_life = absl::ToDoubleSeconds(tree.half_life());
  const double kept = std::exp2(-absl::ToDoubleSeconds(passed) / half_life);
  return past.device_seconds[kind] * kept +
         half_life / std::log(2.0) * (1 - kept) *
             (static_cast<double>(thousandths) / spec::kWholeDevice);
}

void QueueHistory::Accrue(const QueueTree& tree, const QueueUse& use, int queue, absl::Time now) {
  now = FromProto(ToProto(now));  // as it will be stored
  Past& past = queues_[tree.at(queue).name];
  for (size_t kind = 0; kind < past.device_seconds.size(); ++kind) {
    past.device_seconds[kind] = UpTo(tree, past, use.at(queue).thousandths[kind], kind, now);
  }
  past.as_of = now;
}

void QueueHistory::Begin(const std::string& queue, absl::Time now) {
  Past& past = queues_[queue];
  if (!past.as_of.has_value()) past.as_of = FromProto(ToProto(now));
}

void QueueHistory::TookTurn(const std::string& queue, absl::Time now) {
  queues_[queue].last_turn = FromProto(ToProto(now));
}

absl::Time QueueHistory::LastTurn(const std::string& queue) const {
  const auto known = queues_.find(queue);
  return known == queues_.end() ? absl::InfinitePast() : known->second.last_turn;
}

double QueueHistory::Average(const QueueTree& tree, const QueueUse& use, int queue,
                             v1::DeviceKind device, absl::Time now) const {
  const auto known = queues_.find(tree.at(queue).name);
  if (known == queues_.end()) return 0;
  const size_t kind = static_cast<size_t>(device);
  return UpTo(tree, known->second, use.at(queue).thousandths[kind], kind, now) * std::log(2.0) /
         absl::ToDoubleSeconds(tree.half_life());
}

double DebtOf(const QueueTree& tree, const QueueUse& use, const QueueHistory& history,
              const QueueUse& past, int queue, v1::DeviceKind device, int64_t total,
              absl::Time now) {
  const size_t kind = static_cast<size_t>(device);
  double debt = 0;
  auto fair = static_cast<double>(total);
  for (const int above : tree.Path(queue)) {
    const QueueTree::Queue& of = tree.at(above);
    fair = std::max(fair * of.weight_part, static_cast<double>(of.guaranteed[kind]));
    const double used = (static_cast<double>(use.at(above).thousandths[kind]) / spec::kWholeDevice +
                         history.Average(tree, past, above, device, now)) /
                        2;
    if (used > fair) debt = std::max(debt, 1 - fair / used);
  }
  return debt;
}

std::optional<v1::QueueUsage> QueueHistory::Stored(const std::string& queue) const {
  const auto known = queues_.find(queue);
  if (known == queues_.end()) return std::nullopt;
  const Past& past = known->second;
  v1::QueueUsage usage;
  for (size_t kind = 0; kind < past.device_seconds.size(); ++kind) {
    if (past.device_seconds[kind] == 0) continue;
    (*usage.mutable_device_seconds())[spec::EnumName(static_cast<v1::DeviceKind>(kind))] =
        past.device_seconds[kind];
  }
  if (past.as_of.has_value()) *usage.mutable_as_of() = muster::ToProto(*past.as_of);
  if (past.last_turn != absl::InfinitePast()) {
    *usage.mutable_last_turn() = muster::ToProto(past.last_turn);
  }
  return usage;
}

void QueueHistory::Restore(const std::string& queue, const v1::QueueUsage& usage) {
  Past& past = queues_[queue];
  for (const auto& [name, value] : usage.device_seconds()) {
    if (std::isfinite(value) && value >= 0) {
      past.device_seconds[static_cast<size_t>(DeviceNamed(name))] = value;
    }
  }
  if (usage.has_as_of()) past.as_of = FromProto(usage.as_of());
  if (usage.has_last_turn()) past.last_turn = FromProto(usage.last_turn());
}

}  // namespace muster::coordinator
