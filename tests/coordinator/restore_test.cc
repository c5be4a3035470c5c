// An older state that is brought back from a backup.
#include "coordinator/core/restore.h"

#include <set>

#include "coordinator/core/schema.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

class RestoreTest : public CoreTest {
 protected:
  // The coordinator comes back with the state that `store_` had at the last TakeBackup().
  void TakeBackup() { backup_ = store_->Copy(); }
  void Restore() {
    store_ = std::move(backup_);
    ASSERT_OK(MarkRestored(*store_, now_));
    Restart();
  }
  std::unique_ptr<MemoryStore> backup_;
};

TEST_F(RestoreTest, Verify_CountsRowsAndNamesADamagedOne) {
  Train();
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, Verify(*store_));
  EXPECT_EQ(contents.cluster_id, "test");
  EXPECT_EQ(contents.jobs, 1);
  EXPECT_EQ(contents.live_jobs, 1);
  EXPECT_EQ(contents.workers, 1);
  EXPECT_EQ(static_cast<uint64_t>(contents.events), contents.last_event);
  Batch damage;
  damage.Put(Table::kSpecs, "bad", "\xff");
  ASSERT_OK(store_->Write({damage}));
  EXPECT_THAT(Verify(*store_).status(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("'bad'")));
}

TEST_F(RestoreTest, AttemptThatADaemonStillHolds_GoesOn) {
  const v1::Job job = Train();
  TakeBackup();
  const uint64_t term = core_->leader_term(), last = core_->last_event_sequence();
  for (int i = 0; i < 100; ++i) Restart();
  EXPECT_EQ(Commit(job, 10), -1) << "no session is open";
  const uint64_t newest_term = core_->leader_term(), newest = core_->last_event_sequence();
  EXPECT_GT(newest_term, term);
  EXPECT_GT(newest, last);
  Restore();
  EXPECT_GT(core_->leader_term(), newest_term);
  EXPECT_GT(core_->last_event_sequence(), newest);
  Hello(1, Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Job().epoch(), 1u);
}

TEST_F(RestoreTest, AttemptThatWasBeingPlaced_EndsWithItsBootstrapKeys) {
  Hello(1, {});
  Submit();
  ASSERT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  v1::FromWorker put;
  put.mutable_put()->set_job_id(Job().id());
  put.mutable_put()->set_epoch(1);
  put.mutable_put()->set_key("id");
  put.mutable_put()->set_value("v");
  Send(put);
  const auto keys = [this] {
    int rows = 0;
    EXPECT_OK(store_->Scan(Table::kKeyValue, "", "",
                           [&](const std::string&, const std::string&) { return ++rows > 0; }));
    return rows;
  };
  ASSERT_EQ(keys(), 1);
  TakeBackup();
  Restore();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(keys(), 0);
}

// Of the second restore, too, which has seen no attempt above the leap of the first one.
TEST_F(RestoreTest, BackupOfARestoredState_ReusesNoEpochEither) {
  Train();
  TakeBackup();
  Restore();
  TakeBackup();
  const auto start_next = [this] {
    Hello(1, {});  // the daemon holds nothing any more
    Wait(absl::Seconds(2));
    return Job().epoch();
  };
  const uint64_t first = start_next();
  EXPECT_GT(first, 1u);
  Restore();
  EXPECT_GT(start_next(), first);
}

TEST_F(RestoreTest, EpochsSinceTheBackup_AreNotUsedAgain) {
  const v1::Job first = Train();
  TakeBackup();
  std::set<uint64_t> used = {1};
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(Commit(Job(), 10 * (i + 1)), 0);
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
    Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
    Wait(absl::Seconds(2));
    used.insert(Job().epoch());
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  }
  const v1::Job newest = Job();
  EXPECT_EQ(newest.epoch(), 4u);
  Restore();
  Hello(1, Ranks(newest, v1::RANK_STATE_TRAINING));  // the daemon holds epoch 4, the backup epoch 1
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe({});
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().attempts(), 2);
  EXPECT_EQ(used.count(Job().epoch()), 0u) << Job().epoch();
}

// The placement may have been carried out, and its ranks may have ended, after the backup.
TEST_F(RestoreTest, AttemptThatWasBeingPlaced_IsNotPreparedAgain) {
  Hello();
  Submit();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  TakeBackup();
  Restore();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Hello();
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_GT(Job().epoch(), 1u);
  EXPECT_EQ(Job().failures(), 0);
}

TEST_F(RestoreTest, EpochThatADaemonHolds_RaisesTheNextOne) {
  const v1::Job job = Train();
  v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING);
  v1::ObservedAttempt& unknown = *observed.add_attempts();
  unknown.set_job_id(job.id());
  unknown.set_epoch(500);
  Observe(observed);
  Restart();  // the floor is durable
  Hello();    // and the daemon holds nothing any more
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().epoch(), 501u);
}

TEST_F(CoreTest, DaemonThatObeyedANewerTerm_IsNotTakenFromTheNewerCoordinator) {
  SessionOpened hello = HelloOf("w", 2);
  hello.hello.set_leader_term(core_->leader_term() + 1);
  Handle(hello);
  ASSERT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_THAT(Actions<CloseAction>()[0].status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                                         HasSubstr("older copy of the state")));
}

}  // namespace
}  // namespace muster::coordinator
