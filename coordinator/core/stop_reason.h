// Why an attempt stops, or ranks of it are replaced.
#ifndef MUSTER_COORDINATOR_CORE_STOP_REASON_H_
#define MUSTER_COORDINATOR_CORE_STOP_REASON_H_

#include <cstdint>
#include <string>

#include "muster/v1/job.pb.h"

namespace muster::coordinator {

struct StopReason {
  v1::Cause cause;
  std::string message;
  int32_t rank = -1;
  int32_t peer = -1;        // the rank that `rank` could not reach; -1 = that is not why
  bool yields = false;      // not for a failure: the job goes back to its queue
  bool resizes = false;     // it yields, and slots are kept for it
  std::string worker = {};  // that is at fault as a whole
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_STOP_REASON_H_
