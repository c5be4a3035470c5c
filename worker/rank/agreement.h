// Checks that all ranks of an attempt are about to do the same work: a rank with another spec, or
// with other data, would corrupt the run silently or hang it.
#ifndef MUSTER_WORKER_RANK_AGREEMENT_H_
#define MUSTER_WORKER_RANK_AGREEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device.h"
#include "muster/v1/spec.pb.h"
#include "parallel/comm/communicator.h"

namespace muster::worker {

// Compares hashes of the spec, and fingerprints of the training data (Sampler::fingerprint), with
// those of rank 0. A collective over all ranks; every rank gets the same status. Marked with a
// FailureDomain: kInvalidArgument (configuration) names the ranks and the hashes, and each field in
// which the first of them differs, with both values; kFailedPrecondition (data) the ranks and the
// fingerprints. Else that of the communicator.
absl::Status CheckAgreement(parallel::Communicator& world, kernels::Device& device,
                            const v1::JobSpec& spec, uint64_t data_fingerprint);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_AGREEMENT_H_
