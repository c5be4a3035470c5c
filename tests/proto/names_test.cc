#include "proto/spec/names.h"

#include <gtest/gtest.h>

#include "muster/v1/job.pb.h"

namespace muster::spec {
namespace {

TEST(Names, EnumName_DropsThePrefixOfTheEnum) {
  EXPECT_EQ(EnumName(v1::JOB_STATE_RUNNING), "running");
  EXPECT_EQ(EnumName(v1::CAUSE_OUT_OF_MEMORY), "out_of_memory");
  EXPECT_EQ(EnumName(v1::MODEL_FAMILY_GPT2), "gpt2");
  EXPECT_EQ(EnumName(static_cast<v1::Cause>(99)), "99");
}

TEST(Names, FindEnumValue_DoesNotFindUnspecified) {
  EXPECT_EQ(FindEnumValue(*v1::Precision_descriptor(), "bf16")->number(), v1::PRECISION_BF16);
  EXPECT_EQ(FindEnumValue(*v1::Precision_descriptor(), "unspecified"), nullptr);
  EXPECT_EQ(FindEnumValue(*v1::Precision_descriptor(), "PRECISION_BF16"), nullptr);
}

TEST(Names, NearestName_FindsMisspellingsAndNothingFarFetched) {
  const std::vector<std::string> fields = {"layers", "hidden", "heads", "sequence_length", "lr"};
  EXPECT_EQ(NearestName("layer", fields), "layers");
  EXPECT_EQ(NearestName("haeds", fields), "heads");
  EXPECT_EQ(NearestName("sequenceLength", fields), "sequence_length");
  EXPECT_EQ(NearestName("LR", fields), "lr");
  EXPECT_EQ(NearestName("optimizer", fields), "");
  EXPECT_EQ(NearestName("x", fields), "");
  EXPECT_EQ(NearestName("", fields), "");
  EXPECT_EQ(NearestName(std::string(1 << 20, 'l'), fields), "");
}

TEST(Names, Quoted_CutsLongTextAtACharacterAndSaysItsLength) {
  EXPECT_EQ(Quoted("six"), "'six'");
  EXPECT_EQ(Quoted("a\nb\x01"), "'a\\nb\\x01'");
  EXPECT_EQ(Quoted(std::string(100, 'a'), 3), "'aaa...' (100 bytes)");
  EXPECT_EQ(Quoted("aé-", 2), "'a...' (4 bytes)");
}

}  // namespace
}  // namespace muster::spec
