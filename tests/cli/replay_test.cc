// `muster replay` as users run it: on a snapshot's file of a store that a core has written, and on
// one that was tampered with.
#include <gmock/gmock.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/core/schema.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Ran {
  int status = 0;
  std::string text;  // of stdout and stderr
};

class ReplayCommandTest : public CoreTest {
 protected:
  ReplayCommandTest() {
    std::string pattern = ::testing::TempDir() + "replay-XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    // A job trains, stops for another one of larger priority, and that starts: three plans.
    const v1::Job victim = Train();
    v1::JobSpec urgent = Spec(2);
    urgent.set_name("urgent");
    urgent.set_priority(90);
    Handle(SubmitEvent{CallId(2), urgent, "urgent"});
    if (const auto desired = LastDesired()) revision_ = desired->revision();
    Observe(Ranks(victim, v1::RANK_STATE_RELEASED,
                  {{0, v1::CAUSE_PREEMPTED}, {1, v1::CAUSE_PREEMPTED}}));
    EXPECT_EQ(core_->GetJob("urgent")->state(), v1::JOB_STATE_PLACING);
    victim_ = victim.id();
  }
  ~ReplayCommandTest() override { std::filesystem::remove_all(directory_); }

  // A file as `muster admin snapshot` writes it; `change` is made to every row.
  std::string Snapshot(const std::string& name,
                       const std::function<void(v1::SnapshotRow&)>& change = nullptr) {
    const std::string path = directory_ + "/" + name;
    std::ofstream file(path, std::ios::binary);
    for (int table = 0; table < static_cast<int>(Table::kTableCount); ++table) {
      EXPECT_OK(store_->Scan(static_cast<Table>(table), "", "",
                             [&](const std::string& key, const std::string& value) {
                               v1::SnapshotRow row;
                               row.set_table(Name(static_cast<Table>(table)));
                               row.set_key(key);
                               row.set_value(value);
                               if (change) change(row);
                               google::protobuf::util::SerializeDelimitedToOstream(row, &file);
                               return true;
                             }));
    }
    return path;
  }
  // The preemption of the log names no job that was stopped for it.
  std::string TamperedSnapshot() {
    return Snapshot("tampered.snap", [](v1::SnapshotRow& row) {
      v1::LogEntry entry;
      if (row.table() != Name(Table::kLog) || !entry.ParseFromString(row.value())) return;
      for (v1::PlanRecord& plan : *entry.mutable_plans()) {
        for (v1::PlanDecision& decision : *plan.mutable_decisions()) {
          if (decision.kind() == v1::PLAN_DECISION_KIND_PREEMPT) decision.clear_stopped();
        }
      }
      row.set_value(schema::Serialize(entry));
    });
  }

  static Ran Muster(const std::string& arguments) {
    Ran ran;
    std::FILE* pipe = ::popen(absl::StrCat(MUSTER_BINARY, " ", arguments, " 2>&1").c_str(), "r");
    if (pipe == nullptr) {
      ADD_FAILURE() << "cannot run " << MUSTER_BINARY;
      return ran;
    }
    std::array<char, 4096> buffer;
    for (size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
      ran.text.append(buffer.data(), got);
    }
    const int status = ::pclose(pipe);
    ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return ran;
  }

  std::string directory_;
  std::string victim_;  // id
};

TEST_F(ReplayCommandTest, SoundSnapshot_SaysThatThePlansDecideTheSame) {
  const Ran ran = Muster(absl::StrCat("replay --strict ", Snapshot("sound.snap")));
  EXPECT_EQ(ran.status, 0) << ran.text;
  EXPECT_THAT(ran.text,
              AllOf(HasSubstr("equal to the stored state, byte by byte"),
                    HasSubstr("3 plans of the scheduler made again: they decide the same"),
                    HasSubstr("placing"), Not(HasSubstr("DECIDED THEN")),
                    Not(HasSubstr("not comparable"))));
}

TEST_F(ReplayCommandTest, TamperedPlan_IsShownBesideWhatIsDecidedNow) {
  const std::string snapshot = TamperedSnapshot();
  const Ran ran = Muster(absl::StrCat("replay ", snapshot));
  EXPECT_EQ(ran.status, 0) << "other decisions alone are no error: " << ran.text;
  EXPECT_THAT(ran.text,
              AllOf(HasSubstr("DECIDED THEN"), HasSubstr("DECIDED NOW"),
                    HasSubstr("gets w/cpu:0, w/cpu:1 kept, for which these stop: " + victim_),
                    HasSubstr("3 plans of the scheduler made again: 1 of them decide something "
                              "else")));

  const Ran strict = Muster(absl::StrCat("replay --strict ", snapshot));
  EXPECT_EQ(strict.status, 1);
  EXPECT_THAT(strict.text,
              HasSubstr("1 of 3 plans of the scheduler decide something else than then"));

  const Ran json = Muster(absl::StrCat("replay -o json ", snapshot));
  EXPECT_EQ(json.status, 0);
  const auto report = nlohmann::json::parse(json.text, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(report.is_object()) << json.text;
  EXPECT_EQ(report["plans"], 3);
  EXPECT_EQ(report["plansDifferent"], 1);
  ASSERT_EQ(report["decisions"].size(), 1u);
  EXPECT_EQ(report["decisions"][0]["then"], "gets w/cpu:0, w/cpu:1 kept");
}

TEST_F(ReplayCommandTest, PlansOfAnOlderVersion_AreCountedAndNoErrorEvenWhereStrict) {
  const std::string snapshot = Snapshot("older.snap", [](v1::SnapshotRow& row) {
    v1::LogEntry entry;
    if (row.table() != Name(Table::kLog) || !entry.ParseFromString(row.value())) return;
    entry.clear_plans();
    row.set_value(schema::Serialize(entry));
  });
  const Ran ran = Muster(absl::StrCat("replay --strict ", snapshot));
  EXPECT_EQ(ran.status, 0) << ran.text;
  EXPECT_THAT(ran.text, HasSubstr("2 not comparable: decided by a version that kept no record"));
}

// A row that the log does not make is an error whatever was asked for.
TEST_F(ReplayCommandTest, TamperedRow_IsNamedAndAnError) {
  const std::string snapshot = Snapshot("row.snap", [](v1::SnapshotRow& row) {
    v1::StateRow state;
    if (row.table() != Name(Table::kStates) || !state.ParseFromString(row.value())) return;
    state.set_failures(state.failures() + 1);
    row.set_value(schema::Serialize(state));
  });
  const Ran ran = Muster(absl::StrCat("replay ", snapshot));
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.text,
              AllOf(HasSubstr("the stored state is not what its log says"), HasSubstr(victim_)));
}

TEST_F(ReplayCommandTest, FileThatWasCutOff_IsNamed) {
  const std::string snapshot = Snapshot("cut.snap");
  std::filesystem::resize_file(snapshot, std::filesystem::file_size(snapshot) - 3);
  const Ran ran = Muster(absl::StrCat("replay ", snapshot));
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.text, HasSubstr("is no snapshot, or was cut off"));
}

}  // namespace
}  // namespace muster::coordinator
