#include "coordinator/core/device_account.h"

#include <algorithm>
#include <set>

#include "absl/time/time.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {

using spec::kWholeDevice;

void DeviceTime::Add(int64_t thousandths, int64_t passed_ms) {
  // What is below a device first, so that no product is larger than the result.
  rest_us += thousandths % kWholeDevice * passed_ms;
  ms += thousandths / kWholeDevice * passed_ms + rest_us / 1000;
  rest_us %= 1000;
}

void DeviceTime::Add(const DeviceTime& other) {
  rest_us += other.rest_us;
  ms += other.ms + rest_us / 1000;
  rest_us %= 1000;
}

DeviceAccount::DeviceAccount(const v1::Account& stored)
    : clock_ms_(stored.clock_ms()), period_begin_ms_(stored.period_begin_ms()) {
  for (const v1::AccountEntry& entry : stored.entries()) {
    const Use use{entry.usage_class(), entry.cause()};
    const Time time{{entry.total_ms(), entry.total_rest_us()},
                    {entry.period_ms(), entry.period_rest_us()}};
    if (time.total != DeviceTime()) times_[use] = time;
    const int64_t thousandths =
        entry.thousandths() > 0 ? entry.thousandths() : entry.devices() * kWholeDevice;
    if (thousandths > 0) devices_[use] = thousandths;
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
      entry.set_total_ms(time->second.total.ms);
      entry.set_total_rest_us(static_cast<int32_t>(time->second.total.rest_us));
      entry.set_period_ms(time->second.period.ms);
      entry.set_period_rest_us(static_cast<int32_t>(time->second.period.rest_us));
    }
    if (const auto now = devices_.find(use); now != devices_.end()) {
      entry.set_devices(now->second / kWholeDevice);
      entry.set_thousandths(now->second);
    }
  }
  return stored;
}

int64_t DeviceAccount::thousandths() const {
  int64_t sum = 0;
  for (const auto& [use, thousandths] : devices_) sum += thousandths;
  return sum;
}

void DeviceAccount::AddTimeUntil(int64_t clock_ms, int64_t wall_ms) {
  const int64_t passed = std::max<int64_t>(0, clock_ms - clock_ms_);
  if (passed > 0) {
    for (const auto& [use, thousandths] : devices_) {
      Time& time = times_[use];
      time.total.Add(thousandths, passed);
      time.period.Add(thousandths, passed);
    }
    if (!devices_.empty() && period_begin_ms_ == 0) period_begin_ms_ = wall_ms - passed;
  }
  clock_ms_ = std::max(clock_ms_, clock_ms);
}

DeviceTime DeviceAccount::Total(int64_t clock_ms) const {
  DeviceTime total;
  total.Add(thousandths(), std::max<int64_t>(0, clock_ms - clock_ms_));
  for (const auto& [use, time] : times_) total.Add(time.total);
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
    time.set_device_seconds(DeviceTime{entry.total_ms(), entry.total_rest_us()}.seconds());
    time.set_devices(entry.devices());
    time.set_thousandths(entry.thousandths());
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
    if (time.period == DeviceTime()) continue;
    v1::AccountEntry& entry = *row.add_entries();
    entry.set_usage_class(use.usage_class);
    entry.set_cause(use.cause);
    entry.set_period_ms(time.period.ms);
    entry.set_period_rest_us(static_cast<int32_t>(time.period.rest_us));
    time.period = DeviceTime();
  }
  period_begin_ms_ = 0;
  return row;
}

}  // namespace muster::coordinator
