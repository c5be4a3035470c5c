#include "proto/spec/elastic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The example with global_batch 8 and micro_batch 1.
v1::JobSpec Elastic(const std::string& ranks, const std::string& parallel = "{}") {
  v1::JobSpec spec = *Parse(kExample, "f",
                            {"resources.ranks=" + ranks, "engine.parallel=" + parallel,
                             "engine.training.global_batch=8", "engine.training.micro_batch=1"});
  ApplyDefaults(spec);
  return spec;
}

TEST(ElasticSpec, Sizes_AreThoseThatTheLayoutAndTheGlobalBatchAllow) {
  EXPECT_THAT(SizesOf(Elastic("{min: 1, max: 9}")), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(SizesOf(Elastic("{min: 3, max: 9}", "{tensor: 2}")), ElementsAre(4, 8));
  EXPECT_THAT(SizesOf(Elastic("2")), ElementsAre(2));
  EXPECT_OK(Validate(Elastic("{min: 3, max: 9}", "{tensor: 2}")));
}

TEST(ElasticSpec, AtSize_HasTheDataParallelDegreeOfThatSizeAndNoRange) {
  const v1::JobSpec spec = Elastic("{min: 2, max: 9}", "{tensor: 2}");
  EXPECT_EQ(spec.engine().parallel().data(), 4) << "of the largest size";
  const v1::JobSpec four = AtSize(spec, 4);
  EXPECT_FALSE(IsElastic(four));
  EXPECT_EQ(four.resources().ranks(), 4);
  EXPECT_EQ(four.engine().parallel().data(), 2);
  EXPECT_EQ(four.engine().parallel().tensor(), 2);
  EXPECT_OK(Validate(four));
}

TEST(ElasticSpec, Yaml_HasTheRangeAsTheValueOfRanks) {
  const v1::JobSpec spec = Elastic("{min: 1, max: 4}");
  const std::string text = ToYaml(spec);
  EXPECT_THAT(text, HasSubstr("  ranks:\n    min: 1\n    max: 4\n"));
  const absl::StatusOr<v1::JobSpec> again = Parse(text, "f", {});
  ASSERT_OK(again.status());
  EXPECT_EQ(again->resources().SerializeAsString(), spec.resources().SerializeAsString());
  EXPECT_EQ(ToYaml(*again), text);
}

// What is wrong with the spec.
std::string ProblemOf(const v1::JobSpec& spec) { return std::string(Validate(spec).message()); }

TEST(ElasticSpec, RangeWithoutASize_NamesTheNearestThatWouldDo) {
  EXPECT_THAT(ProblemOf(Elastic("{min: 5, max: 7}")),
              AllOf(HasSubstr("resources.ranks: no number of ranks from 5 to 7"),
                    HasSubstr("4 and 8 would do")));
}

TEST(ElasticSpec, ImpossibleRanges_AreRefusedByField) {
  EXPECT_THAT(ProblemOf(Elastic("{min: 4, max: 2}")), HasSubstr("resources.ranks.max: 2 is less"));
  EXPECT_THAT(ProblemOf(Elastic("{min: 0, max: 2}")), HasSubstr("resources.ranks.min: "));
  EXPECT_THAT(ProblemOf(Elastic("{min: 1, max: 4}", "{data: 3}")),
              HasSubstr("engine.parallel.data: 3 is given, but it varies"));
  EXPECT_THAT(ProblemOf(Elastic("{min: 1, max: 4, resumes: true}")),
              HasSubstr("resources.ranks.resumes: is for `command`"));
  // A layout that works with no number of ranks is named itself.
  EXPECT_THAT(ProblemOf(Elastic("{min: 1, max: 64}", "{tensor: 64}")), HasSubstr("tensor"));
  const absl::StatusOr<v1::JobSpec> unknown =
      Parse(kExample, "f", {"resources.rank_range={min: 1}"});
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("unknown field"));
}

TEST(ElasticSpec, Command_HasEverySizeThatASegmentDivides) {
  v1::JobSpec spec = *Parse(
      "name: c\ncommand: [sh, -c, x]\nworking_directory: /data\nresources: {ranks: {min: 2, max: "
      "6}}\n",
      "f", {});
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  EXPECT_THAT(SizesOf(spec), ElementsAre(2, 3, 4, 5, 6));
  EXPECT_FALSE(ResizesWhileRunning(spec));
  spec.mutable_resources()->mutable_rank_range()->set_resumes(true);
  EXPECT_TRUE(ResizesWhileRunning(spec));
  spec.mutable_placement()->set_segment(2);
  spec.mutable_placement()->set_required(v1::TOPOLOGY_LEVEL_HOST);
  EXPECT_OK(Validate(spec));
  EXPECT_THAT(SizesOf(spec), ElementsAre(2, 4, 6));
  spec.mutable_resources()->set_ranks(5000);
  spec.mutable_resources()->mutable_rank_range()->set_max(5000);
  EXPECT_THAT(ProblemOf(spec), HasSubstr("choose a narrower range"));
}

// Defaults are given before a spec is judged, and no range may cost more than a valid one.
TEST(ElasticSpec, RangeBeyondWhatAJobMayHave_IsRefusedAndNotSearched) {
  v1::JobSpec spec = Elastic("{min: 1, max: 2147483647}");
  ApplyDefaults(spec);
  EXPECT_THAT(SizesOf(spec), IsEmpty());
  EXPECT_THAT(ProblemOf(spec), HasSubstr("resources.ranks.max: 2147483647"));
}

TEST(ElasticSpec, NearestSizes_AreTheNearestAlsoWhereManyAreSmaller) {
  v1::JobSpec spec = *Parse(
      "name: c\ncommand: [sh, -c, x]\nworking_directory: /data\nresources: {ranks: {min: 9001, "
      "max: "
      "9002}}\nplacement: {required: rack, segment: 3}\n",
      "f", {});
  ApplyDefaults(spec);
  EXPECT_THAT(ProblemOf(spec), HasSubstr("9000 and 9003 would do"));
}

}  // namespace
}  // namespace muster::spec
