// Checks that every host has the same files where the ranks of an attempt need that: data sets,
// initial weights and the directory of checkpoints. A host with different files would train on
// other data, or save a part of a checkpoint where no one else finds it.
#ifndef MUSTER_WORKER_RANK_SHARED_FILES_H_
#define MUSTER_WORKER_RANK_SHARED_FILES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file_system.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"
#include "worker/rank/hosts.h"

namespace muster::worker {

// One input of the job as this host has it.
struct Input {
  std::string field;    // of the spec: "engine.data.train[0].path"
  std::string path;     // absolute
  std::string content;  // sizes and checksums, for comparison and for people
};

// Describes a data set by the size and CRC32C of its index and the size of its tokens, and
// initialize_from by its files: JSON by size and CRC32C, safetensors by size and CRC32C of their
// headers. Only those bytes are read. Status codes are FileSystem's, marked with FailureDomain
// data.
absl::StatusOr<std::vector<Input>> DescribeInputs(const v1::JobSpec& spec, FileSystem& files);

// A collective of all ranks; every rank gets the same status. Only the first rank of every worker
// needs to describe its inputs; the others give none. kFailedPrecondition (data) names the field,
// the path, two workers and what they have.
absl::Status CheckInputs(parallel::Communicator& world, kernels::Device& device,
                         const std::vector<RankHost>& hosts, const std::vector<Input>& inputs);

// Finds out which ranks have the same directory: result[rank] is the lowest rank that has the same
// one. The first rank of every worker writes a file into it and looks for the files of lower ranks,
// so paths and mounts need not be alike. Sharing is transitive: a rank belongs to the group of any
// rank whose file it sees. A collective of all ranks. Removes its files, and those that attempts
// before `epoch` left. `patience` is how long a rank looks for files that a caching network file
// system may still hide. Status codes are FileSystem's, marked with FailureDomain storage, or the
// communicator's.
absl::StatusOr<std::vector<int>> GroupsByDirectory(parallel::Communicator& world,
                                                   kernels::Device& device, FileSystem& files,
                                                   const std::vector<RankHost>& hosts,
                                                   const std::string& directory, uint64_t epoch,
                                                   absl::Duration patience);

// OK when all ranks are in one group. kFailedPrecondition (storage) names two workers whose
// directories differ and what to do.
absl::Status CheckShared(const std::vector<int>& groups, const std::vector<RankHost>& hosts,
                         const std::string& directory);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_SHARED_FILES_H_
