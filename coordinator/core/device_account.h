// What the devices of one holder are used for: time by class and cause. Devices are counted in
// thousandths, since several jobs may share one, and their time in thousandths times milliseconds,
// so that all sums are exact.
#ifndef MUSTER_COORDINATOR_CORE_DEVICE_ACCOUNT_H_
#define MUSTER_COORDINATOR_CORE_DEVICE_ACCOUNT_H_

#include <compare>
#include <cstdint>
#include <map>

#include "muster/v1/job.pb.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

struct Use {
  v1::UsageClass usage_class = v1::USAGE_CLASS_UNSPECIFIED;
  v1::Cause cause = v1::CAUSE_UNSPECIFIED;

  friend auto operator<=>(const Use&, const Use&) = default;
};
using Devices = std::map<Use, int64_t>;  // in thousandths; none of the numbers is 0

// Device-milliseconds and, below one, device-microseconds: 64 bits of the latter alone would hold
// the time of 100,000 devices for no more than three years.
struct DeviceTime {
  int64_t ms = 0;
  int64_t rest_us = 0;  // 0 to 999

  // Adds what so many thousandths of devices do in so many milliseconds.
  void Add(int64_t thousandths, int64_t passed_ms);
  void Add(const DeviceTime& other);
  double seconds() const {
    return static_cast<double>(ms) * 1e-3 + static_cast<double>(rest_us) * 1e-6;
  }
  friend bool operator==(const DeviceTime&, const DeviceTime&) = default;
};

// Between two changes every use grows by its devices times the time, so that nothing has to be done
// while nothing changes. Times are of the ledger's clock (FleetAccount.clock_ms). Value type.
class DeviceAccount {
 public:
  DeviceAccount() = default;
  explicit DeviceAccount(const v1::Account& stored);
  v1::Account Stored() const;

  // What the devices are used for now.
  const Devices& devices() const { return devices_; }
  // Where all of them have one use: that one. No use: there are none, or there are several.
  Use use() const { return devices_.size() == 1 ? devices_.begin()->first : Use(); }
  int64_t thousandths() const;  // of devices, in all

  // Adds the time up to `clock_ms`, which is `wall_ms` in Unix time. An earlier clock than before
  // adds nothing.
  void AddTimeUntil(int64_t clock_ms, int64_t wall_ms);
  // From the time up to which it is settled on, the devices are used so.
  void SetDevices(Devices devices) { devices_ = std::move(devices); }

  // In all, with what has gone by until `clock_ms`.
  DeviceTime Total(int64_t clock_ms) const;
  // The same by class and cause. `as_of_ms`: Unix time of `clock_ms`.
  v1::Usage View(int64_t clock_ms, int64_t as_of_ms) const;
  int64_t clock_ms() const { return clock_ms_; }
  bool has_period() const { return period_begin_ms_ != 0; }
  // The time of the period that ends now; the next one begins. Requires: settled, has_period().
  v1::UsageRow TakePeriod(int64_t end_ms);

 private:
  struct Time {
    DeviceTime total, period;
  };
  int64_t clock_ms_ = 0;
  int64_t period_begin_ms_ = 0;
  std::map<Use, Time> times_;
  Devices devices_;
};

// USAGE_CLASS_PRODUCTIVE as a share of the time in which devices were used; 0 where none was.
inline double GoodputOf(double productive, double unused, double all) {
  return all - unused > 0 ? productive / (all - unused) : 0;
}
// Whether nobody uses the device: it says nothing about how well devices are used.
constexpr bool IsUnused(v1::UsageClass usage_class) {
  return usage_class == v1::USAGE_CLASS_IDLE || usage_class == v1::USAGE_CLASS_SPARE ||
         usage_class == v1::USAGE_CLASS_AWAY;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DEVICE_ACCOUNT_H_
