// How a rank gets to know its peers: it connects to them, checks that all ranks are about to do the
// same work on the same files, and divides them into the groups of the mesh. Every function is a
// collective over all ranks of the attempt.
#ifndef MUSTER_WORKER_RANK_RENDEZVOUS_H_
#define MUSTER_WORKER_RANK_RENDEZVOUS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "base/log.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"
#include "worker/rank/engine_setup.h"
#include "worker/rank/failure_deadline.h"
#include "worker/rank/flight_record.h"

namespace muster::worker {

// The communicator of all ranks, recorded by `flight`: NCCL between GPUs, TCP between CPU devices.
// Addresses are exchanged through `store`. A collective that fails on a GPU arms `deadline`,
// because the training thread may wait for the device. `deadline` and `logger` must outlive the
// result. Failures are marked with FailureDomain communication.
absl::StatusOr<std::unique_ptr<parallel::Communicator>> ConnectRanks(
    const v1::RankAssignment& assignment, parallel::KeyValueStore& store, kernels::Device& device,
    const FlightRecord& flight, FailureDeadline& deadline, Logger& logger);

// Checks that spec and training data are the same on all ranks (agreement.h) and that their hosts
// have the same files (shared_files.h); fills in setup.options.checkpoint_groups. Rank 0 prints
// which hosts there are. Status codes and marks are those of the two headers, and communication.
absl::Status CheckRanks(const v1::RankAssignment& assignment, parallel::Communicator& world,
                        FileSystem& files, EngineSetup& setup);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_RENDEZVOUS_H_
