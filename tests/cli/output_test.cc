#include "cli/output.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <sstream>

#include "cli/watch.h"
#include "muster/v1/job.pb.h"

namespace muster::cli {
namespace {

TEST(Output, Json_PrintsDefaultsAndWholeNumbersAndReadsBack) {
  v1::Job job;
  job.set_name("a");
  job.set_state(v1::JOB_STATE_RUNNING);
  job.set_epoch(1ull << 60);
  job.mutable_submitted()->set_seconds(1);
  (*job.mutable_spec()->mutable_labels())["k"] = "v";
  job.mutable_spec()->mutable_restart()->mutable_backoff()->mutable_max()->set_nanos(500'000'000);
  job.add_causes()->set_cause(v1::CAUSE_OUT_OF_MEMORY);
  const Json json = ToJson(job);
  EXPECT_EQ(json["state"], "JOB_STATE_RUNNING");
  EXPECT_TRUE(json["epoch"].is_number());
  EXPECT_EQ(json["epoch"].get<uint64_t>(), 1ull << 60);
  EXPECT_EQ(json["lastCommittedStep"], 0);
  EXPECT_EQ(json["trainLoss"], 0.0);
  EXPECT_EQ(json["ranks"], Json::array());
  EXPECT_EQ(json["causes"][0]["cause"], "CAUSE_OUT_OF_MEMORY");
  EXPECT_EQ(json["submitted"], "1970-01-01T00:00:01Z");
  EXPECT_EQ(json["spec"]["labels"]["k"], "v");
  EXPECT_EQ(json["spec"]["restart"]["backoff"]["max"], "0.500s");
  EXPECT_FALSE(json.contains("ended"));
  EXPECT_FALSE(json["spec"].contains("priority"));
  v1::Job back;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(json.dump(), &back).ok());
  EXPECT_EQ(back.SerializeAsString(), job.SerializeAsString());
}

TEST(Output, Yaml_QuotesTextThatLooksLikeSomethingElse) {
  std::ostringstream out;
  Print(Json{{"a", "true"}, {"b", "12"}, {"c", "plain"}, {"d", 1}, {"e", Json::array()}},
        Format::kYaml, out);
  EXPECT_EQ(out.str(), "a: \"true\"\nb: \"12\"\nc: plain\nd: 1\ne: []\n");
}

TEST(Output, Table_AlignsColumnsAndLeavesNoTrailingBlanks) {
  EXPECT_EQ(Table({{"NAME", "X"}, {"a", ""}, {"é-long", "1"}}), "NAME    X\na\né-long  1\n");
}

TEST(Output, Numbers_AreShort) {
  EXPECT_EQ(ShortNumber(999), "999");
  EXPECT_EQ(ShortNumber(12'345), "12.3k");
  EXPECT_EQ(ShortNumber(999'999), "1.0M");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
  EXPECT_EQ(ShortDuration(absl::Seconds(200)), "3m20s");
}

TEST(Output, ProgressLine_ShowsWhatIsKnownAndFits) {
  v1::Job job;
  job.set_name("gpt");
  job.set_state(v1::JOB_STATE_RUNNING);
  job.set_step(120);
  job.set_steps(600);
  job.set_train_loss(2.5);
  job.set_tokens_per_second(12'300);
  job.set_step_seconds(0.5);
  job.mutable_started()->set_seconds(100);
  const std::string line = ProgressLine(job, absl::FromUnixSeconds(142), 100);
  EXPECT_EQ(
      line,
      "gpt  running  120/600 [######........................]  20%  loss 2.5000  12.3k tok/s  42s  "
      "ETA 4m0s")
      << line.size();
  EXPECT_LE(ProgressLine(job, absl::FromUnixSeconds(142), 40).size(), 40u);
  job.set_model_flops_utilization(0.4742);
  EXPECT_THAT(ProgressLine(job, absl::FromUnixSeconds(142), 200),
              ::testing::HasSubstr("12.3k tok/s  MFU 47.4%"));
  job.set_phase("evaluating");
  EXPECT_THAT(ProgressLine(job, absl::FromUnixSeconds(142), 200),
              ::testing::EndsWith("evaluating"));
  // The start of a large model takes a minute, in which the phase is shown.
  job.set_state(v1::JOB_STATE_STARTING);
  job.set_phase("allocating");
  EXPECT_THAT(ProgressLine(job, absl::FromUnixSeconds(142), 200),
              ::testing::EndsWith("allocating"));
  job.set_state(v1::JOB_STATE_FAILED);
  EXPECT_THAT(ProgressLine(job, absl::FromUnixSeconds(142), 200),
              ::testing::Not(::testing::HasSubstr("allocating")));
}

}  // namespace
}  // namespace muster::cli
