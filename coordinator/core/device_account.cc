#include "coordinator/core/device_account.h"

#include <algorithm>
#include <set>

#include "absl/time/time.h"
#include "proto/time.h"

namespace muster::coordinator {

DeviceAccount::DeviceAccount(const v1::Account& stored)
    : clock_ms_(stored.clock_ms()), period_begin_ms_(stored.period_begin_ms()) {
  for (const v1::AccountEntry& entry : stored.entries()) {
    const Use use{entry.usage_class(), entry.cause()};
    if (entry.total_ms() > 0) times_[use] = {entry.total_ms(), entry.period_ms()};
    if (entry.devices() > 0) devices_[use] = entry.devices();
  }
}

v1::Account DeviceAccount::Stored() const {
  v1::Account stored;
  stored.set_clock_ms(clock_ms_);
  stored.set_period_begin_ms(period_begin_ms_);
  std::set<Use> uses;
  for (const auto& [use, time] : times_) uses.insert(use);
  for (const auto& [use, devices] : devices_) uses.insert(use);
  for (const Use& use : uses) {
    v1::AccountEntry& entry = *stored.add_entries();
    entry.set_usage_class(use.usage_class);
    entry.set_cause(use.cause);
    if (const auto time = times_.find(use); time != times_.end()) {
      entry.set_total_ms(time->second.total_ms);
      entry.set_period_ms(time->second.period_ms);
    }
    if (const auto now = devices_.find(use); now != devices_.end()) {
      entry.set_devices(now->second);
    }
  }
  return stored;
}

int64_t DeviceAccount::device_count() const {
  int64_t count = 0;
  for (const auto& [use, devices] : devices_) count += devices;
  return count;
}

void DeviceAccount::AddTimeUntil(int64_t clock_ms, int64_t wall_ms) {
  const int64_t passed = std::max<int64_t>(0, clock_ms - clock_ms_);
  if (passed > 0) {
    for (const auto& [use, devices] : devices_) {
      Time& time = times_[use];
      time.total_ms += devices * passed;
      time.period_ms += devices * passed;
    }
    if (!devices_.empty() && period_begin_ms_ == 0) period_begin_ms_ = wall_ms - passed;
  }
  clock_ms_ = std::max(clock_ms_, clock_ms);
}

int64_t DeviceAccount::TotalMs(int64_t clock_ms) const {
  int64_t total = device_count() * std::max<int64_t>(0, clock_ms - clock_ms_);
  for (const auto& [use, time] : times_) total += time.total_ms;
  return total;
}

v1::Usage DeviceAccount::View(int64_t clock_ms, int64_t as_of_ms) const {
  DeviceAccount settled = *this;
  settled.AddTimeUntil(clock_ms, as_of_ms);
  v1::Usage usage;
  *usage.mutable_as_of() = ToProto(absl::FromUnixMillis(as_of_ms));
  double productive = 0, unused = 0, all = 0;
  const v1::Account stored = settled.Stored();
  for (const v1::AccountEntry& entry : stored.entries()) {
    v1::ClassTime& time = *usage.add_times();
    time.set_usage_class(entry.usage_class());
    time.set_cause(entry.cause());
    time.set_device_seconds(static_cast<double>(entry.total_ms()) * 1e-3);
    time.set_devices(entry.devices());
    all += time.device_seconds();
    if (IsUnused(entry.usage_class())) unused += time.device_seconds();
    if (entry.usage_class() == v1::USAGE_CLASS_PRODUCTIVE) productive += time.device_seconds();
  }
  usage.set_goodput(GoodputOf(productive, unused, all));
  return usage;
}

v1::UsageRow DeviceAccount::TakePeriod(int64_t end_ms) {
  v1::UsageRow row;
  row.set_begin_ms(period_begin_ms_);
  row.set_end_ms(std::max(end_ms, period_begin_ms_));
  for (auto& [use, time] : times_) {
    if (time.period_ms == 0) continue;
    v1::AccountEntry& entry = *row.add_entries();
    entry.set_usage_class(use.usage_class);
    entry.set_cause(use.cause);
    entry.set_period_ms(time.period_ms);
    time.period_ms = 0;
  }
  period_begin_ms_ = 0;
  return row;
}

}  // namespace muster::coordinator
