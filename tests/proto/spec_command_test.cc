// The parts of the job spec that are for commands.
#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::google::protobuf::util::MessageDifferencer;
using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kCommand[] = R"(name: ddp
command: [python3, ./train.py, --steps, 100, --lr, 1e-3, --fast, true, "null", "two words", ""]
env: {OMP_NUM_THREADS: 4, NCCL_DEBUG: INFO, EMPTY: ""}
resources: {ranks: 2}
working_directory: /srv/work
)";

absl::Status Problems(const std::vector<std::string>& overrides) {
  return Load(kCommand, "f", overrides, "/srv/work").status();
}

TEST(SpecCommand, NumbersAndFlags_AreTextsAsTheyAreWritten) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec spec, Load(kCommand, "f", {}, "/srv"));
  EXPECT_THAT(spec.command(), ElementsAre("python3", "./train.py", "--steps", "100", "--lr", "1e-3",
                                          "--fast", "true", "null", "two words", ""));
  EXPECT_EQ(spec.env().at("OMP_NUM_THREADS"), "4");
  EXPECT_EQ(spec.env().at("EMPTY"), "");
  EXPECT_FALSE(spec.has_engine());
}

TEST(SpecCommand, YamlOfIt_ReadsBack) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Load(kCommand, "f", {}, "/srv"));
  spec.add_command("line\nwith \"quotes\" and\t\\tabs\x01");
  spec.add_command("# no comment: {}, [1]");
  ApplyDefaults(spec);
  ASSERT_OK(Validate(spec));
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec back, Parse(ToYaml(spec), "f", {}));
  EXPECT_TRUE(MessageDifferencer::Equals(spec, back)) << ToYaml(spec);
}

TEST(SpecCommand, Overrides_SetArgumentsAndVariables) {
  ASSERT_OK_AND_ASSIGN(
      const v1::JobSpec spec,
      Load(kCommand, "f", {"command=[sh, -c, 'echo $RANK']", "env.NCCL_DEBUG=WARN", "env.A=1"},
           "/srv"));
  EXPECT_THAT(spec.command(), ElementsAre("sh", "-c", "echo $RANK"));
  EXPECT_EQ(spec.env().at("NCCL_DEBUG"), "WARN");
  EXPECT_EQ(spec.env().at("A"), "1");
}

TEST(SpecCommand, ExactlyOneOfEngineAndCommand) {
  EXPECT_THAT(Problems({"command=null", "env=null"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("engine: required: says what to train; or give 'command'")));
  EXPECT_THAT(Load(kExample, "f", {"command=[true]"}, "/srv").status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("command: only one of 'engine' and 'command' may be given")));
  EXPECT_THAT(Load(kExample, "f", {"env={A: 1}"}, "/srv").status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("env: is for 'command', which is not given")));
}

struct Bad {
  const char* override_text;
  const char* message;
};
class SpecCommandBad : public ::testing::TestWithParam<Bad> {};

TEST_P(SpecCommandBad, Override_IsRefusedByFieldAndRule) {
  EXPECT_THAT(Problems({GetParam().override_text}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    Table, SpecCommandBad,
    ::testing::Values(
        Bad{"command=python3 train.py", "expected a list, got 'python3 train.py'; a command is"},
        Bad{"command=['']", "command[0]: empty; it names the program to run"},
        Bad{"command=[[a]]", "command[0]: expected text, got a list"},
        Bad{"command=[a, null]", "command[1]: expected text"},
        Bad{"command=[a, \"x\\0y\"]", "command[1]: 'x"}, Bad{"env=[a]", "env: expected a mapping"},
        Bad{"env.A=${secret:../x}", "env.A: '${secret:../x}' is not ${secret:NAME}"},
        Bad{"env.A=${secret:x", "env.A"}, Bad{"env.A=${secret:}", "env.A"},
        Bad{"env.A=${secret:.x}", "env.A"}, Bad{"env.A=${secret:a/b}", "env.A"},
        Bad{"env={1A: x}", "env: '1A' is not the name of a variable"},
        Bad{"env={'A=B': x}", "env: 'A=B' is not the name of a variable"},
        Bad{"env={'': x}", "env: '' is not the name of a variable"},
        Bad{"env={A: null}", "env.A: expected text"}, Bad{"env={A: \"x\\0y\"}", "env.A: 'x"},
        Bad{"env={RANK: 3}", "env.RANK: Muster sets this variable itself"},
        Bad{"env={MASTER_PORT: 29500}", "env.MASTER_PORT: Muster sets"},
        Bad{"env={MUSTER_ANYTHING: 1}", "env.MUSTER_ANYTHING: Muster sets"},
        Bad{"checkpoint={path: c, every_steps: 5}", "checkpoint: is for `engine`"},
        Bad{"resources.ranks=0", "resources.ranks: required"}));

TEST(SpecCommand, ProgramWithARelativePath_NeedsAWorkingDirectory) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kCommand, "f", {"command=[./run.sh]"}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  spec.clear_working_directory();
  EXPECT_THAT(Validate(spec), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("command[0]: './run.sh' is relative")));
  spec.set_command(0, "run.sh");
  EXPECT_OK(Validate(spec)) << "looked up in PATH";
}

TEST(SpecCommand, Sizes_AreBoundedByWhatTravels) {
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec small, Load(kCommand, "f", {}, "/srv"));
  const auto problem = [&](auto change) {
    v1::JobSpec spec = small;
    change(spec);
    ApplyDefaults(spec);
    return std::string(Validate(spec).message());
  };
  EXPECT_THAT(problem([](v1::JobSpec& spec) {
                for (int i = 0; i < 1024; ++i) spec.add_command("x");
              }),
              HasSubstr("texts; at most 1024"));
  EXPECT_THAT(problem([](v1::JobSpec& spec) { spec.add_command(std::string(200'000, 'x')); }),
              HasSubstr("is longer than 131071 bytes"));
  EXPECT_THAT(problem([](v1::JobSpec& spec) {
                for (int i = 0; i < 3; ++i) spec.add_command(std::string(100'000, 'x'));
              }),
              HasSubstr("command: the spec takes 300"));
  EXPECT_THAT(problem([](v1::JobSpec& spec) {
                for (int i = 0; i < 300; ++i) (*spec.mutable_env())[absl::StrCat("A", i)] = "1";
              }),
              HasSubstr("variables; at most 256"));
  EXPECT_THAT(
      problem([](v1::JobSpec& spec) { (*spec.mutable_env())["A"] = std::string(131'072, 'x'); }),
      HasSubstr("env.A: 'xxx"));
  EXPECT_EQ(problem([](v1::JobSpec& spec) { (*spec.mutable_env())["A"] = std::string(900, 'x'); }),
            "");
}

}  // namespace
}  // namespace muster::spec
