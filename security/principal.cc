#include "security/principal.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace muster::security {

const char* Name(Role role) {
  switch (role) {
    case Role::kViewer:
      return "viewer";
    case Role::kSubmitter:
      return "submitter";
    case Role::kOperator:
      return "operator";
    case Role::kAdmin:
      return "admin";
  }
  return "unknown";
}

absl::StatusOr<Grant> ParseGrant(absl::string_view text) {
  const size_t at = text.find('@');
  const absl::string_view name = text.substr(0, at);
  for (const Role role : {Role::kViewer, Role::kSubmitter, Role::kOperator, Role::kAdmin}) {
    if (name != Name(role)) continue;
    Grant grant;
    grant.role = role;
    if (at == absl::string_view::npos) return grant;
    grant.queue = std::string(text.substr(at + 1));
    if (grant.queue.empty() || grant.queue.size() > kPrincipalNameBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("role '", text, "': a queue of 1 to 253 bytes must follow the @"));
    }
    if (role == Role::kAdmin) {
      return absl::InvalidArgumentError(
          absl::StrCat("role '", text, "': an admin is one of the whole cluster; name no queue"));
    }
    return grant;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("role '", text.substr(0, 64),
                   "' is not viewer, submitter, operator or admin, nor one of these with @QUEUE"));
}

std::string ToString(const Grant& grant) {
  return grant.queue.empty() ? Name(grant.role) : absl::StrCat(Name(grant.role), "@", grant.queue);
}

std::string Principal::ToString() const {
  switch (kind) {
    case Kind::kTrusted:
      return "client";
    case Kind::kNobody:
      return "nobody";
    case Kind::kUser:
      return absl::StrCat("user ", name);
    case Kind::kWorker:
      return absl::StrCat("worker ", name);
  }
  return "nobody";
}

absl::Status CheckPrincipalName(absl::string_view name) {
  bool printable = true;
  for (const char c : name) printable &= absl::ascii_isgraph(static_cast<unsigned char>(c));
  if (name.empty() || name.size() > kPrincipalNameBytesMax || !printable) {
    return absl::InvalidArgumentError(
        absl::StrCat("a name of ", name.size(),
                     " bytes: 1 to 253 printable ASCII characters without spaces are possible"));
  }
  return absl::OkStatus();
}

}  // namespace muster::security
