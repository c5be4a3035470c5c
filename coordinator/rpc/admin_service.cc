#include "coordinator/rpc/admin_service.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/requests.h"
#include "coordinator/rpc/slots.h"
#include "coordinator/rpc/status.h"
#include "coordinator/rpc/streams.h"
#include "coordinator/shell.h"
#include "muster/v1/admin_service.grpc.pb.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;

int64_t BytesBelow(const std::string& directory) {
  int64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(directory, error)) {
    std::error_code of_file;
    const auto size = entry.is_regular_file(of_file) ? entry.file_size(of_file) : 0;
    if (!of_file) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

class AdminService : public v1::AdminService::CallbackService {
 public:
  AdminService(Shell& shell, Slots& slots, std::string backups)
      : shell_(shell),
        slots_(slots),
        backups_(std::move(backups)),
        snapshots_((fs::path(backups_).parent_path() / "snapshots").string()) {
    // What a coordinator left that ended while one was read.
    std::error_code error;
    if (!backups_.empty()) fs::remove_all(snapshots_, error);
  }

  grpc::ServerWriteReactor<v1::SnapshotChunk>* Snapshot(grpc::CallbackServerContext* context,
                                                        const v1::SnapshotRequest*) override {
    return StartSnapshotStream(shell_, snapshots_,
                               slots_.Take(SlotKind::kFollower, context->peer()));
  }

  grpc::ServerUnaryReactor* RemoveWorker(grpc::CallbackServerContext* context,
                                         const v1::RemoveWorkerRequest* request,
                                         v1::RemoveWorkerResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (request->name().empty() || request->name().size() > kNameBytesMax) {
      return Finish(reactor, "RemoveWorker",
                    absl::InvalidArgumentError(
                        absl::StrCat("name: 1 to ", kNameBytesMax, " bytes are required")));
    }
    shell_.RemoveWorker(request->name(), ActorOf(context->peer()),
                        [this, reactor](const absl::StatusOr<JobReply>& reply) {
                          Finish(reactor, "RemoveWorker", reply.status());
                        });
    return reactor;
  }

  grpc::ServerUnaryReactor* ApplyQueues(grpc::CallbackServerContext* context,
                                        const v1::ApplyQueuesRequest* request,
                                        v1::ApplyQueuesResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    shell_.ApplyQueues(request->policy(), ActorOf(context->peer()),
                       [this, reactor](const absl::StatusOr<JobReply>& reply) {
                         Finish(reactor, "ApplyQueues", reply.status());
                       });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetQueuePolicy(grpc::CallbackServerContext* context,
                                           const v1::GetQueuePolicyRequest*,
                                           v1::QueuePolicy* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    shell_.GetQueuePolicy([this, reactor, response](absl::StatusOr<v1::QueuePolicy> policy) {
      if (policy.ok()) *response = *std::move(policy);
      Finish(reactor, "GetQueuePolicy", policy.status());
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Backup(grpc::CallbackServerContext* context,
                                   const v1::BackupRequest* request,
                                   v1::BackupResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    std::error_code error;
    fs::create_directories(backups_, error);
    const auto known = std::distance(fs::directory_iterator(backups_, error), {});
    if (error) {
      return Finish(reactor, "Backup",
                    absl::UnavailableError(absl::StrCat(backups_, ": ", error.message())));
    }
    if (known >= kBackupsMax) {
      return Finish(
          reactor, "Backup",
          absl::ResourceExhaustedError(absl::StrCat(
              backups_, " holds ", known, " backups, as many as may be; remove old ones")));
    }
    const std::string path = absl::StrCat(
        backups_, "/", absl::FormatTime("%Y%m%dT%H%M%E3SZ", absl::Now(), absl::UTCTimeZone()));
    shell_.Backup(path, [this, reactor, response, path](const absl::Status& status) {
      response->set_path(path);
      response->set_bytes(BytesBelow(path));
      Finish(reactor, "Backup", status);
    });
    return reactor;
  }

 private:
  grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor, const char* method,
                                   const absl::Status& status) {
    shell_.metrics().RpcDone(method, absl::StatusCodeToString(status.code()));
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  Shell& shell_;
  Slots& slots_;
  const std::string backups_;
  const std::string snapshots_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAdminService(Shell& shell, Slots& slots,
                                                const std::string& backups) {
  return std::make_unique<AdminService>(shell, slots, backups);
}

}  // namespace muster::coordinator
