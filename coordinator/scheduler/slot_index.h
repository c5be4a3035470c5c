// The slots of a cluster with the sums that placement needs, kept up to date change by change.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_
#define MUSTER_COORDINATOR_SCHEDULER_SLOT_INDEX_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "coordinator/scheduler/topology.h"
#include "muster/v1/schedule.pb.h"
#include "proto/spec/share.h"

namespace muster::coordinator {

using spec::kWholeDevice;

// What one job takes of a device, in thousandths.
struct DevicePart {
  JobId job;
  int32_t share = 0;

  friend bool operator==(const DevicePart&, const DevicePart&) = default;
};

struct SlotView {
  std::string device;  // "cpu:0"
  v1::DeviceKind kind = v1::DEVICE_KIND_CPU;
  bool usable = true;
  JobId held_by = {};  // the job that takes all of it; empty: none does
  // Devices of one worker with the same number are closer to each other than to the others: NVLink
  // connects them or, without NVLink, they are on one NUMA node.
  int link_group = 0;
  std::string reserved = {};  // the reservation whose jobs alone get it; empty = all do
  // What other jobs take of it, in order of ids. A part that is kept for a job which waits counts
  // from the start, so that it may be more than there is room for yet.
  std::vector<DevicePart> parts = {};

  bool held() const { return !held_by.value().empty() || !parts.empty(); }
  bool free() const { return usable && !held() && reserved.empty(); }
  // Thousandths that nobody takes.
  int32_t room() const;
  // A rank that takes so much can get it.
  bool HasRoom(int32_t share) const {
    return share == kWholeDevice ? free() : usable && reserved.empty() && room() >= share;
  }
  // What the job takes of it; 0: nothing.
  int32_t ShareOf(const JobId& job) const;
  void SetShare(const JobId& job, int32_t share);
  // The jobs that take some of it.
  std::vector<DevicePart> Holders() const;
  // Whether what is kept of it for a job that takes so much counts at once. It does unless the job
  // takes all of it, as another one does that is being stopped: then it waits until that is gone.
  bool KeepsAtOnce(int32_t share) const {
    return share < kWholeDevice || (held_by.value().empty() && !parts.empty());
  }
  friend bool operator==(const SlotView&, const SlotView&) = default;
};
struct WorkerView {
  WorkerId id;
  bool ready = false;                                 // only ready workers get new ranks
  v1::AwayReason away = v1::AWAY_REASON_UNSPECIFIED;  // why it is not ready
  std::string ends_attempt = {};                      // AwayWorker.ends_attempt
  std::vector<SlotView> slots;                        // in device order
  DomainPath path = {};

  friend bool operator==(const WorkerView&, const WorkerView&) = default;
};

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

// Value type. Thread: one at a time. A change of a worker costs O(its slots + log workers), times
// the number of shares that were asked for lately where devices are shared.
class SlotIndex {
 public:
  // Slots that ranks of one share can get.
  struct Room {
    int64_t free = 0;  // on ready workers
    // Ready workers by how many such slots they have, without those that have none.
    std::map<int, std::set<WorkerId>> workers_by_free;

    friend bool operator==(const Room&, const Room&) = default;
  };

  // All slots of one kind; what is free of them is free as a whole.
  struct Kind : Room {
    int64_t total = 0;
    // Workers by how many slots of this kind they have.
    std::map<int, int> workers_by_total;
    // Slots on ready workers, by the job that holds them or takes a part of them.
    std::map<JobId, int64_t> held;
    // Devices on ready workers of which jobs take parts, by the room that is left: workers that
    // have such a one.
    std::map<int32_t, std::set<WorkerId>> workers_by_room;
    int64_t shared = 0;       // so many devices
    std::set<WorkerId> away;  // workers that are not ready
    int64_t away_slots = 0;
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
      std::map<int, int> workers_by_free;  // as of SlotIndex::Room
      // Ready workers that are in no domain below this one, by free slots.
      std::map<int, std::set<WorkerId>> direct;

      friend bool operator==(const Room&, const Room&) = default;
    };
    // Slots of one kind.
    struct Slots : Room {
      std::map<int, int> workers_by_total;  // as of Kind

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
  const std::set<WorkerId>& WorkersOf(const JobId& job) const;

  // Changes that hold for a while: all are taken back at once, when it is destroyed at the latest.
  class Trial {
   public:
    explicit Trial(SlotIndex& index) : index_(index) {}
    ~Trial() { Rollback(); }
    Trial(const Trial&) = delete;
    Trial& operator=(const Trial&) = delete;
    const SlotIndex& index() const { return index_; }
    // Takes up to `count` of these slots on a worker, `group` at a time: each from the fullest
    // group of linked devices that has as many, in device order. Of devices that are to be shared,
    // those with the least room first. Returns the devices.
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
    void Rollback();

   private:
    SlotIndex& index_;
    std::vector<HeldSlot> before_;  // who held what was changed
    struct Opened {
      WorkerId worker;
      std::string device;
      std::string reservation;
    };
    std::vector<Opened> opened_;
  };

  friend bool operator==(const SlotIndex& a, const SlotIndex& b) {
    return a.workers_ == b.workers_ && a.kinds_ == b.kinds_ && a.workers_of_ == b.workers_of_ &&
           a.reserved_on_ == b.reserved_on_ && SameDomains(a, b);
  }

 private:
  static bool SameDomains(const SlotIndex& a, const SlotIndex& b);
  // The narrowest domain that has the worker, which is made when it is the first one there.
  int Enter(const WorkerView& worker);
  void Leave(int domain);
  // Adds what a worker contributes to the sums, or takes it away.
  void Count(const WorkerView& worker, int domain, int sign);
  void CountInDomains(const WorkerView& worker, int domain, v1::DeviceKind kind, int total,
                      int free, int sign);
  // Of a worker that may change in any way.
  template <typename Change>
  void Update(const WorkerId& id, Change change);
  // Of a worker whose slots change their holders, through Hold and SetPart alone: what stays as it
  // is is not counted again.
  template <typename Change>
  void Reassign(const WorkerId& id, Change change);
  void Hold(WorkerView& worker, SlotView& slot, const JobId& job);
  void SetPart(WorkerView& worker, SlotView& slot, const JobId& job, int32_t share);
  // The job begins to hold one more slot of the worker, or (-1) holds one less. To be called while
  // the slot does not tell yet, or tells no more.
  void CountHolder(const WorkerView& worker, v1::DeviceKind kind, const JobId& job, int sign);
  void MoveFree(const WorkerView& worker, int domain, v1::DeviceKind kind, int before, int now);
  // The devices of the worker of which jobs take parts.
  void CountShared(const WorkerView& worker, int sign);
  template <typename Iterator>
  void SetEach(Iterator begin, Iterator end);
  static std::array<std::map<DomainPath, int>, v1::TopologyLevel_ARRAYSIZE> Numbers() {
    std::array<std::map<DomainPath, int>, v1::TopologyLevel_ARRAYSIZE> out;
    out[v1::TOPOLOGY_LEVEL_CLUSTER].emplace(DomainPath(), kCluster);
    return out;
  }

  std::map<WorkerId, WorkerView> workers_;
  std::map<WorkerId, int> home_;  // by worker: the narrowest domain that has it
  std::vector<Domain> domains_ = std::vector<Domain>(1);  // the first is the cluster
  std::vector<int> unused_;                               // numbers of domains that are gone
  std::array<std::map<DomainPath, int>, v1::TopologyLevel_ARRAYSIZE> numbers_ = Numbers();
  std::map<std::string, std::set<WorkerId>> reserved_on_;  // by reservation
  std::map<v1::DeviceKind, Kind> kinds_;                   // those that a worker has
  std::map<JobId, std::set<WorkerId>> workers_of_;         // those that hold a slot

  // Sums for slots of one share, that are shared or not. They follow from the workers.
  struct Sums {
    std::map<v1::DeviceKind, Room> kinds;
    std::vector<std::map<v1::DeviceKind, Domain::Room>> domains;  // by number
    uint64_t asked = 0;                                           // when, by asks_
  };
  Sums& SumsOf(const SlotsFor& slots) const;
  static void MoveRoom(Room& room, const WorkerId& id, int before, int now);
  void MoveRoomIn(Sums& sums, const WorkerId& id, int domain, v1::DeviceKind kind, int before,
                  int now) const;
  void CountInSums(const WorkerView& worker, int domain, int sign) const;
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
