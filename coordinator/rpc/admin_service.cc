#include "coordinator/rpc/admin_service.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/requests.h"
#include "coordinator/rpc/status.h"
#include "coordinator/rpc/streams.h"
#include "coordinator/shell.h"
#include "muster/v1/admin_service.grpc.pb.h"
#include "proto/time.h"
#include "security/token.h"

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
  AdminService(Shell& shell, Gate& gate, std::string backups)
      : shell_(shell),
        gate_(gate),
        backups_(std::move(backups)),
        snapshots_((fs::path(backups_).parent_path() / "snapshots").string()) {
    // What a coordinator left that ended while one was read.
    std::error_code error;
    if (!backups_.empty()) fs::remove_all(snapshots_, error);
  }

  grpc::ServerWriteReactor<v1::SnapshotChunk>* Snapshot(grpc::CallbackServerContext* context,
                                                        const v1::SnapshotRequest*) override {
    absl::StatusOr<Permit> permit =
        gate_.Open(*context, "AdminService.Snapshot", SlotKind::kFollower);
    return StartSnapshotStream(shell_, snapshots_, std::move(permit));
  }

  grpc::ServerUnaryReactor* RemoveWorker(grpc::CallbackServerContext* context,
                                         const v1::RemoveWorkerRequest* request,
                                         v1::RemoveWorkerResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "AdminService.RemoveWorker", request->name());
    if (!caller.ok()) return Finish(reactor, "RemoveWorker", caller.status());
    if (request->name().empty() || request->name().size() > kNameBytesMax) {
      return FinishAudited(reactor, *caller, "RemoveWorker",
                           absl::InvalidArgumentError(
                               absl::StrCat("name: 1 to ", kNameBytesMax, " bytes are required")));
    }
    shell_.RemoveWorker(request->name(), *caller,
                        [this, reactor](const absl::StatusOr<JobReply>& reply) {
                          Finish(reactor, "RemoveWorker", reply.status());
                        });
    return reactor;
  }

  grpc::ServerUnaryReactor* ApplyQueues(grpc::CallbackServerContext* context,
                                        const v1::ApplyQueuesRequest* request,
                                        v1::ApplyQueuesResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, "AdminService.ApplyQueues");
    if (!caller.ok()) return Finish(reactor, "ApplyQueues", caller.status());
    shell_.ApplyQueues(
        request->policy(), *caller,
        [this, reactor, response](const absl::StatusOr<JobReply>& reply) {
          if (reply.ok()) {
            *response->mutable_warnings() = {reply->warnings.begin(), reply->warnings.end()};
          }
          Finish(reactor, "ApplyQueues", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetQueuePolicy(grpc::CallbackServerContext* context,
                                           const v1::GetQueuePolicyRequest*,
                                           v1::QueuePolicy* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::Status may = gate_.Admit(*context, "AdminService.GetQueuePolicy").status();
    if (!may.ok()) return Finish(reactor, "GetQueuePolicy", may);
    shell_.GetQueuePolicy([this, reactor, response](absl::StatusOr<v1::QueuePolicy> policy) {
      const absl::Status got = policy.status();
      if (got.ok()) *response = *std::move(policy);
      Finish(reactor, "GetQueuePolicy", got);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Backup(grpc::CallbackServerContext* context,
                                   const v1::BackupRequest* request,
                                   v1::BackupResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, "AdminService.Backup");
    if (!caller.ok()) return Finish(reactor, "Backup", caller.status());
    std::error_code error;
    fs::create_directories(backups_, error);
    const auto known = std::distance(fs::directory_iterator(backups_, error), {});
    if (error) {
      return FinishAudited(reactor, *caller, "Backup",
                           absl::UnavailableError(absl::StrCat(backups_, ": ", error.message())));
    }
    if (known >= kBackupsMax) {
      return FinishAudited(
          reactor, *caller, "Backup",
          absl::ResourceExhaustedError(absl::StrCat(
              backups_, " holds ", known, " backups, as many as may be; remove old ones")));
    }
    const std::string path = absl::StrCat(
        backups_, "/", absl::FormatTime("%Y%m%dT%H%M%E3SZ", absl::Now(), absl::UTCTimeZone()));
    shell_.Backup(path, [this, reactor, response, path, caller](const absl::Status& status) {
      response->set_path(path);
      response->set_bytes(BytesBelow(path));
      FinishAudited(reactor, *caller, "Backup", status);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* Cordon(grpc::CallbackServerContext* context,
                                   const v1::CordonRequest* request,
                                   v1::FleetResponse* response) override {
    return ChangeFleet("AdminService.Cordon", context, *request, response);
  }
  grpc::ServerUnaryReactor* Uncordon(grpc::CallbackServerContext* context,
                                     const v1::UncordonRequest* request,
                                     v1::FleetResponse* response) override {
    return ChangeFleet("AdminService.Uncordon", context, *request, response);
  }
  grpc::ServerUnaryReactor* Forgive(grpc::CallbackServerContext* context,
                                    const v1::ForgiveRequest* request,
                                    v1::FleetResponse* response) override {
    return ChangeFleet("AdminService.Forgive", context, *request, response);
  }
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::FleetResponse* response) override {
    return ChangeFleet("AdminService.Drain", context, *request, response);
  }
  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext* context,
                                    const v1::ReserveRequest* request,
                                    v1::FleetResponse* response) override {
    return ChangeFleet("AdminService.Reserve", context, *request, response);
  }
  grpc::ServerUnaryReactor* Unreserve(grpc::CallbackServerContext* context,
                                      const v1::UnreserveRequest* request,
                                      v1::FleetResponse* response) override {
    return ChangeFleet("AdminService.Unreserve", context, *request, response);
  }

  grpc::ServerUnaryReactor* CreateToken(grpc::CallbackServerContext* context,
                                        const v1::CreateTokenRequest* request,
                                        v1::CreateTokenResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "AdminService.CreateToken", request->user());
    if (!caller.ok()) return Finish(reactor, "CreateToken", caller.status());
    const security::TokenParts parts = security::NewToken();
    absl::StatusOr<v1::TokenRow> row = RowOf(*request, parts);
    if (!row.ok()) return FinishAudited(reactor, *caller, "CreateToken", row.status());
    response->set_token(security::TokenText(parts));
    shell_.CreateToken(*std::move(row), *caller,
                       [this, reactor, response, id = parts.id](absl::StatusOr<JobReply> reply) {
                         const auto made = shell_.tokens().Find(id);
                         if (made.has_value()) *response->mutable_described() = made->token();
                         if (!reply.ok()) response->clear_token();
                         Finish(reactor, "CreateToken", reply.status());
                       });
    return reactor;
  }

  grpc::ServerUnaryReactor* RevokeToken(grpc::CallbackServerContext* context,
                                        const v1::RevokeTokenRequest* request,
                                        v1::Token* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "AdminService.RevokeToken", request->id().substr(0, kNameBytesMax));
    if (!caller.ok()) return Finish(reactor, "RevokeToken", caller.status());
    shell_.RevokeToken(
        request->id(), *caller,
        [this, reactor, response, id = request->id()](absl::StatusOr<JobReply> reply) {
          if (const auto row = shell_.tokens().Find(id)) *response = row->token();
          Finish(reactor, "RevokeToken", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* ListTokens(grpc::CallbackServerContext* context,
                                       const v1::ListTokensRequest*,
                                       v1::ListTokensResponse* response) override {
    const absl::Status may = gate_.Admit(*context, "AdminService.ListTokens").status();
    if (may.ok()) {
      std::vector<v1::Token> tokens = shell_.tokens().List();
      std::stable_sort(tokens.begin(), tokens.end(),
                       [](const v1::Token& a, const v1::Token& b) { return a.user() < b.user(); });
      for (v1::Token& token : tokens) *response->add_tokens() = std::move(token);
    }
    return Finish(context->DefaultReactor(), "ListTokens", may);
  }

  grpc::ServerUnaryReactor* ListAudit(grpc::CallbackServerContext* context,
                                      const v1::ListAuditRequest* request,
                                      v1::ListAuditResponse* response) override {
    const absl::Status may = gate_.Admit(*context, "AdminService.ListAudit").status();
    return Finish(context->DefaultReactor(), "ListAudit",
                  may.ok() ? PageOfAudit(*request, *response) : may);
  }

 private:
  // What a request is about, for the audit log: a reservation, or workers.
  static std::string TargetOf(const FleetEvent::Request& request) {
    return std::visit(
        [](const auto& of) -> std::string {
          if constexpr (requires { of.reservation(); }) {
            return of.reservation().name().substr(0, kNameBytesMax);
          } else if constexpr (requires { of.name(); }) {
            return of.name().substr(0, kNameBytesMax);
          } else {
            return absl::StrJoin(of.workers(), " ").substr(0, kNameBytesMax);
          }
        },
        request);
  }
  // The core checks the request. `rule`: the RPC's, "AdminService.Drain".
  grpc::ServerUnaryReactor* ChangeFleet(const char* rule, grpc::CallbackServerContext* context,
                                        FleetEvent::Request request, v1::FleetResponse* response) {
    const char* const method = rule + sizeof("AdminService.") - 1;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, rule, TargetOf(request));
    if (!caller.ok()) return Finish(reactor, method, caller.status());
    shell_.ChangeFleet(std::move(request), *caller,
                       [this, method, reactor, response](absl::StatusOr<JobReply> reply) {
                         if (reply.ok()) {
                           for (v1::Worker& worker : reply->workers) {
                             *response->add_workers() = std::move(worker);
                           }
                         }
                         Finish(reactor, method, reply.status());
                       });
    return reactor;
  }

  static absl::StatusOr<v1::TokenRow> RowOf(const v1::CreateTokenRequest& request,
                                            const security::TokenParts& parts) {
    v1::TokenRow row;
    if (const absl::Status named = security::CheckPrincipalName(request.user()); !named.ok()) {
      return Annotate(named, "user");
    }
    if (request.roles().empty() || request.roles_size() > kTokenRolesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("roles: 1 to ", kTokenRolesMax, " are required"));
    }
    for (const std::string& role : request.roles()) {
      absl::StatusOr<security::Grant> grant = security::ParseGrant(role);
      if (!grant.ok()) return grant.status();
      row.mutable_token()->add_roles(security::ToString(*grant));
    }
    const absl::Duration lifetime = absl::Seconds(request.lifetime_s());
    if (lifetime < kTokenLifetimeMin || lifetime > kTokenLifetimeMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("lifetime_s: ", request.lifetime_s(), " is not in ",
                       absl::ToInt64Seconds(kTokenLifetimeMin), " to ",
                       absl::ToInt64Seconds(kTokenLifetimeMax)));
    }
    row.mutable_token()->set_id(parts.id);
    row.mutable_token()->set_user(request.user());
    *row.mutable_token()->mutable_expires() = ToProto(absl::Now() + lifetime);
    row.set_secret_hash(security::HashOf(parts.secret));
    return row;
  }

  absl::Status PageOfAudit(const v1::ListAuditRequest& request, v1::ListAuditResponse& response) {
    ASSIGN_OR_RETURN(const int size, PageSize(request.page_size()));
    ASSIGN_OR_RETURN(const uint64_t after, Position(request.page_token(), 'a'));
    const absl::Time since =
        request.has_since() ? FromProto(request.since()) : absl::InfinitePast();
    absl::Status bad;
    uint64_t last = after;
    size_t bytes = 0;
    int rows = 0;
    bool more = false;
    RETURN_IF_ERROR(shell_.store().Scan(Table::kAudit, schema::EncodeU64(after + 1), "",
                                        [&](const std::string& key, const std::string& value) {
                                          more = response.entries_size() == size ||
                                                 bytes > kPageBytesMax ||
                                                 rows++ == kEventRowsPerPageMax;
                                          if (more) return false;
                                          v1::AuditEntry entry;
                                          bad = schema::Parse(Table::kAudit, key, value, entry);
                                          if (!bad.ok()) return false;
                                          last = entry.sequence();
                                          if (FromProto(entry.time()) >= since) {
                                            bytes += value.size();
                                            *response.add_entries() = std::move(entry);
                                          }
                                          return true;
                                        }));
    if (more) response.set_next_page_token(absl::StrCat("a", last));
    return bad;
  }

  // Of an audited call that the core has not seen, whether or not it failed.
  grpc::ServerUnaryReactor* FinishAudited(grpc::ServerUnaryReactor* reactor, const Caller& caller,
                                          const char* method, const absl::Status& status) {
    gate_.Audit(caller, status);
    return Finish(reactor, method, status);
  }
  grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor, const char* method,
                                   const absl::Status& status) {
    shell_.metrics().RpcDone(method, absl::StatusCodeToString(status.code()));
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  Shell& shell_;
  Gate& gate_;
  const std::string backups_;
  const std::string snapshots_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeAdminService(Shell& shell, Gate& gate,
                                                const std::string& backups) {
  return std::make_unique<AdminService>(shell, gate, backups);
}

}  // namespace muster::coordinator
