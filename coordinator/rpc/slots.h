// How many calls and streams may be open, in all and for one peer: one client cannot take what the
// others need.
#ifndef MUSTER_COORDINATOR_RPC_SLOTS_H_
#define MUSTER_COORDINATOR_RPC_SLOTS_H_

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

// Each kind has slots of its own.
enum class SlotKind {
  kCall,      // unary calls that wait for the core
  kOpening,   // streams of daemons that have not said Hello
  kSession,   // streams of daemons that have
  kFollower,  // what waits for ranks: logs, profiles, collectives
  kWatcher,   // streams of jobs and events
};
constexpr size_t kSlotKinds = 5;

// Thread-safe. Slots may be given back when it is gone. A peer is an address without its port.
class Slots {
  struct Counts;

 public:
  using Bounds = std::array<SlotBound, kSlotKinds>;  // by SlotKind
  static constexpr Bounds kDefaultBounds = {kCallSlots, kOpeningSlots, kSessionSlots,
                                            kFollowerSlots, kWatcherSlots};

  explicit Slots(const Bounds& bounds) : bounds_(bounds) {}

  // Given back when it is destroyed.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept {
      std::swap(counts_, other.counts_);
      std::swap(kind_, other.kind_);
      std::swap(host_, other.host_);
      return *this;
    }
    ~Slot() {
      if (counts_ != nullptr) counts_->GiveBack(kind_, host_);
    }

   private:
    friend class Slots;
    std::shared_ptr<Counts> counts_;
    SlotKind kind_ = SlotKind::kCall;
    std::string host_;
  };

  // `peer` is what gRPC calls it, such as "ipv4:127.0.0.1:34567". kResourceExhausted says which
  // bound is reached.
  absl::StatusOr<Slot> Take(SlotKind kind, const std::string& peer);

 private:
  struct Counts {
    void GiveBack(SlotKind kind, const std::string& host);

    Mutex mutex;
    std::array<size_t, kSlotKinds> all ABSL_GUARDED_BY(mutex) = {};
    std::array<std::map<std::string, size_t>, kSlotKinds> by_host ABSL_GUARDED_BY(mutex);
  };

  const Bounds bounds_;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_SLOTS_H_
