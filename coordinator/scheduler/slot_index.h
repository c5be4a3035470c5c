// The slots of a cluster with the sums that placement needs, kept up to date change by change.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_
#define MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "base/ids.h"
#include "coordinator/scheduler/topology.h"
#include "muster/v1/schedule.pb.h"
#include "proto/spec/share.h"

namespace muster::coordinator {

using spec::kWholeDevice;

struct Holding;

// What one job takes of a device, in thousandths.
struct DevicePart {
  JobId job;
  int32_t share = 0;
  // Of a slot in an index: what the index knows of `job`. No part of the value.
  Holding* holder = nullptr;

  friend bool operator==(const DevicePart& a, const DevicePart& b) {
    return a.job == b.job && a.share == b.share;
  }
};

struct SlotView {
  std::string device;  // "cpu:0"
  v1::DeviceKind kind = v1::DEVICE_KIND_CPU;
  bool usable = true;
  JobId held_by = {};  // the job that takes all of it; empty: none does
  // Devices of one worker with the same number are closer to each other than to the others: NVLink
  // connects them or, without NVLink, PCIe switches do, or else they are on one NUMA node.
  int link_group = 0;
  int numa_node = 0;          // groups on one node are closer to each other than to the others
  std::string reserved = {};  // the reservation whose jobs alone get it; empty = all do
  bool suspect = false;       // DeviceFaults.suspect: others of its worker are taken first
  bool undivided = false;     // the daemon of its worker cannot share devices: no job gets a part
  // What other jobs take of it, in order of ids. A part that is kept for a job which waits counts
  // from the start, so that it may be more than there is room for yet.
  std::vector<DevicePart> parts = {};
  // Of a slot in an index: what the index knows of `held_by`; null: nobody. No part of the value.
  Holding* holder = nullptr;

  bool held() const { return !held_by.value().empty() || !parts.empty(); }
  bool free() const { return usable && !held() && reserved.empty(); }
  // Thousandths that nobody takes.
  int32_t room() const;
  // A rank that takes so much can get it.
  bool HasRoom(int32_t share) const {
    return share == kWholeDevice ? free() : MayHold(share) && reserved.empty() && room() >= share;
  }
  // A rank that takes so much could get it if nobody else had any of it.
  bool MayHold(int32_t share) const { return usable && (share == kWholeDevice || !undivided); }
  // What the job takes of it; 0: nothing.
  int32_t ShareOf(const JobId& job) const;
  void SetShare(const JobId& job, int32_t share);
  // The jobs that take some of it.
  std::vector<DevicePart> Holders() const;
  // Of a slot in an index: the holder, which is not null, takes some of it.
  bool TakenBy(const Holding* one) const {
    return holder == one || std::any_of(parts.begin(), parts.end(), [one](const DevicePart& part) {
             return part.holder == one;
           });
  }
  // Whether what is kept of it for a job that takes so much counts at once. It does unless the job
  // takes all of it, as another one does that is being stopped: then it waits until that is gone.
  bool KeepsAtOnce(int32_t share) const {
    return share < kWholeDevice || (held_by.value().empty() && !parts.empty());
  }
  friend bool operator==(const SlotView& a, const SlotView& b) {
    return a.device == b.device && a.kind == b.kind && a.usable == b.usable &&
           a.held_by == b.held_by && a.link_group == b.link_group && a.numa_node == b.numa_node &&
           a.reserved == b.reserved && a.suspect == b.suspect && a.undivided == b.undivided &&
           a.parts == b.parts;
  }
};
struct WorkerView {
  WorkerId id;
  bool ready = false;                                 // only ready workers get new ranks
  v1::AwayReason away = v1::AWAY_REASON_UNSPECIFIED;  // why it is not ready
  std::string ends_attempt = {};                      // AwayWorker.ends_attempt
  std::vector<SlotView> slots;                        // in device order
  DomainPath path = {};
  v1::WorkerStanding standing = v1::WORKER_STANDING_UNSPECIFIED;  // Reputation.standing
  // Of a worker in an index, no part of the value: the narrowest domain that has it, a number that
  // grows with the name, which is faster to compare, its free slots by kind (0 where it is not
  // ready), and how many of its devices jobs take parts of.
  int home = -1;
  uint64_t order = 0;
  std::array<int, v1::DeviceKind_ARRAYSIZE> free = {};
  int shared = 0;

  friend bool operator==(const WorkerView& a, const WorkerView& b) {
    return a.id == b.id && a.ready == b.ready && a.away == b.away &&
           a.ends_attempt == b.ends_attempt && a.slots == b.slots && a.path == b.path &&
           a.standing == b.standing;
  }
};

// Workers of one index, by name.
struct ByName {
  bool operator()(const WorkerView* a, const WorkerView* b) const { return a->order < b->order; }
};
class WorkerSet : public std::set<const WorkerView*, ByName> {
 public:
  // The same names.
  friend bool operator==(const WorkerSet& a, const WorkerSet& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const WorkerView* x, const WorkerView* y) { return x->id == y->id; });
  }
};

// What a job holds.
struct Holding {
  JobId id;
  std::vector<const WorkerView*> workers = {};  // that it holds slots on, by name
  // Slots by kind, on ready workers.
  std::array<int64_t, v1::DeviceKind_ARRAYSIZE> slots = {};
};

// False of what holds slots for the scheduler itself, while a plan is made.
inline bool IsJob(const JobId& holder) {
  return !holder.value().empty() && holder.value().front() != '(';
}

// A slot and who holds it; empty: nobody.
struct HeldSlot {
  WorkerId worker;
  std::string device;
  JobId holder;
  // Instead of `holder`: what one job takes of it, 0 = nothing, whatever others do.
  std::optional<DevicePart> part = {};
};

// The slots that a rank can get: devices of a kind with room for its share.
struct SlotsFor {
  v1::DeviceKind kind = v1::DEVICE_KIND_CPU;
  int32_t share = kWholeDevice;
  bool shared = false;  // only those of which other jobs take a part

  bool Has(const SlotView& slot) const {
    return slot.kind == kind && slot.HasRoom(share) && (!shared || slot.held());
  }
};

// Few numbers, each counted: they lie side by side.
using Counts = absl::btree_map<int, int>;

// Workers by how many slots of one kind they have.
struct WorkerSizes {
  Counts workers_by_total;
  Counts undivided_by_total;  // those of them whose slots are SlotView::undivided

  // Calls visit(slots, workers) with those that ranks of this share could get if all were free, the
  // smallest workers first.
  template <typename Visit>
  void Each(int32_t share, Visit visit) const {
    for (const auto& [size, workers] : workers_by_total) {
      const auto without =
          share == kWholeDevice ? undivided_by_total.end() : undivided_by_total.find(size);
      const int left = workers - (without == undivided_by_total.end() ? 0 : without->second);
      if (left > 0) visit(size, left);
    }
  }
  // All slots of these workers.
  int64_t Sum(int32_t share) const {
    int64_t sum = 0;
    Each(share, [&sum](int size, int workers) { sum += int64_t{size} * workers; });
    return sum;
  }
  int Largest(int32_t share) const {
    int largest = 0;
    Each(share, [&largest](int size, int) { largest = size; });
    return largest;
  }
  friend bool operator==(const WorkerSizes&, const WorkerSizes&) = default;
};

// Value type. Thread: one at a time. A change of a worker costs O(its slots + log workers). Workers
// and holders keep their addresses until they are removed or replaced, so that neither is found by
// its name again and again.
class SlotIndex {
 public:
  SlotIndex() = default;
  SlotIndex(const SlotIndex& other);
  SlotIndex& operator=(const SlotIndex& other);
  SlotIndex(SlotIndex&& other) = default;
  SlotIndex& operator=(SlotIndex&& other) = default;

  // Slots that ranks of one share can get.
  struct Room {
    int64_t free = 0;  // on ready workers
    // Ready workers by how many such slots they have, without those that have none.
    std::map<int, WorkerSet> workers_by_free;

    friend bool operator==(const Room&, const Room&) = default;
  };

  // All slots of one kind; what is free of them is free as a whole.
  struct Kind : Room, WorkerSizes {
    int64_t total = 0;
    // Devices on ready workers of which jobs take parts, by the room that is left: workers that
    // have such a one.
    std::map<int32_t, WorkerSet> workers_by_room;
    int64_t shared = 0;  // so many devices
    WorkerSet away;      // workers that are not ready
    int64_t away_slots = 0;
    WorkerSet undivided;   // ready workers whose slots are SlotView::undivided
    int64_t reserved = 0;  // on ready workers: would be free if they were not reserved

    friend bool operator==(const Kind&, const Kind&) = default;
  };

  // A domain that has workers. The cluster is one too.
  struct Domain {
    v1::TopologyLevel level = v1::TOPOLOGY_LEVEL_CLUSTER;
    DomainPath path;  // down to this domain
    int parent = -1;  // the narrowest domain around it; -1: this is the cluster
    std::set<int> children;
    int workers = 0;  // in it and in domains below
    // Slots that ranks of one share can get. The numbers count domains below too.
    struct Room {
      Counts workers_by_free;  // as of SlotIndex::Room
      // Ready workers that are in no domain below this one, by free slots.
      std::map<int, WorkerSet> direct;

      friend bool operator==(const Room&, const Room&) = default;
    };
    // Slots of one kind.
    struct Slots : Room, WorkerSizes {
      friend bool operator==(const Slots&, const Slots&) = default;
    };
    std::map<v1::DeviceKind, Slots> slots;  // those that a worker has

    const std::string& name() const;
  };

  // Adds or replaces a worker.
  void Put(WorkerView worker);
  void Remove(const WorkerId& id);
  // Null when the worker is unknown.
  const WorkerView* Find(const WorkerId& id) const;
  // Marks a slot as held by this job, all of it; with an empty id, by none. Does nothing when the
  // worker or the device is unknown.
  void SetHolder(const WorkerId& id, const std::string& device, const JobId& job);
  // The job takes so many thousandths of the device from now on; 0: nothing.
  void SetShare(const WorkerId& id, const std::string& device, const JobId& job, int32_t share);
  // The same for many slots, in this order. Costs less where slots of a worker follow each other.
  void SetHolders(const std::vector<HeldSlot>& slots);
  // The same, the last first: undoes what was recorded in the order in which it was done.
  void SetHoldersBack(const std::vector<HeldSlot>& slots);

  // Grows with every change but those of trials; never 0 once there is a worker.
  uint64_t version() const { return version_; }
  bool empty() const { return workers_.empty(); }
  const std::map<WorkerId, WorkerView>& workers() const { return workers_; }
  // Empty sums for a kind that no worker has.
  const Kind& Of(v1::DeviceKind kind) const;
  // The first time that a share is asked for costs O(slots); the kSharesKept that were asked for
  // last are kept up to date. The answer is good until slots change or another share is asked for.
  const Room& RoomOf(const SlotsFor& slots) const;
  const Domain::Room& RoomIn(int domain, const SlotsFor& slots) const;
  static constexpr size_t kSharesKept = 16;
  // The domain with this number: of Domain::children, of domains_of(), or kCluster.
  const Domain& domain(int number) const { return domains_[static_cast<size_t>(number)]; }
  static constexpr int kCluster = 0;
  // The domains of a level, by path.
  const std::map<DomainPath, int>& domains_of(v1::TopologyLevel level) const {
    return numbers_[static_cast<size_t>(level)];
  }
  // The workers on which the job holds slots.
  std::set<WorkerId> WorkersOf(const JobId& job) const;
  // What the job holds; null: nothing.
  const Holding* HolderOf(const JobId& job) const;
  // Workers of a standing other than the best.
  const WorkerSet& marked() const { return marked_; }
  // By id. Some may hold nothing while a trial lasts.
  const std::map<JobId, Holding>& holders() const { return holders_; }

  // A slot of this index.
  struct SlotRef {
    const WorkerView* worker;
    const SlotView* slot;
  };

  // Changes that hold for a while: all are taken back at once, when it is destroyed at the latest.
  // Trials may be nested.
  class Trial {
   public:
    explicit Trial(SlotIndex& index) : index_(index) { ++index_.trials_; }
    // Inside another one; no copy.
    explicit Trial(Trial& outer) : Trial(outer.index_) {}  // NOLINT(google-explicit-constructor)
    ~Trial() {
      Rollback();
      if (--index_.trials_ == 0) index_.ForgetEmptied();
    }
    Trial(const Trial&) = delete;
    Trial& operator=(const Trial&) = delete;
    const SlotIndex& index() const { return index_; }
    // Takes up to `count` of these slots on a worker, `group` at a time (1: all): each from the
    // fullest group of linked devices that has as many, else from groups of the fullest NUMA node
    // that has, in device order. Of devices that are to be shared, those with the least room first.
    std::vector<const SlotView*> TakeSlots(const WorkerView& worker, const SlotsFor& slots,
                                           int count, const JobId& job, int group = 1);
    // The same. Returns the devices.
    std::vector<std::string> Take(const WorkerView& worker, const SlotsFor& slots, int count,
                                  const JobId& job, int group = 1);
    std::vector<std::string> Take(const WorkerId& id, const SlotsFor& slots, int count,
                                  const JobId& job, int group = 1);
    std::vector<std::string> Take(const WorkerId& id, v1::DeviceKind kind, int count,
                                  const JobId& job, int group = 1) {
      return Take(id, SlotsFor{kind}, count, job, group);
    }
    // Until Close() the slots that these reservations keep are as free as others.
    void Open(const std::vector<std::string>& reservations);
    void Close();
    // Frees every slot that the job holds.
    void Release(const JobId& job);
    // Lets a holder have what is left of the devices of which the job takes a part.
    void TakeRest(const JobId& job, const JobId& holder);
    // Lets a holder have all that is free of these slots on a worker.
    void TakeAll(const WorkerView& worker, const SlotsFor& slots, const JobId& holder);
    void Rollback();

   private:
    struct Changed {
      WorkerView* worker;
      SlotView* slot;
      Holding* before;  // null: nobody
      // Instead of `before`: whose part was changed, and what it was.
      Holding* part = nullptr;
      int32_t share = 0;
    };
    SlotIndex& index_;
    std::vector<Changed> changed_;
    struct Opened {
      WorkerId worker;
      std::string device;
      std::string reservation;
    };
    std::vector<Opened> opened_;
  };

  // Gives slots of ready workers to a holder, all those of a worker at once; empty: to none.
  void SetHolder(const std::vector<SlotRef>& slots, const JobId& job);

  friend bool operator==(const SlotIndex& a, const SlotIndex& b) {
    return a.workers_ == b.workers_ && a.kinds_ == b.kinds_ && SameHolders(a, b) &&
           a.reserved_on_ == b.reserved_on_ && a.marked_ == b.marked_ && SameDomains(a, b);
  }

 private:
  static bool SameHolders(const SlotIndex& a, const SlotIndex& b);
  static bool SameDomains(const SlotIndex& a, const SlotIndex& b);
  // The narrowest domain that has the worker, which is made when it is the first one there.
  int Enter(const WorkerView& worker);
  void Leave(int domain);
  // Numbers the worker behind those before it by name.
  void Order(std::map<WorkerId, WorkerView>::iterator worker);
  // The holder with this id, which is made when there is none.
  Holding& HolderFor(const JobId& job);
  // It may hold nothing any more; then it is forgotten, once no trial may know it.
  void Left(Holding& holder);
  void ForgetEmptied();
  // Adds what a worker contributes to the sums, or takes it away.
  void Count(WorkerView& worker, int sign);
  void CountInDomains(const WorkerView& worker, v1::DeviceKind kind, int total, int free,
                      bool undivided, int sign);
  // Of a worker that may change in any way.
  template <typename Change>
  void Update(const WorkerId& id, Change change);
  // Of a worker whose slots change their holders, through Hold alone: what stays as it is is not
  // counted again.
  template <typename Change>
  void Reassign(WorkerView& worker, Change change);
  // Null: nobody.
  void Hold(WorkerView& worker, SlotView& slot, Holding* holder);
  void SetPart(WorkerView& worker, SlotView& slot, Holding& holder, int32_t share);
  void MoveFree(const WorkerView& worker, v1::DeviceKind kind, int before, int now);
  // The devices of the worker of which jobs take parts.
  void CountShared(const WorkerView& worker, int sign);
  template <typename Iterator>
  void SetEach(Iterator begin, Iterator end);
  // Workers and slots that others only look at are those of this index.
  static WorkerView& Mutable(const WorkerView& worker) { return const_cast<WorkerView&>(worker); }
  static std::array<std::map<DomainPath, int>, v1::TopologyLevel_ARRAYSIZE> Numbers() {
    std::array<std::map<DomainPath, int>, v1::TopologyLevel_ARRAYSIZE> out;
    out[v1::TOPOLOGY_LEVEL_CLUSTER].emplace(DomainPath(), kCluster);
    return out;
  }

  std::map<WorkerId, WorkerView> workers_;
  std::vector<Domain> domains_ = std::vector<Domain>(1);  // the first is the cluster
  std::vector<int> unused_;                               // numbers of domains that are gone
  std::array<std::map<DomainPath, int>, v1::TopologyLevel_ARRAYSIZE> numbers_ = Numbers();
  std::map<std::string, std::set<WorkerId>> reserved_on_;  // by reservation
  std::map<v1::DeviceKind, Kind> kinds_;                   // those that a worker has
  std::map<JobId, Holding> holders_;
  std::vector<Holding*> emptied_;  // in trials: they held nothing for a while at least
  int trials_ = 0;                 // that last
  uint64_t version_ = 0;
  WorkerSet marked_;

  // Sums for slots of one share, that are shared or not. They follow from the workers.
  struct Sums {
    std::map<v1::DeviceKind, Room> kinds;
    std::vector<std::map<v1::DeviceKind, Domain::Room>> domains;  // by number
    uint64_t asked = 0;                                           // when, by asks_
  };
  Sums& SumsOf(const SlotsFor& slots) const;
  static void MoveRoom(Room& room, const WorkerView& worker, int before, int now);
  void MoveRoomIn(Sums& sums, const WorkerView& worker, v1::DeviceKind kind, int before,
                  int now) const;
  void CountInSums(const WorkerView& worker, int sign) const;
  // By share, and whether only devices that are shared count.
  mutable std::map<std::pair<int32_t, bool>, Sums> sums_;
  mutable uint64_t asks_ = 0;
};

// Slots that new ranks can take; 0 on a worker that is not ready.
int FreeSlots(const WorkerView& worker, const SlotsFor& slots);
inline int FreeSlots(const WorkerView& worker, v1::DeviceKind kind) {
  return FreeSlots(worker, SlotsFor{kind});
}
// Slots of one kind that it has.
int TotalSlots(const WorkerView& worker, v1::DeviceKind kind);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_
