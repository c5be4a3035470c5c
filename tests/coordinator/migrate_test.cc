// A store that a coordinator of schema 1 wrote, brought to the current one.
#include "coordinator/core/migrate.h"

#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>

#include <filesystem>
#include <fstream>

#include "coordinator/core/restore.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/state_log.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;
using google::protobuf::util::MessageDifferencer;
using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

// testdata/schema-1 has the backup of a coordinator that kept a job in one row, taken while four
// jobs were waiting, cancelled, training in their second attempt, and done; and what it answered
// for them.
class MigrateTest : public ::testing::Test {
 protected:
  MigrateTest() {
    fs::copy(kData / "store", directory_, fs::copy_options::recursive);
    std::ifstream file(kData / "jobs.jsonl");
    for (std::string line; std::getline(file, line);) {
      v1::Job job;
      EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(line, &job).ok());
      expected_[job.name()] = job;
    }
  }
  ~MigrateTest() override { fs::remove_all(directory_); }

  const fs::path kData = fs::path(MUSTER_TEST_DATA) / "schema-1";
  const fs::path directory_ =
      fs::path(::testing::TempDir()) / absl::StrCat("migrate-", ::getpid(), "-", ++made_);
  std::map<std::string, v1::Job> expected_;
  static inline int made_ = 0;
};

TEST_F(MigrateTest, StoreOfSchema1_HasTheSameJobs) {
  ASSERT_EQ(expected_.size(), 4u);
  ASSERT_OK_AND_ASSIGN(const auto store, OpenRocksDbStore(directory_, "schema-1", ""));
  CoreOutput output;
  const absl::Time now = absl::FromUnixSeconds(2'000'000'000);
  ASSERT_OK_AND_ASSIGN(auto core, Core::Recover(CoreConfig(), *store, Rng(1), now, &output));
  EXPECT_THAT(core->CheckInvariants(), ::testing::IsEmpty());
  for (auto& [name, job] : expected_) {
    ASSERT_OK_AND_ASSIGN(v1::Job now_known, core->GetJob(name));
    // The job was reported on after the backup, and what daemons tell again is not stored.
    // Device time is known from now on: the two ranks of the job that trains have just begun it.
    EXPECT_EQ(now_known.usage().times_size(), name == "long" ? 1 : 0);
    now_known.clear_usage();
    now_known.clear_membership();  // there was none: it is 1
    for (v1::Job* both : {&job, &now_known}) {
      both->clear_waiting();
      if (name != "long") continue;
      EXPECT_EQ(both->ranks_size(), 2);
      EXPECT_GE(both->step(), 3000);
      for (const auto* field :
           {"step", "train_loss", "tokens_per_second", "step_seconds", "consumed_tokens", "phase",
            "ranks", "losses", "checkpoints", "last_committed_step", "model_flops_utilization"}) {
        both->GetReflection()->ClearField(both, both->GetDescriptor()->FindFieldByName(field));
      }
    }
    // Running time counts from now on.
    EXPECT_EQ(now_known.has_running_since(), name == "long") << name;
    now_known.clear_running_since();
    std::string difference;
    MessageDifferencer differencer;
    differencer.ReportDifferencesToString(&difference);
    EXPECT_TRUE(differencer.Compare(job, now_known)) << name << ": " << difference;
  }
  EXPECT_EQ(core->GetJob("waits")->state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(core->GetJob("long")->checkpoints_size(), 7);
  EXPECT_EQ(*core->LogHolder(JobId(expected_["long"].id()), Epoch(1), 1), WorkerId("w"));
  ASSERT_OK(store->Write({output.batch}));
  ASSERT_OK_AND_ASSIGN(const auto version, store->Get(Table::kMeta, kMetaSchemaVersion));
  EXPECT_EQ(version, absl::StrCat(kSchemaVersion));
  int old_rows = 0;
  ASSERT_OK(store->Scan(Table::kJobs, "", "",
                        [&](const std::string&, const std::string&) { return ++old_rows > 0; }));
  EXPECT_EQ(old_rows, 0);
  ASSERT_OK_AND_ASSIGN(const Replayed replayed, Replay(*store, nullptr, 0));
  EXPECT_THAT(replayed.differences, ::testing::IsEmpty()) << "the log begins with the rows";
}

TEST_F(MigrateTest, BackupOfSchema1_IsVerifiedAndRestored) {
  {
    ASSERT_OK_AND_ASSIGN(const auto store, OpenRocksDbStoreForReading(directory_));
    ASSERT_OK_AND_ASSIGN(const StoreContents contents, Verify(*store));
    EXPECT_EQ(contents.jobs, 4);
    EXPECT_EQ(contents.live_jobs, 2);
  }
  ASSERT_OK_AND_ASSIGN(const auto store, OpenRocksDbStore(directory_, "", ""));
  Rng rng(1);
  ASSERT_OK(MarkRestored(*store, rng, absl::FromUnixSeconds(2'000'000'000)));
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, Verify(*store));
  EXPECT_EQ(contents.jobs, 4);
  EXPECT_EQ(contents.live_jobs, 2);
}

// A coordinator that ended while it migrated left some jobs of either schema.
TEST_F(MigrateTest, MigrationThatWasInterrupted_GoesOn) {
  ASSERT_OK_AND_ASSIGN(const auto store, OpenRocksDbStore(directory_, "", ""));
  std::string key, row;
  ASSERT_OK(store->Scan(Table::kJobs, "", "", [&](const std::string& k, const std::string& value) {
    key = k;
    row = value;
    return false;
  }));
  ASSERT_OK(Migrate(*store));
  Batch interrupted;
  interrupted.Put(Table::kJobs, key, row);
  interrupted.Delete(Table::kSpecs, key);
  interrupted.Delete(Table::kStates, key);
  interrupted.Put(Table::kMeta, kMetaSchemaVersion, "1");
  ASSERT_OK(store->Write({interrupted}));
  ASSERT_OK(Migrate(*store));
  ASSERT_OK(Migrate(*store));
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, Verify(*store));
  EXPECT_EQ(contents.jobs, 4);
}

TEST_F(MigrateTest, DamagedRow_IsNamedAndNothingIsLost) {
  ASSERT_OK_AND_ASSIGN(const auto store, OpenRocksDbStore(directory_, "", ""));
  Batch damage;
  damage.Put(Table::kJobs, "bad", "\xff");
  ASSERT_OK(store->Write({damage}));
  EXPECT_THAT(Migrate(*store), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("'bad'")));
  ASSERT_OK_AND_ASSIGN(const auto version, store->Get(Table::kMeta, kMetaSchemaVersion));
  EXPECT_EQ(version, "1");
}

// testdata/schema-3 has the backup of a coordinator that knew memberships and shares and did not
// say so in its number: of jobs that had ended, ran on half a device each, waited, and had just
// left a worker that was drained.
TEST(MigrateSchema3Test, Store_HasTheSameRowsAndAnotherNumber) {
  const fs::path directory =
      fs::path(::testing::TempDir()) / absl::StrCat("migrate-3-", ::getpid());
  fs::copy(fs::path(MUSTER_TEST_DATA) / "schema-3" / "store", directory,
           fs::copy_options::recursive);
  {
    ASSERT_OK_AND_ASSIGN(const auto store, OpenRocksDbStore(directory, "", ""));
    ASSERT_OK_AND_ASSIGN(const auto version, store->Get(Table::kMeta, kMetaSchemaVersion));
    ASSERT_EQ(version, "3");
    ASSERT_OK_AND_ASSIGN(const auto before, ReadLogged(*store));
    ASSERT_OK_AND_ASSIGN(const StoreContents old, Verify(*store));
    EXPECT_EQ(old.history_id, "");
    ASSERT_OK(Migrate(*store));
    ASSERT_OK_AND_ASSIGN(const auto now, store->Get(Table::kMeta, kMetaSchemaVersion));
    EXPECT_EQ(now, absl::StrCat(kSchemaVersion));
    ASSERT_OK_AND_ASSIGN(const auto after, ReadLogged(*store));
    EXPECT_EQ(before, after);
    ASSERT_OK_AND_ASSIGN(const StoreContents contents, Verify(*store));
    EXPECT_EQ(contents.log_entries, old.log_entries) << "the log is as it was";

    CoreOutput output;
    ASSERT_OK_AND_ASSIGN(auto core, Core::Recover(CoreConfig(), *store, Rng(1),
                                                  absl::FromUnixSeconds(2'000'000'000), &output));
    ASSERT_OK(store->Write({output.batch}));
    EXPECT_THAT(core->CheckInvariants(), ::testing::IsEmpty());
    EXPECT_EQ(core->history_id().size(), 32u);
    ASSERT_OK_AND_ASSIGN(const StoreContents opened, Verify(*store));
    EXPECT_EQ(opened.history_id, core->history_id()) << "an older state gets one when it is opened";
    const std::map<std::string, v1::JobState> states = {{"done", v1::JOB_STATE_SUCCEEDED},
                                                        {"gone", v1::JOB_STATE_CANCELLED},
                                                        {"half-a", v1::JOB_STATE_RUNNING},
                                                        {"half-b", v1::JOB_STATE_RUNNING},
                                                        {"waits", v1::JOB_STATE_QUEUED}};
    for (const auto& [name, state] : states) EXPECT_EQ(core->GetJob(name)->state(), state) << name;
    EXPECT_EQ(core->GetJob("moved")->membership(), 2u);
    int leaving = 0;
    ASSERT_OK(store->Scan(Table::kAttempts, "", "", [&](const std::string&, const std::string& v) {
      v1::AttemptRow row;
      EXPECT_TRUE(row.ParseFromString(v));
      leaving += row.leaving_size();
      return true;
    }));
    EXPECT_EQ(leaving, 2);
    ASSERT_OK_AND_ASSIGN(const Replayed replayed, Replay(*store, nullptr, 0));
    EXPECT_THAT(replayed.differences, ::testing::IsEmpty());
  }
  fs::remove_all(directory);
}

}  // namespace
}  // namespace muster::coordinator
