#include "coordinator/rpc/label_selector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "muster/v1/spec.pb.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

bool Selects(const std::string& text) {
  v1::JobSpec spec;
  (*spec.mutable_labels())["team"] = "vision";
  (*spec.mutable_labels())["run.id"] = "7";
  (*spec.mutable_labels())["empty"] = "";
  return LabelSelector::Parse(text).value().Matches(spec.labels());
}

TEST(LabelSelector, AllTermsMustMatch) {
  for (const char* text : {"", " ", "team=vision", " team = vision ", "team=vision,run.id=7",
                           "team", "!owner", "team!=language", "owner!=me", "empty=", "empty",
                           "team==vision", "team,!owner,run.id!=8"}) {
    EXPECT_TRUE(Selects(text)) << text;
  }
  for (const char* text : {"team=language", "team=", "owner", "!team", "team!=vision",
                           "owner=", "team=vision,run.id=8", "Team=vision", "empty!="}) {
    EXPECT_FALSE(Selects(text)) << text;
  }
}

TEST(LabelSelector, OtherText_IsRefused) {
  for (const char* text :
       {"=x", "!", ",", "a,,b", "!=x", "a!b", "!!a", "! ! a", "team in (vision, text)"}) {
    EXPECT_THAT(LabelSelector::Parse(text).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("label_selector: ")))
        << text;
  }
  EXPECT_THAT(LabelSelector::Parse(std::string(5000, 'a')).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 4096")));
}

}  // namespace
}  // namespace muster::coordinator
