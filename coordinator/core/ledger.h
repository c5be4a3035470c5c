// The clock of all accounts of device time, and the account of the devices that no attempt holds.
//
// Every device of a known worker is in one account at any time: that of the job whose attempt holds
// it, or the fleet's. Both change in the same turn when it passes from one to the other, so that
// the sum of all accounts is the number of devices times the time, exactly. A device that jobs
// share is in the account of each by its share, and in the fleet's by what is left of it. Accounts
// are settled only when something changes: time in which no coordinator ran counts as what the
// devices were used for before.
#ifndef MUSTER_COORDINATOR_CORE_LEDGER_H_
#define MUSTER_COORDINATOR_CORE_LEDGER_H_

#include <cstdint>

#include "absl/time/time.h"
#include "coordinator/core/device_account.h"
#include "coordinator/store/store.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

class Ledger {
 public:
  // Where the store has no row yet, time begins at `now`.
  void Recover(const v1::FleetAccount* row, absl::Time now);
  // To be called first in every turn.
  void Advance(absl::Time now);

  int64_t clock_ms() const { return clock_ms_; }
  int64_t wall_ms() const { return wall_ms_; }
  // The ledger's clock at a time that is not later than this turn.
  int64_t ClockAt(absl::Time time) const;
  bool PeriodIsOver() const;

  // The devices of all workers, and those of them that no attempt holds, are these now, in
  // thousandths.
  void SetFleet(int64_t all, Devices unheld);
  const DeviceAccount& fleet() const { return fleet_; }
  // True when SetFleet() changed something since the last call.
  bool TakeFleetChanged() { return std::exchange(fleet_changed_, false); }
  // All devices times the time since the first start.
  DeviceTime AllTime() const;
  int64_t thousandths() const { return thousandths_; }  // of all devices

  // Adds the row of a period that is over.
  void Close(DeviceAccount& account, v1::UsageRow names, Batch& batch);
  // Closes the fleet's own, and begins the next period.
  void BeginPeriod(Batch& batch);
  // Adds the row with the clock and the fleet's account. Has to be part of every batch that has the
  // account of a job.
  void Put(Batch& batch);
  uint64_t last_row() const { return last_row_; }

 private:
  int64_t clock_ms_ = 0;
  int64_t wall_ms_ = 0;
  int64_t period_begin_ms_ = 0;
  uint64_t last_row_ = 0;
  DeviceAccount fleet_;
  bool fleet_changed_ = true;
  int64_t thousandths_ = 0;
  DeviceTime all_time_;     // up to counted_ms_
  int64_t counted_ms_ = 0;  // by clock_ms_
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_LEDGER_H_
