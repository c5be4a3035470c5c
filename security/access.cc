#include "security/access.h"

#include <yaml-cpp/yaml.h>

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "security/fetch.h"

namespace muster::security {
namespace {

constexpr absl::Duration kClockSkewMax = absl::Minutes(10);

absl::Status At(const YAML::Node& node, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("line ", node.Mark().line + 1, ": ", what));
}

absl::StatusOr<std::vector<Grant>> Grants(const YAML::Node& node, const std::string& where) {
  if (!node.IsSequence()) return At(node, absl::StrCat(where, ": a list of roles is expected"));
  std::vector<Grant> out;
  for (const YAML::Node& one : node) {
    if (!one.IsScalar()) return At(one, absl::StrCat(where, ": a role is expected"));
    absl::StatusOr<Grant> grant = ParseGrant(one.Scalar());
    if (!grant.ok()) return At(one, absl::StrCat(where, ": ", grant.status().message()));
    out.push_back(*std::move(grant));
  }
  return out;
}

absl::StatusOr<std::map<std::string, std::vector<Grant>>> Table(const YAML::Node& node,
                                                                const std::string& where) {
  if (!node.IsMap()) return At(node, absl::StrCat(where, ": a map of names to roles is expected"));
  std::map<std::string, std::vector<Grant>> out;
  for (const auto& entry : node) {
    const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "";
    if (name.empty()) return At(entry.first, absl::StrCat(where, ": a name is expected"));
    if (out.contains(name))
      return At(entry.first, absl::StrCat(where, ".", name, " is twice here"));
    ASSIGN_OR_RETURN(out[name], Grants(entry.second, absl::StrCat(where, ".", name)));
  }
  return out;
}

absl::StatusOr<Issuer> OidcOf(const YAML::Node& node) {
  if (!node.IsMap()) return At(node, "oidc: a map is expected");
  Issuer out;
  std::string skew;
  const std::map<std::string, std::string*> fields = {
      {"issuer", &out.issuer},         {"audience", &out.audience},         {"jwks", &out.jwks},
      {"user_claim", &out.user_claim}, {"groups_claim", &out.groups_claim}, {"clock_skew", &skew}};
  for (const auto& entry : node) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    const auto field = fields.find(key);
    if (field == fields.end()) return At(entry.first, absl::StrCat("oidc.", key, " is unknown"));
    if (!entry.second.IsScalar() || entry.second.Scalar().empty()) {
      return At(entry.second, absl::StrCat("oidc.", key, ": a text is expected"));
    }
    *field->second = entry.second.Scalar();
  }
  for (const char* required : {"issuer", "audience", "jwks"}) {
    if (fields.at(required)->empty())
      return At(node, absl::StrCat("oidc.", required, " is missing"));
  }
  if (out.KeysAreFetched()) {
    const absl::Status url = CheckKeyUrl(out.jwks);
    if (!url.ok()) return At(node, absl::StrCat("oidc.jwks: ", url.message()));
  }
  if (!skew.empty() && (!absl::ParseDuration(skew, &out.clock_skew) ||
                        out.clock_skew < absl::ZeroDuration() || out.clock_skew > kClockSkewMax)) {
    return At(node, absl::StrCat("oidc.clock_skew: '", skew, "' is not between 0s and 10m"));
  }
  return out;
}

absl::StatusOr<Access> Parse(const std::string& text) {
  const YAML::Node root = YAML::Load(text);
  Access out;
  if (root.IsNull()) return out;
  if (!root.IsMap()) return At(root, "users, groups, everyone and oidc are expected");
  for (const auto& entry : root) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    if (key == "users") {
      ASSIGN_OR_RETURN(out.users, Table(entry.second, key));
    } else if (key == "groups") {
      ASSIGN_OR_RETURN(out.groups, Table(entry.second, key));
    } else if (key == "everyone") {
      ASSIGN_OR_RETURN(out.everyone, Grants(entry.second, key));
    } else if (key == "oidc") {
      ASSIGN_OR_RETURN(out.oidc, OidcOf(entry.second));
    } else {
      return At(entry.first,
                absl::StrCat("'", key, "' is unknown; users, groups, everyone and oidc are known"));
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<Access> ParseAccess(const std::string& text) {
  try {
    return Parse(text);
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("line ", error.mark.line + 1, ": ", error.msg));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
}

void Access::AddGrants(const std::vector<std::string>& groups_of_user, Principal& user) const {
  const auto add = [&user](const std::vector<Grant>& grants) {
    user.grants.insert(user.grants.end(), grants.begin(), grants.end());
  };
  add(everyone);
  if (const auto own = users.find(user.name); own != users.end()) add(own->second);
  for (const std::string& group : groups_of_user) {
    if (const auto found = groups.find(group); found != groups.end()) add(found->second);
  }
}

}  // namespace muster::security
