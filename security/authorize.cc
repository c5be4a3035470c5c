#include "security/authorize.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace muster::security {
namespace {

constexpr Rule kRules[] = {
    {"JobService.Submit", Need::kSubmitter, /*of_queue=*/true, /*audited=*/true},
    {"JobService.SubmitJobs", Need::kSubmitter, true, true},
    {"JobService.SubmitArray", Need::kSubmitter, true, true},
    {"JobService.ChangeArray", Need::kSubmitter, true, true},
    {"JobService.GetJob", Need::kViewer, false, false},
    {"JobService.ListJobs", Need::kViewer, false, false},
    {"JobService.CancelJob", Need::kSubmitter, true, true},
    {"JobService.PreemptJob", Need::kSubmitter, true, true},
    {"JobService.SuspendJob", Need::kSubmitter, true, true},
    {"JobService.ResumeJob", Need::kSubmitter, true, true},
    {"JobService.HoldJob", Need::kSubmitter, true, true},
    {"JobService.ReleaseJob", Need::kSubmitter, true, true},
    {"JobService.RequeueJob", Need::kSubmitter, true, true},
    {"JobService.ResizeJob", Need::kSubmitter, true, true},
    {"JobService.GetUsage", Need::kViewer, false, false},
    {"JobService.GetRankMaps", Need::kViewer, false, false},
    {"JobService.GetQueues", Need::kViewer, false, false},
    {"JobService.ListWorkers", Need::kViewer, false, false},
    {"JobService.ListEvents", Need::kViewer, false, false},
    {"JobService.WatchEvents", Need::kViewer, false, false},
    {"JobService.Explain", Need::kViewer, false, false},
    {"JobService.WatchJob", Need::kViewer, false, false},
    {"JobService.GetLogs", Need::kViewer, true, false},
    {"JobService.GetCollectives", Need::kViewer, true, false},
    // The rank spends time on a trace.
    {"JobService.GetProfile", Need::kSubmitter, true, false},
    {"JobService.GetVersion", Need::kKnown, false, false},
    {"AdminService.RemoveWorker", Need::kOperator, false, true},
    {"AdminService.Cordon", Need::kOperator, false, true},
    {"AdminService.Uncordon", Need::kOperator, false, true},
    {"AdminService.Forgive", Need::kOperator, false, true},
    {"AdminService.Drain", Need::kOperator, false, true},
    {"AdminService.Reserve", Need::kOperator, false, true},
    {"AdminService.Unreserve", Need::kOperator, false, true},
    {"AdminService.ApplyQueues", Need::kOperator, false, true},
    {"AdminService.GetQueuePolicy", Need::kViewer, false, false},
    {"AdminService.Backup", Need::kAdmin, false, true},
    {"AdminService.Snapshot", Need::kAdmin, false, true},
    {"AdminService.CreateToken", Need::kAdmin, false, true},
    {"AdminService.ListTokens", Need::kAdmin, false, false},
    {"AdminService.RevokeToken", Need::kAdmin, false, true},
    {"AdminService.ListAudit", Need::kAdmin, false, false},
    // KEDA asks how many workers are wanted.
    {"ExternalScaler.IsActive", Need::kViewer, false, false},
    {"ExternalScaler.StreamIsActive", Need::kViewer, false, false},
    {"ExternalScaler.GetMetricSpec", Need::kViewer, false, false},
    {"ExternalScaler.GetMetrics", Need::kViewer, false, false},
    {"WorkerService.Session", Need::kWorker, false, false},
};

Role RoleOf(Need need) {
  switch (need) {
    case Need::kKnown:
    case Need::kWorker:
    case Need::kViewer:
      return Role::kViewer;
    case Need::kSubmitter:
      return Role::kSubmitter;
    case Need::kOperator:
      return Role::kOperator;
    case Need::kAdmin:
      return Role::kAdmin;
  }
  return Role::kAdmin;
}

std::string RolesOf(const Principal& caller) {
  if (caller.grants.empty()) return "has no role";
  std::string text = "has ";
  const char* comma = "";
  for (const Grant& grant : caller.grants) {
    absl::StrAppend(&text, comma, ToString(grant));
    comma = ", ";
  }
  return text;
}

// Whether they have `role` in `queue`; in all queues where that is empty.
bool Has(const Principal& caller, Role role, const std::string& queue) {
  return std::any_of(caller.grants.begin(), caller.grants.end(), [&](const Grant& grant) {
    return grant.role >= role && (grant.queue.empty() || grant.queue == queue);
  });
}
bool HasAnywhere(const Principal& caller, Role role) {
  return std::any_of(caller.grants.begin(), caller.grants.end(),
                     [&](const Grant& grant) { return grant.role >= role; });
}

}  // namespace

absl::Span<const Rule> Rules() { return kRules; }

const Rule* FindRule(absl::string_view method) {
  for (const Rule& rule : kRules) {
    if (method == rule.method) return &rule;
  }
  return nullptr;
}

absl::Status Authorize(const Principal& caller, const Rule& rule,
                       const std::optional<std::string>& queue) {
  if (caller.kind == Principal::Kind::kTrusted) return absl::OkStatus();
  if (caller.kind == Principal::Kind::kNobody) {
    return absl::UnauthenticatedError(
        "this coordinator asks who calls: give a certificate (--tls-cert, --tls-key) or a token "
        "(--token-file, $MUSTER_TOKEN); docs/security.md");
  }
  if (rule.need == Need::kKnown) return absl::OkStatus();
  const bool worker = caller.kind == Principal::Kind::kWorker;
  if (worker != (rule.need == Need::kWorker)) {
    return absl::PermissionDeniedError(absl::StrCat(
        rule.method, " is for ", worker ? "users" : "worker daemons", ", and the caller is ",
        caller.ToString(), worker ? "" : "; a worker's certificate names it (docs/security.md)"));
  }
  if (worker) return absl::OkStatus();
  const Role role = RoleOf(rule.need);
  const bool anywhere = rule.need == Need::kViewer ? !rule.of_queue || !queue.has_value()
                                                   : rule.of_queue && !queue.has_value();
  const bool may = anywhere ? HasAnywhere(caller, role) : Has(caller, role, queue.value_or(""));
  if (may) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat(rule.method, " needs the role ", Name(role),
                   !anywhere && queue.has_value() ? absl::StrCat(" in queue ", *queue) : "",
                   !rule.of_queue && role > Role::kViewer ? " in the whole cluster" : "", "; ",
                   caller.ToString(), " ", RolesOf(caller)));
}

absl::Status AuthorizeChange(const Principal& caller, const std::string& owner,
                             const std::string& queue) {
  if (caller.kind == Principal::Kind::kTrusted) return absl::OkStatus();
  if (caller.kind != Principal::Kind::kUser) {
    return absl::PermissionDeniedError(
        absl::StrCat("only users change jobs, and the caller is ", caller.ToString()));
  }
  if (Has(caller, Role::kOperator, queue)) return absl::OkStatus();
  if (!Has(caller, Role::kSubmitter, queue)) {
    return absl::PermissionDeniedError(
        absl::StrCat("changing a job needs the role submitter in queue ", queue, "; ",
                     caller.ToString(), " ", RolesOf(caller)));
  }
  if (owner == caller.name) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("the job belongs to ", owner.empty() ? "nobody" : absl::StrCat("user ", owner),
                   ": changing it needs the role operator in queue ", queue, "; ",
                   caller.ToString(), " ", RolesOf(caller)));
}

absl::Status AuthorizeHello(const Principal& caller, const std::string& worker) {
  if (caller.kind == Principal::Kind::kTrusted) return absl::OkStatus();
  if (caller.kind == Principal::Kind::kWorker && (caller.name == worker || caller.name == "*")) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat("hello.worker: the daemon calls itself ", worker,
                                                  ", and its certificate is that of ",
                                                  caller.ToString(), "; start it with --name ",
                                                  caller.name, " or give it its own certificate"));
}

}  // namespace muster::security
