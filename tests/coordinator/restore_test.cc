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
  RestoreTest() {
    now_ = absl::FromUnixSeconds(1'700'000'000);
    Restart();
  }
  // The coordinator comes back with the state that `store_` had at the last TakeBackup(), which can
  // be restored again.
  void TakeBackup() { backup_ = store_->Copy(); }
  void Restore() { RestoreAt(now_); }
  // `clock`: of the machine.
  void RestoreAt(absl::Time clock) {
    store_ = backup_->Copy();
    ASSERT_OK(MarkRestored(*store_, rng_, clock));
    Restart();
  }
  // Opens a session of "w", which has obeyed that coordinator before.
  void HelloOfOneThatObeyed(const std::string& history, uint64_t term,
                            const v1::Observed& observed) {
    SessionOpened hello = HelloOf("w", 2);
    session_ = hello.session;
    hello.hello.set_history_id(history);
    hello.hello.set_leader_term(term);
    *hello.hello.mutable_observed() = observed;
    Handle(hello);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  // The attempt of the job is lost with its daemon's disk, and the next one trains.
  v1::Job TrainAnew() {
    Hello();
    for (int i = 0; i < 10 && Job().state() != v1::JOB_STATE_PLACING; ++i) {
      Observe({});
      Wait(absl::Seconds(2));
    }
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
    EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
    return Job();
  }
  std::unique_ptr<MemoryStore> backup_;
  Rng rng_{3};
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

// The coordinator had asked its ranks to stop, and has forgotten that. No user has cancelled it.
TEST_F(RestoreTest, RankThatWasStoppedInTheForgottenHistory_DoesNotCancelTheJob) {
  const v1::Job job = Train();
  TakeBackup();
  Restore();
  Hello(1, Ranks(job, v1::RANK_STATE_TRAINING));
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CANCELLED}}));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().attempts(), 2);
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

// A worker that has had no rank of the job cannot know an epoch that is not known here; but after a
// restore, as an older version made it, it may.
TEST_F(RestoreTest, EpochOfAWorkerWithoutARank_CountsOnlyRightAfterARestore) {
  const auto tell = [this](uint64_t epoch) {
    SessionOpened x = HelloOf("x", 1);
    v1::ObservedAttempt& attempt = *x.hello.mutable_observed()->add_attempts();
    attempt.set_job_id(Job().id());
    attempt.set_epoch(epoch);
    Handle(x);
  };
  Train();
  TakeBackup();
  RestoreAt(absl::UnixEpoch());
  ASSERT_OK_AND_ASSIGN(const auto row, store_->Get(Table::kStates, Job().id()));
  v1::StateRow state;
  ASSERT_TRUE(state.ParseFromString(*row));
  EXPECT_EQ(state.epoch_floor(), 10'001u);
  tell(state.epoch_floor() + 5 - 1);
  const uint64_t epoch = TrainAnew().epoch();
  EXPECT_EQ(epoch, state.epoch_floor() + 5);
  tell(epoch + 500);
  EXPECT_EQ(TrainAnew().epoch(), epoch + 1);
}

TEST_F(RestoreTest, SameBackupTwice_RepeatsNoEpochAndNoTerm) {
  Train();
  TakeBackup();
  const std::string history = core_->history_id();
  EXPECT_EQ(history.size(), 32u);
  Restart();
  EXPECT_EQ(core_->history_id(), history) << "it is that of the state";

  Restore();
  const std::string first_history = core_->history_id();
  EXPECT_NE(first_history, history);
  v1::Job first;
  for (int i = 0; i < 3; ++i) {
    first = TrainAnew();
    Restart();
  }
  const uint64_t first_term = core_->leader_term(), first_event = core_->last_event_sequence();
  v1::Observed held = Ranks(first, v1::RANK_STATE_TRAINING);
  held.mutable_attempts(0)->set_history_id(first_history);

  now_ += absl::Seconds(1);
  Restore();
  EXPECT_NE(core_->history_id(), first_history);
  EXPECT_GT(core_->leader_term(), first_term);
  ASSERT_OK(store_->Scan(Table::kEvents, schema::EventKey(first_event / 2), "",
                         [&](const std::string& key, const std::string&) {
                           EXPECT_GT(*schema::DecodeU64(key), first_event);
                           return true;
                         }));
  // The daemon obeys this one, and what it holds of the first restore is not taken for its own.
  HelloOfOneThatObeyed(first_history, first_term, held);
  EXPECT_TRUE(Actions<CloseAction>().empty());
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(Commit(first, 10), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_GT(TrainAnew().epoch(), first.epoch());
}

// Soon after the first restore, whose numbers the backup has.
TEST_F(RestoreTest, BackupOfARestoredStateTwice_RepeatsNothingEither) {
  Train();
  TakeBackup();
  Restore();
  TakeBackup();
  now_ += absl::Seconds(1);
  Restore();
  const uint64_t term = core_->leader_term(), epoch = TrainAnew().epoch();
  const uint64_t event = core_->last_event_sequence();
  now_ += absl::Seconds(1);
  Restore();
  EXPECT_GT(core_->leader_term(), term);
  EXPECT_GT(core_->last_event_sequence(), event);
  EXPECT_GT(TrainAnew().epoch(), epoch);
}

// Without a clock the numbers of two restores are the same, and only the histories tell them apart.
TEST_F(RestoreTest, SameBackupTwiceAtTheSameTime_IsNotObeyedAndAdoptsNothing) {
  Train();
  TakeBackup();
  Restore();
  const std::string first_history = core_->history_id();
  const uint64_t first_term = core_->leader_term();
  const absl::Time then = now_;
  const v1::Job first = TrainAnew();
  v1::Observed held = Ranks(first, v1::RANK_STATE_TRAINING);
  held.mutable_attempts(0)->set_history_id(first_history);

  now_ = then;
  Restore();
  EXPECT_EQ(core_->leader_term(), first_term);
  HelloOfOneThatObeyed(first_history, first_term, held);
  ASSERT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_THAT(Actions<CloseAction>()[0].status,
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(first_history)));
  HelloOfOneThatObeyed(core_->history_id(), first_term, {});
  EXPECT_TRUE(Actions<CloseAction>().empty()) << "it has obeyed this one";

  // Once it has the higher term, its epochs are still not those of the first restore.
  Restart();
  Hello();
  Wait(absl::Seconds(2));
  ASSERT_EQ(Job().epoch(), first.epoch());
  HelloOfOneThatObeyed(first_history, first_term, held);
  EXPECT_EQ(core_->SessionOf(WorkerId("w")), session_);
  EXPECT_NE(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Commit(first, 10), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Job().last_committed_step(), 0);
  Observe({});
  Wait(absl::Seconds(2));
  EXPECT_GT(Job().epoch(), first.epoch());
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
