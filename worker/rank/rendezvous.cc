#include "worker/rank/rendezvous.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "parallel/comm/flight_recorder.h"
#include "parallel/comm/tcp_socket.h"
#include "parallel/train/failure.h"
#include "worker/rank/agreement.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/hosts.h"
#include "worker/rank/progress_reporter.h"
#include "worker/rank/shared_files.h"

namespace muster::worker {
namespace {

// How long a file that another host has written may take to be seen on a network file system that
// caches.
constexpr absl::Duration kSharedFilePatience = absl::Seconds(5);

// Where this rank listens, and how its peers' messages call it.
parallel::TcpOptions TcpOptionsOf(const v1::RankAssignment& assignment, Logger& logger) {
  const RankHost host = HostOf(assignment);
  parallel::TcpOptions options;
  options.address = host.address;
  options.ports = assignment.rank_ports();
  options.label = absl::StrCat(host.worker, " on host ", host.host);
  options.on_event = [&logger](const std::string& what) { logger.Warning(what); };
  return options;
}

// Prints which hosts there are and which groups have ranks on several of them.
void PrintHosts(const std::vector<RankHost>& hosts, const parallel::Mesh& mesh,
                kernels::DeviceKind kind) {
  if (HostCount(hosts) == 1) return;
  for (const std::string& line : HostTable(hosts)) PrintLine(line);
  std::vector<absl::string_view> axes;
  for (const parallel::Axis axis : AxesAcrossHosts(mesh, hosts)) axes.push_back(Name(axis));
  PrintLine(absl::StrCat("groups along ", absl::StrJoin(axes, ", "), " cross hosts",
                         kind == kernels::DeviceKind::kCuda
                             ? ": their collectives go through NCCL, not through copy engines"
                             : ""));
}

// Checks that every host has the same files. Returns for each rank the lowest rank that has the
// same directory of checkpoints.
absl::StatusOr<std::vector<int>> CheckFiles(const v1::RankAssignment& assignment,
                                            const std::vector<RankHost>& hosts,
                                            parallel::Communicator& world, kernels::Device& device,
                                            FileSystem& files) {
  const v1::JobSpec& spec = assignment.spec();
  std::vector<Input> inputs;
  // The ranks of one worker see the same files.
  if (assignment.local_rank() == 0) {
    ASSIGN_OR_RETURN(inputs, DescribeInputs(spec, files));
  }
  RETURN_IF_ERROR(CheckInputs(world, device, hosts, inputs));
  if (!spec.has_checkpoint()) return std::vector<int>(hosts.size(), 0);
  const bool local = spec.checkpoint().storage() == v1::CHECKPOINT_STORAGE_LOCAL;
  const std::string directory =
      absl::StrCat(ResolvePath(spec, spec.checkpoint().path()), "/", assignment.job_id());
  ASSIGN_OR_RETURN(std::vector<int> groups,
                   GroupsByDirectory(world, device, files, hosts, directory, assignment.epoch(),
                                     local ? absl::ZeroDuration() : kSharedFilePatience));
  if (!local) RETURN_IF_ERROR(CheckShared(groups, hosts, directory));
  return groups;
}

}  // namespace

absl::StatusOr<std::unique_ptr<parallel::Communicator>> ConnectRanks(
    const v1::RankAssignment& assignment, parallel::KeyValueStore& store, kernels::Device& device,
    const FlightRecord& flight, FailureDeadline& deadline, Logger& logger) {
  const int rank = assignment.rank();
  const int size = assignment.world_size();
  absl::StatusOr<std::unique_ptr<parallel::Communicator>> communicator;
  if (size == 1) {
    communicator =
        std::move(parallel::MakeLocalCommunicators(1, parallel::TcpOptions().operation_timeout)[0]);
  } else if (device.kind() == kernels::DeviceKind::kCuda) {
    parallel::NcclOptions options = NcclOptionsOf(assignment.spec());
    options.host = TcpOptionsOf(assignment, logger);
    options.on_transports = [&logger](const std::string& what) { logger.Info(what); };
    options.on_failure = [recorder = flight.recorder(), &deadline](const absl::Status& why) {
      recorder->Freeze();
      deadline.Arm(why);
    };
    communicator = parallel::MakeNcclCommunicator(store, rank, size, device, options);
  } else {
    communicator =
        parallel::MakeTcpCommunicator(store, rank, size, TcpOptionsOf(assignment, logger));
  }
  if (!communicator.ok()) {
    return parallel::Mark(Annotate(communicator.status(), "bootstrap"),
                          parallel::FailureDomain::kCommunication);
  }
  return parallel::FlightRecorder::Record(*std::move(communicator), flight.recorder());
}

absl::Status CheckRanks(const v1::RankAssignment& assignment, parallel::Communicator& world,
                        FileSystem& files, EngineSetup& setup) {
  RETURN_IF_ERROR(
      CheckAgreement(world, *setup.device, assignment.spec(), setup.training->fingerprint()));
  if (assignment.world_size() == 1) return absl::OkStatus();
  const auto hosts = GatherHosts(world, *setup.device, HostOf(assignment));
  if (!hosts.ok()) {
    return parallel::Mark(Annotate(hosts.status(), "exchange of hosts"),
                          parallel::FailureDomain::kCommunication);
  }
  if (assignment.rank() == 0) PrintHosts(*hosts, *setup.mesh, setup.device->kind());
  ASSIGN_OR_RETURN(setup.options.checkpoint_groups,
                   CheckFiles(assignment, *hosts, world, *setup.device, files));
  return absl::OkStatus();
}

}  // namespace muster::worker
