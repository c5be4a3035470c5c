// Which part of a training run failed, as a payload of the status. Codes alone do not tell a full
// disk from a lost peer (both are kUnavailable), and the coordinator decides by this how to
// restart.
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
// Adds the domain to the status, unless it has one already or is OK.
absl::Status Mark(absl::Status status, FailureDomain domain);
FailureDomain DomainOf(const absl::Status& status);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_FAILURE_H_
