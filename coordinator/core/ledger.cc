#include "coordinator/core/ledger.h"

#include <algorithm>
#include <utility>

#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/spec/share.h"

namespace muster::coordinator {

void Ledger::Recover(const v1::FleetAccount* row, absl::Time now) {
  if (row == nullptr) {
    wall_ms_ = period_begin_ms_ = absl::ToUnixMillis(now);
    return;
  }
  clock_ms_ = row->clock_ms();
  wall_ms_ = row->wall_ms();
  period_begin_ms_ = row->period_begin_ms();
  last_row_ = row->last_row();
  fleet_ = DeviceAccount(row->account());
  thousandths_ = row->thousandths() > 0 ? row->thousandths() : row->devices() * spec::kWholeDevice;
  all_time_ = {row->device_ms(), row->device_rest_us()};
  counted_ms_ = row->clock_ms();
}

void Ledger::Advance(absl::Time now) {
  const int64_t wall_ms = absl::ToUnixMillis(now);
  clock_ms_ += std::max<int64_t>(0, wall_ms - wall_ms_);
  wall_ms_ = wall_ms;
}

int64_t Ledger::ClockAt(absl::Time time) const {
  return clock_ms_ - std::clamp<int64_t>(wall_ms_ - absl::ToUnixMillis(time), 0, clock_ms_);
}

bool Ledger::PeriodIsOver() const {
  // A clock that was set back ends the period too, so that none is longer than it should be.
  return wall_ms_ < period_begin_ms_ ||
         wall_ms_ - period_begin_ms_ >= absl::ToInt64Milliseconds(kUsagePeriod);
}

DeviceTime Ledger::AllTime() const {
  DeviceTime time = all_time_;
  time.Add(thousandths_, clock_ms_ - counted_ms_);
  return time;
}

void Ledger::SetFleet(int64_t all, Devices unheld) {
  if (thousandths_ == all && fleet_.devices() == unheld) return;
  all_time_ = AllTime();
  counted_ms_ = clock_ms_;
  thousandths_ = all;
  fleet_.AddTimeUntil(clock_ms_, wall_ms_);
  fleet_.SetDevices(std::move(unheld));
  fleet_changed_ = true;
}

void Ledger::Close(DeviceAccount& account, v1::UsageRow names, Batch& batch) {
  account.AddTimeUntil(clock_ms_, wall_ms_);
  if (!account.has_period()) return;
  names.MergeFrom(account.TakePeriod(wall_ms_));
  batch.Put(Table::kUsage, schema::EncodeU64(++last_row_), schema::Serialize(names));
  if (last_row_ > kUsageRowsMax) {
    batch.Delete(Table::kUsage, schema::EncodeU64(last_row_ - kUsageRowsMax));
  }
}

void Ledger::BeginPeriod(Batch& batch) {
  Close(fleet_, {}, batch);
  period_begin_ms_ = wall_ms_;
}

void Ledger::Put(Batch& batch) {
  v1::FleetAccount row;
  row.set_clock_ms(clock_ms_);
  row.set_wall_ms(wall_ms_);
  row.set_period_begin_ms(period_begin_ms_);
  row.set_last_row(last_row_);
  *row.mutable_account() = fleet_.Stored();
  const DeviceTime all = AllTime();
  row.set_devices(thousandths_ / spec::kWholeDevice);
  row.set_thousandths(thousandths_);
  row.set_device_ms(all.ms);
  row.set_device_rest_us(static_cast<int32_t>(all.rest_us));
  batch.Put(Table::kUsage, schema::kFleetAccount, schema::Serialize(row));
}

}  // namespace muster::coordinator
