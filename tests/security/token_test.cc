#include "security/token.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace muster::security {
namespace {

TEST(Token, IsReadBack_AndNoTwoAreEqual) {
  const TokenParts token = NewToken();
  const auto parts = ParseToken(TokenText(token));
  ASSERT_TRUE(parts.has_value());
  EXPECT_EQ(parts->id, token.id);
  EXPECT_EQ(parts->secret, token.secret);
  const TokenParts other = NewToken();
  EXPECT_NE(other.id, token.id);
  EXPECT_NE(other.secret, token.secret);
  EXPECT_GE(token.secret.size(), 43u);  // 256 bits
}

TEST(Token, MalformedOnesAreNone) {
  const std::string text = TokenText(NewToken());
  for (const std::string& bad :
       {std::string(), std::string("muster_"), std::string("muster_abcdefghij"),
        std::string("muster_abcdefghij_"), std::string("muster_ABCDEFGHIJ_x"), text.substr(1),
        absl::StrCat("muster_abcdefghij_", std::string(10'000, 'x'))}) {
    EXPECT_FALSE(ParseToken(bad).has_value()) << bad.substr(0, 40);
  }
}

TEST(Token, HashesTellSecretsApart) {
  EXPECT_EQ(HashOf("a").size(), 32u);
  EXPECT_TRUE(SameSecret(HashOf("a"), HashOf("a")));
  EXPECT_FALSE(SameSecret(HashOf("a"), HashOf("b")));
  EXPECT_FALSE(SameSecret(HashOf("a"), ""));
}

}  // namespace
}  // namespace muster::security
