#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::google::protobuf::util::MessageDifferencer;
using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> Lines(const absl::Status& status) {
  return absl::StrSplit(std::string(status.message()), '\n');
}

std::string With(const std::string& from, const std::string& to) {
  const std::string text = absl::StrReplaceAll(kExample, {{from, to}});
  EXPECT_NE(text, kExample) << "the example does not contain " << from;
  return text;
}

TEST(SpecParse, Example_FillsEveryField) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec spec, Parse(kExample, "f", {}));
  EXPECT_EQ(spec.name(), "gpt-kjv");
  EXPECT_EQ(spec.engine().model().family(), v1::MODEL_FAMILY_GPT2);
  EXPECT_EQ(spec.engine().data().train(0).path(), "data/kjv.train");
  EXPECT_EQ(spec.engine().data().train(0).weight(), 1.0);
  EXPECT_FALSE(spec.engine().data().validation(0).has_weight());
  EXPECT_EQ(spec.engine().training().optimizer().adamw().lr(), 1e-3);
  EXPECT_THAT(spec.engine().training().optimizer().adamw().betas(), ElementsAre(0.9, 0.95));
  EXPECT_EQ(spec.engine().training().schedule().cosine().warmup_steps(), 50);
  EXPECT_EQ(spec.restart().backoff().initial().nanos(), 500'000'000);
  EXPECT_EQ(spec.restart().backoff().max().seconds(), 30);
  EXPECT_EQ(spec.labels().at("run.id"), "7");
}

TEST(SpecParse, Json_IsReadLikeYaml) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec spec,
                       Parse("{\n\t\"name\":\"a\",\n\t\"engine\":{\"model\":{\"layers\":2},"
                             "\"training\":{\"optimizer\":{\"adamw\":{\"betas\":[0.5,0.25]}}}}\n}",
                             "f", {}));
  EXPECT_EQ(spec.name(), "a");
  EXPECT_EQ(spec.engine().model().layers(), 2);
  EXPECT_EQ(spec.engine().training().optimizer().adamw().betas(1), 0.25);
}

struct BadLine {
  const char* text;
  const char* message;
};

class SpecParseBadText : public ::testing::TestWithParam<BadLine> {};

TEST_P(SpecParseBadText, IsRefusedWithPlaceAndReason) {
  EXPECT_THAT(Parse(GetParam().text, "job.yaml", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    Table, SpecParseBadText,
    ::testing::Values(
        BadLine{"", "job.yaml:1:1: empty"}, BadLine{"# only a comment\n", "empty"},
        BadLine{"~", "the spec is empty"},
        BadLine{"- a\n", "job.yaml:1:1: expected a mapping of fields, got a list"},
        BadLine{"just text", "expected a mapping of fields, got 'just text'"},
        BadLine{"name: a\n---\nname: b\n", "job.yaml:3:1: a second document"},
        BadLine{"name: [a\n", "job.yaml:2:1: "}, BadLine{"name: a\n\tpriority: 1\n", "job.yaml:2:"},
        BadLine{"nmae: a", "job.yaml:1:1: nmae: unknown field; did you mean 'name'?"},
        BadLine{"engine:\n  model:\n    head: 6\n",
                "job.yaml:3:5: engine.model.head: unknown field; did you mean 'heads'?"},
        BadLine{"engine: {model: {sequenceLength: 6}}", "did you mean 'sequence_length'?"},
        BadLine{"engine: {parallel: {zzzzzzz: 1}}", "the fields here are data, bucket_bytes"},
        BadLine{"engine: {<<: {model: {}}}", "engine.<<: unknown field"},
        BadLine{"{[a]: b}", "expected the name of a field, got a list"},
        BadLine{"name: a\nname: b\n", "job.yaml:2:1: name: given twice; first at job.yaml:1:1"},
        BadLine{"labels: {a: b, a: c}", "labels.a: given twice"},
        BadLine{"engine: {model: {heads: six}}",
                "job.yaml:1:25: engine.model.heads: expected a whole number, got 'six'"},
        BadLine{"engine: {model: {heads: '6'}}",
                "expected a whole number, got the text '6'; remove the quotes"},
        BadLine{"engine: {model: {heads: 6.0}}", "expected a whole number, got '6.0'"},
        BadLine{"engine: {model: {heads: 1e1}}", "expected a whole number, got '1e1'"},
        BadLine{"engine: {model: {heads: 0x10}}", "expected a whole number, got '0x10'"},
        BadLine{"engine: {model: {heads: 010}}", "expected a whole number, got '010'"},
        BadLine{"engine: {model: {heads: }}", "expected a whole number, got nothing"},
        BadLine{"engine: {model: {heads: [6]}}", "expected a whole number, got a list"},
        BadLine{"engine: {model: {heads: {}}}", "expected a whole number, got a mapping"},
        BadLine{"engine: {model: {heads: true}}", "expected a whole number, got 'true'"},
        BadLine{"engine: {model: {heads: 3000000000}}",
                "out of range: '3000000000' is not between -2147483648 and 2147483647"},
        BadLine{"engine: {training: {steps: 9223372036854775808}}", "out of range"},
        BadLine{"engine: {training: {seed: -1}}", "out of range"},
        BadLine{"engine: {training: {seed: 18446744073709551616}}", "out of range"},
        BadLine{"engine: {model: {mamba: {state: 0}}}",
                "engine.model.mamba.state: 0 is out of range; 1 to 256, or leave it out"},
        BadLine{"engine: {model: {mamba: {taps: 0}}}", "taps: 0 is out of range; 2 to 4, or"},
        BadLine{"engine: {model: {pattern: *-M}}",
                "the referenced anchor is not defined; a text that begins with * needs quotes"},
        BadLine{"engine: {parallel: {tensor: 0}}", "engine.parallel.tensor: 0 is out of range"},
        BadLine{"engine: {training: {optimizer: {adamw: {lr: fast}}}}",
                "engine.training.optimizer.adamw.lr: expected a number, got 'fast'"},
        BadLine{"engine: {training: {optimizer: {adamw: {lr: .nan}}}}", "expected a number"},
        BadLine{"engine: {training: {optimizer: {adamw: {lr: inf}}}}", "expected a number"},
        BadLine{"engine: {training: {optimizer: {adamw: {lr: 1e999}}}}", "too large"},
        BadLine{"engine: {training: {optimizer: {adamw: {betas: 0.9}}}}",
                "betas: expected a list, got '0.9'"},
        BadLine{"engine: {training: {optimizer: {adamw: {betas: [0.9, b]}}}}",
                "betas[1]: expected a number, got 'b'"},
        BadLine{"engine: {data: {train: {path: a}}}", "train: expected a list, got a mapping"},
        BadLine{"engine: {data: {train: [a]}}",
                "engine.data.train[0]: expected a mapping of fields, got 'a'"},
        BadLine{"engine:\n", "engine: expected a mapping of fields, got nothing; write {}"},
        BadLine{"engine: {model: {family: gtp2}}",
                "expected one of gpt2, llama, mamba2, hybrid, got 'gtp2'; did you mean 'gpt2'?"},
        BadLine{"resources: {device: DEVICE_KIND_CPU}", "expected one of cpu, cuda, got"},
        BadLine{"resources: {device: unspecified}", "expected one of cpu, cuda"},
        BadLine{"resources: {device: 1}", "expected one of cpu, cuda, got '1'"},
        BadLine{"name: 123", "name: expected text, got the number 123; put it in quotes"},
        BadLine{"name: yes\nqueue: true", "queue: expected text, got the value true"},
        BadLine{"name: ", "name: expected text, got nothing"},
        BadLine{"name: {a: b}", "name: expected text, got a mapping"},
        BadLine{"labels: [a]", "labels: expected a mapping, got a list"},
        BadLine{"labels: {a: 1}", "labels.a: expected text, got the number 1"},
        BadLine{"restart: {backoff: {initial: 5}}",
                "expected a duration such as 500ms, 0.5s, 2m or 1h, got '5'"},
        BadLine{"restart: {backoff: {initial: inf}}", "expected a duration"},
        BadLine{"restart: {backoff: {initial: 99999999999h}}", "expected a duration"},
        BadLine{"restart: {backoff: {initial: {seconds: 1}}}", "expected a duration"},
        BadLine{"engine: {training: {schedule: {cosine: {}, linear: {}}}}",
                "only one of 'cosine' and 'linear' may be given"},
        BadLine{"name: !!str a", "tags such as"}, BadLine{"name: !x a", "tags such as !x"},
        BadLine{"a: &a [*a]", "an alias cannot be inside its own anchor"},
        BadLine{"name: *nobody", "job.yaml:1:"}, BadLine{"name: \"\xff\"", "not valid UTF-8"},
        BadLine{"name: \xed\xa0\x80", "not valid UTF-8"},
        BadLine{"name: \"a\\Nb\"", "job.yaml:1:7: an escape makes no UTF-8 text; write \\u0085"},
        BadLine{"name: a\nqueue: b\x01", "job.yaml:2:9: a control character (1)"}));

TEST(SpecParse, SeveralProblems_AreAllReportedInOrder) {
  const absl::Status status =
      Parse("name: 5\nengine:\n  model: {layer: 6, heads: x}\nresources: {device: gpu}\n", "f", {})
          .status();
  EXPECT_THAT(Lines(status),
              ElementsAre(HasSubstr("f:1:7: name: "), HasSubstr("f:3:11: engine.model.layer: "),
                          HasSubstr("f:3:28: engine.model.heads: "),
                          HasSubstr("f:4:21: resources.device: ")));
}

TEST(SpecParse, HugeText_IsRefusedBySize) {
  EXPECT_THAT(Parse("name: " + std::string(10 << 20, 'a'), "f", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 1048576")));
}

TEST(SpecParse, LongName_IsNotEchoedWhole) {
  const absl::Status status =
      Load(With("gpt-kjv", std::string(1 << 18, 'a')), "f", {}, "/").status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("262144 bytes")));
  EXPECT_LT(status.message().size(), 1000u);
}

TEST(SpecParse, DeepNesting_IsRefused) {
  for (const char* open : {"[", "{a: ", "- ", "? "}) {
    std::string text;
    for (int i = 0; i < 100'000; ++i) text += open;
    EXPECT_THAT(Parse(text, "f", {}), StatusIs(absl::StatusCode::kInvalidArgument)) << open;
  }
  EXPECT_THAT(Parse(std::string(65, '[') + std::string(65, ']'), "f", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("deeper than 64")));
}

TEST(SpecParse, AliasBomb_IsRefused) {
  std::string text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 12; ++i) {
    const std::string last = absl::StrCat("*a", i - 1);
    absl::StrAppend(&text, "a", i, ": &a", i, " [", last);
    for (int j = 0; j < 9; ++j) absl::StrAppend(&text, ", ", last);
    text += "]\n";
  }
  EXPECT_THAT(Parse(text, "f", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("more than 100000 values")));
}

TEST(SpecParse, Alias_StandsForItsAnchor) {
  ASSERT_OK_AND_ASSIGN(
      const v1::JobSpec spec,
      Parse("engine: {data: {train: [&d {path: a}, *d], validation: [*d]}}", "f", {}));
  EXPECT_EQ(spec.engine().data().train(1).path(), "a");
  EXPECT_EQ(spec.engine().data().validation(0).path(), "a");
}

TEST(SpecParse, ManyProblems_AreBounded) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) absl::StrAppend(&text, "field", i, ": 1\n");
  const absl::Status status = Parse(text, "f", {}).status();
  EXPECT_EQ(Lines(status).size(), 101u);
}

// ---- overrides ---------------------------------------------------------------------------------

TEST(SpecOverride, ScalarsListsAndLabels_WinOverTheFile) {
  ASSERT_OK_AND_ASSIGN(
      const v1::JobSpec spec,
      Parse(kExample, "f",
            {"engine.training.steps=7", "engine.data.train[0].path=x=y",
             "engine.data.train[1]={path: second, weight: 0.5}",
             "engine.training.optimizer.adamw.betas[1]=0.99", "labels.a.b=c", "name=other",
             "restart.backoff.max=2m", "engine.data.validation=null"}));
  EXPECT_EQ(spec.engine().training().steps(), 7);
  EXPECT_EQ(spec.engine().data().train(0).path(), "x=y");
  EXPECT_EQ(spec.engine().data().train(0).weight(), 1.0);
  EXPECT_EQ(spec.engine().data().train(1).weight(), 0.5);
  EXPECT_THAT(spec.engine().training().optimizer().adamw().betas(), ElementsAre(0.9, 0.99));
  EXPECT_EQ(spec.labels().at("a.b"), "c");
  EXPECT_EQ(spec.labels().at("team"), "language");
  EXPECT_EQ(spec.name(), "other");
  EXPECT_EQ(spec.restart().backoff().max().seconds(), 120);
  EXPECT_TRUE(spec.engine().data().validation().empty());
}

TEST(SpecOverride, OneofMember_TakesThePlaceOfTheOther) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec spec,
                       Parse(kExample, "f", {"engine.training.schedule.linear.min_lr=0.5"}));
  EXPECT_EQ(spec.engine().training().schedule().linear().min_lr(), 0.5);
}

TEST(SpecOverride, PathThroughAbsentFields_MakesThem) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec spec,
                       Parse("name: a", "f", {"engine.data.train[0].path=p"}));
  EXPECT_EQ(spec.engine().data().train(0).path(), "p");
}

TEST(SpecOverride, AliasedNode_ChangesInOnePlaceOnly) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec spec,
                       Parse("engine: {data: {train: [&d {path: a}], validation: [*d]}}", "f",
                             {"engine.data.train[0].path=b"}));
  EXPECT_EQ(spec.engine().data().train(0).path(), "b");
  EXPECT_EQ(spec.engine().data().validation(0).path(), "a");
}

TEST(SpecOverride, BadOnes_AreRefusedByName) {
  const std::pair<const char*, const char*> table[] = {
      {"steps", "--set 'steps': expected KEY=VALUE"},
      {"=5", "no key before '='"},
      {"engine..model=5", "an empty name"},
      {"engine.=5", "ends with '.'"},
      {"engine.data.train[0=5", "a '[' without ']'"},
      {"engine.data.train[0]x=5", "expected '.' or '['"},
      {"engine.data.train[x]=5", "[x] is not a list index"},
      {"engine.data.train[-1].path=5", "[-1] is not a list index"},
      {"engine.data.train[2].path=a", "[2] is past the end of the list, which has 1"},
      {"engine[0]=5", "engine is not a list"},
      {"name.first=5", "name is not a mapping"},
      {"name=", "no value after '='"},
      {"name=[a", "--set 'name=[a'"},
      {"engine.training.steps=six",
       "--set 'engine.training.steps=six': engine.training.steps: expected a whole number, got "
       "'six'"},
      {"engine.training.stesp=6", "engine.training.stesp: unknown field; did you mean 'steps'?"},
  };
  for (const auto& [text, message] : table) {
    EXPECT_THAT(Parse(kExample, "f", {text}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  }
}

// ---- Load --------------------------------------------------------------------------------------

TEST(SpecLoad, BrokenRules_AreReportedWithTheirLine) {
  EXPECT_THAT(
      Load(With("heads: 6", "heads: 5"), "f", {}, "/w"),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("f:5:56: engine.model.heads: 5 does not divide hidden (192); 4 or 6 would")));
  EXPECT_THAT(Load(kExample, "f", {"resources.ranks=3"}, "/w"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--set 'resources.ranks=3': resources.ranks: 3 ranks, but")));
}

TEST(SpecLoad, MissingField_IsReportedAtWhatShouldHoldIt) {
  EXPECT_THAT(Load(With("layers: 6, ", ""), "f", {}, "/w"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f:5:10: engine.model.layers: required; 1 to 1024")));
}

TEST(SpecLoad, UnreadableField_IsReportedOnceBesideOtherBrokenRules) {
  const absl::Status status =
      Load(With("heads: 6, vocab: 256", "haeds: 6, vocab: -1"), "f", {}, "/w").status();
  EXPECT_THAT(Lines(status), ElementsAre(HasSubstr("engine.model.haeds: unknown field"),
                                         HasSubstr("engine.model.vocab: -1 is too small")));
}

TEST(SpecLoad, WorkingDirectory_IsTheCallersUnlessGiven) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Load(kExample, "f", {}, "/here"));
  EXPECT_EQ(spec.working_directory(), "/srv/work");
  ASSERT_OK_AND_ASSIGN(spec, Load(kExample, "f", {"working_directory=null"}, "/here"));
  EXPECT_EQ(spec.working_directory(), "/here");
  EXPECT_FALSE(spec.engine().data().validation(0).has_weight()) << "defaults are not filled in";
}

// ---- ToYaml ------------------------------------------------------------------------------------

TEST(SpecToYaml, Example_ReadsBackEqual) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {}));
  for (int round = 0; round < 2; ++round) {
    const std::string yaml = ToYaml(spec);
    ASSERT_OK_AND_ASSIGN(const v1::JobSpec again, Parse(yaml, "yaml", {}));
    EXPECT_TRUE(MessageDifferencer::Equals(spec, again)) << yaml;
    ApplyDefaults(spec);
  }
}

TEST(SpecToYaml, Text_IsQuotedWhenItCouldBeReadAsSomethingElse) {
  v1::JobSpec spec;
  spec.set_name("true");
  spec.set_queue("12");
  spec.set_working_directory("/a b:\"\\\n#é");
  (*spec.mutable_labels())[""] = "~";
  (*spec.mutable_labels())["- x"] = "[";
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec again, Parse(ToYaml(spec), "yaml", {}));
  EXPECT_TRUE(MessageDifferencer::Equals(spec, again)) << ToYaml(spec);
}

}  // namespace
}  // namespace muster::spec
