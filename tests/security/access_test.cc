#include "security/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"

namespace muster::security {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST(Access, GivesRolesToUsersGroupsAndEveryone) {
  const auto access = ParseAccess(R"(
users:
  alice: [operator@research]
groups:
  ml: [submitter, viewer]
everyone: [viewer]
)");
  ASSERT_OK(access.status());
  Principal alice{Principal::Kind::kUser, "alice", {}};
  access->AddGrants({"ml", "other"}, alice);
  EXPECT_THAT(alice.grants,
              UnorderedElementsAre(Grant{Role::kOperator, "research"}, Grant{Role::kSubmitter, ""},
                                   Grant{Role::kViewer, ""}, Grant{Role::kViewer, ""}));
  Principal bob{Principal::Kind::kUser, "bob", {}};
  access->AddGrants({}, bob);
  EXPECT_THAT(bob.grants, UnorderedElementsAre(Grant{Role::kViewer, ""}));
}

TEST(Access, AnEmptyFileGivesNothing) {
  const auto access = ParseAccess("");
  ASSERT_OK(access.status());
  EXPECT_TRUE(access->users.empty() && access->everyone.empty() && !access->oidc.has_value());
}

TEST(Access, KeysAreAFileOrAnAddress) {
  const auto issuer = [](const std::string& jwks) {
    const auto access =
        ParseAccess(absl::StrCat("oidc:\n  issuer: x\n  audience: y\n  jwks: ", jwks, "\n"));
    EXPECT_OK(access.status());
    return *access->oidc;
  };
  EXPECT_FALSE(issuer("/etc/muster/jwks.json").KeysAreFetched());
  EXPECT_TRUE(issuer("https://example.org/keys").KeysAreFetched());
  EXPECT_TRUE(issuer("http://127.0.0.1:8080/keys").KeysAreFetched());
}

TEST(Access, ErrorsNameTheLine) {
  const struct {
    const char *text, *says;
  } cases[] = {
      {"users:\n  alice: [root]\n", "line 2: users.alice: role 'root'"},
      {"users:\n  alice: admin\n", "line 2: users.alice: a list"},
      {"\nroles: []\n", "line 2: 'roles' is unknown"},
      {"users: [a]\n", "line 1: users: a map"},
      {"users:\n  a: [viewer]\n  a: [admin]\n", "users.a is twice"},
      {"oidc:\n  issuer: x\n  audience: y\n", "oidc.jwks is missing"},
      {"oidc:\n  secret: x\n", "oidc.secret is unknown"},
      {"oidc:\n  issuer: x\n  audience: y\n  jwks: z\n  clock_skew: 1h\n", "oidc.clock_skew"},
      {"oidc:\n  issuer: x\n  audience: y\n  jwks: http://example.org/k\n", "over plain HTTP"},
      {"oidc:\n  issuer: x\n  audience: y\n  jwks: http://localhost.example.org/k\n", "oidc.jwks"},
      {"oidc:\n  issuer: x\n  audience: y\n  jwks: ftp://example.org/k\n", "oidc.jwks"},
      {"users: {a: [viewer]\n", "line"},
      {"- a\n", "users, groups"},
  };
  for (const auto& [text, says] : cases) {
    EXPECT_THAT(ParseAccess(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(says)))
        << text;
  }
}

}  // namespace
}  // namespace muster::security
