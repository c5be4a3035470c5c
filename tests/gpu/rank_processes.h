// Ranks as processes of this machine, one per device, as the daemon runs them: for tests and
// benchmarks of several GPUs.
//
// Threads of one process would not do: CUDA calls of one thread (freeing memory, loading a kernel)
// may wait for the device of another thread, which deadlocks with NCCL's collectives.
#ifndef MUSTER_TESTS_GPU_RANK_PROCESSES_H_
#define MUSTER_TESTS_GPU_RANK_PROCESSES_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/flight_recorder.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/mesh/mesh.h"

namespace muster::testing {

// The process of one rank, which keeps its device and communicators from one work to the next.
class RankProcess {
 public:
  // Ranks exchange their addresses through files in `directory`.
  RankProcess(int rank, kernels::DeviceKind kind, std::string directory);

  int rank() const { return rank_; }
  kernels::DeviceKind kind() const { return kind_; }
  // The communicator of the first `ranks` ranks, over NCCL or TCP, with every call recorded. It is
  // made by the first call, which is a collective, and kept: connecting takes long.
  absl::StatusOr<parallel::Communicator*> World(int ranks, int thread_blocks_max = 0);
  // The groups of a mesh, made from such a communicator; `keep` keeps them for later calls.
  absl::StatusOr<std::shared_ptr<parallel::MeshGroups>> Groups(const parallel::Mesh& mesh,
                                                               int zero_shards,
                                                               int thread_blocks_max, bool keep);
  const parallel::FlightRecorder& recorder() const { return *recorder_; }

 private:
  const int rank_;
  const kernels::DeviceKind kind_;
  const std::string directory_;
  const std::shared_ptr<parallel::FlightRecorder> recorder_;
  std::unique_ptr<kernels::Device> device_;
  std::map<std::pair<int, int>, std::unique_ptr<parallel::Communicator>> worlds_;
  std::map<std::string, std::shared_ptr<parallel::MeshGroups>> groups_;
};

// Starts the rank processes by forking, so its process must have no threads and no CUDA context.
// Single-threaded.
class RankProcesses {
 public:
  // Runs in the process of a rank. Its text is returned to the caller of Run.
  using Work = std::function<absl::StatusOr<std::string>(RankProcess& self, int index)>;

  // `directory` exists and is empty.
  RankProcesses(int ranks, kernels::DeviceKind kind, std::string directory, Work work);
  ~RankProcesses();  // ends them

  // Runs work `index` on the first `ranks` ranks and returns their texts, or the first rank's
  // error. A rank that has not answered after `bound` writes its flight record to stderr and is
  // ended: kDeadlineExceeded. After an error the next call starts new processes.
  absl::StatusOr<std::vector<std::string>> Run(int index, int ranks, absl::Duration bound);

 private:
  struct Child {
    pid_t pid = -1;
    int socket = -1;
  };
  absl::Status Start();
  void Stop();
  [[noreturn]] void Serve(int rank, int socket);

  const int ranks_;
  const kernels::DeviceKind kind_;
  const std::string directory_;
  const Work work_;
  std::vector<Child> children_;
  int generation_ = 0;
};

}  // namespace muster::testing

#endif  // MUSTER_TESTS_GPU_RANK_PROCESSES_H_
