// Which part of a training run failed, carried by a status as a payload: codes alone do not tell a
// full disk from a vanished peer (both are kUnavailable), and who restarts the job must know.
#ifndef MUSTER_PARALLEL_TRAIN_FAILURE_H_
#define MUSTER_PARALLEL_TRAIN_FAILURE_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

enum class FailureDomain {
  kUnknown,        // not marked
  kData,           // a dataset is missing, corrupt or too small
  kStorage,        // a checkpoint cannot be written or read
  kMemory,         // the model and its activations do not fit
  kCommunication,  // a collective failed or a peer vanished
  kNumeric,        // loss or gradient norm is not finite
  kConfiguration,  // the options do not fit each other
  kDevice,         // the device is missing or faulty
};

absl::string_view Name(FailureDomain domain);  // "data", ...
// The same status with the domain; a mark that is there already wins. OK stays OK.
absl::Status Mark(absl::Status status, FailureDomain domain);
FailureDomain DomainOf(const absl::Status& status);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_FAILURE_H_
