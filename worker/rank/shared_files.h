// What the ranks of an attempt read and write together must be the same files on every host: data
// sets, the weights to begin with, and the directory of checkpoints. A host that sees others would
// train on other data, or save a checkpoint that nobody can restore.
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

// Data sets by the size and CRC32C of their index and the size of their tokens; initialize_from by
// its files: JSON by size and CRC32C, safetensors by size and CRC32C of their headers. Reads those
// bytes. Marked with FailureDomain data.
absl::StatusOr<std::vector<Input>> DescribeInputs(const v1::JobSpec& spec, FileSystem& files);

// A collective of all ranks; every rank gets the same status. Only the first rank of every worker
// needs to describe its inputs; the others give none. kFailedPrecondition (data) names the field,
// the path, two workers and what they have.
absl::Status CheckInputs(parallel::Communicator& world, kernels::Device& device,
                         const std::vector<RankHost>& hosts, const std::vector<Input>& inputs);

// Which ranks have the same directory: `group[rank]` is the lowest rank that sees the same one.
// Found by files that the first rank of every worker writes into it and the others look for,
// whatever the directories are called. A collective of all ranks; the files are gone afterwards,
// and so are those that attempts before `epoch` have left. `patience`: how long a file may take to
// be seen, as on a network file system that caches. Status codes: FileSystem's, marked storage; the
// communicator's.
absl::StatusOr<std::vector<int>> GroupsByDirectory(parallel::Communicator& world,
                                                   kernels::Device& device, FileSystem& files,
                                                   const std::vector<RankHost>& hosts,
                                                   const std::string& directory, uint64_t epoch,
                                                   absl::Duration patience);

// OK when all ranks are of one group. kFailedPrecondition (storage) names two workers whose
// directories differ and what to do.
absl::Status CheckShared(const std::vector<int>& groups, const std::vector<RankHost>& hosts,
                         const std::string& directory);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_SHARED_FILES_H_
