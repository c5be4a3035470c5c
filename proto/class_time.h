// What a class of device time counts.
#ifndef MUSTER_PROTO_CLASS_TIME_H_
#define MUSTER_PROTO_CLASS_TIME_H_

#include "muster/v1/job.pb.h"

namespace muster {

// The devices that are in the class now, shared ones by their shares: 1.5. A coordinator of a
// version that did not share devices says how many whole ones there are.
inline double DevicesIn(const v1::ClassTime& time) {
  return time.thousandths() > 0 ? static_cast<double>(time.thousandths()) / 1000
                                : static_cast<double>(time.devices());
}

}  // namespace muster

#endif  // MUSTER_PROTO_CLASS_TIME_H_
