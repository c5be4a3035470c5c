#include "coordinator/core/state_log.h"

#include "base/status_macros.h"
#include "coordinator/core/restore.h"
#include "coordinator/core/schema.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StateLogTest : public CoreTest {
 protected:
  // A job trains, commits, fails, and trains again.
  void Live() {
    const v1::Job first = Train();
    Commit(first, 10);
    Observe(Ranks(first, v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_CRASH}, {1, v1::CAUSE_CRASH}}));
    Wait(absl::Seconds(5));
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
    EXPECT_EQ(Job().epoch(), 2u);
  }
  // The daemon comes back with the job, which commits a step.
  void GoOn(int64_t step) {
    Hello(1, Ranks(Job(), v1::RANK_STATE_TRAINING));
    EXPECT_EQ(Commit(Job(), step), 0);
  }
  std::vector<v1::LogEntry> Entries() {
    std::vector<v1::LogEntry> entries;
    EXPECT_OK(store_->Scan(Table::kLog, "", "", [&](const std::string&, const std::string& value) {
      EXPECT_TRUE(entries.emplace_back().ParseFromString(value));
      return true;
    }));
    return entries;
  }
};

TEST_F(StateLogTest, State_IsTheFoldOfItsEntries) {
  Live();
  Restart();
  GoOn(20);
  const std::vector<v1::LogEntry> entries = Entries();
  for (size_t i = 0; i < entries.size(); ++i) EXPECT_EQ(entries[i].index(), i + 1);
  EXPECT_EQ(entries.front().term(), 1u);
  EXPECT_EQ(entries.back().term(), 2u);
  const absl::StatusOr<Replayed> replayed = Replay(*store_, nullptr, 0);
  ASSERT_OK(replayed.status());
  EXPECT_EQ(replayed->entries, static_cast<int64_t>(entries.size()));
  EXPECT_THAT(replayed->differences, IsEmpty());
  EXPECT_TRUE(replayed->rows.contains({Table::kStates, Job().id()}));
}

TEST_F(StateLogTest, Follower_HasTheRowsOfEveryMoment) {
  LoggedRows rows;
  uint64_t index = 0;
  const auto follow = [&] {
    EXPECT_OK(Tail(*store_, index, [&](const v1::LogEntry& entry) -> absl::StatusOr<bool> {
      RETURN_IF_ERROR(Fold(entry, index, rows));
      return true;
    }));
    const auto stored = ReadLogged(*store_);
    ASSERT_OK(stored.status());
    EXPECT_EQ(stored->second, index);
    EXPECT_EQ(stored->first, rows);
  };
  Live();
  follow();
  const uint64_t before = index;
  Restart();
  GoOn(20);
  follow();
  EXPECT_GT(index, before);
  follow();
}

TEST_F(StateLogTest, Follower_StopsWhereItWants_AndIsToldWhatIsNotKept) {
  Live();
  int seen = 0;
  EXPECT_OK(
      Tail(*store_, 0, [&](const v1::LogEntry&) -> absl::StatusOr<bool> { return ++seen < 2; }));
  EXPECT_EQ(seen, 2);
  EXPECT_EQ(Tail(*store_, 0, [](const v1::LogEntry&) { return absl::DataLossError("broken"); }),
            absl::DataLossError("broken"));
  Batch forget;
  forget.Delete(Table::kLog, schema::EncodeU64(1));
  EXPECT_OK(store_->Write({forget}));
  EXPECT_THAT(Tail(*store_, 0, [](const v1::LogEntry&) { return true; }),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("those from 1 on are not kept")));
}

TEST_F(StateLogTest, Fold_EndsWhereItIsAsked) {
  Live();
  for (const v1::LogEntry& entry : Entries()) {
    const absl::StatusOr<Replayed> replayed = Replay(*store_, nullptr, entry.index());
    ASSERT_OK(replayed.status());
    EXPECT_EQ(replayed->last_index, entry.index());
    for (const v1::RowChange& change : entry.changes()) {
      const auto row = replayed->rows.find({*TableNamed(change.table()), change.key()});
      ASSERT_EQ(row != replayed->rows.end(), change.has_value());
      if (change.has_value()) {
        EXPECT_EQ(row->second, change.value());
      }
    }
  }
}

TEST_F(StateLogTest, RowThatTheLogDoesNotKnow_IsNamed) {
  Live();
  Batch changed;
  changed.Put(Table::kStates, Job().id(), "otherwise");
  changed.Put(Table::kRequests, "new", Job().id());
  changed.Delete(Table::kSpecs, Job().id());
  ASSERT_OK(store_->Write({changed}));
  const absl::StatusOr<Replayed> replayed = Replay(*store_, nullptr, 0);
  ASSERT_OK(replayed.status());
  EXPECT_THAT(replayed->differences,
              ::testing::UnorderedElementsAre(HasSubstr("is stored otherwise"),
                                              "requests 'new' is stored, and not in the log",
                                              HasSubstr("is not stored")));
}

TEST_F(StateLogTest, EntriesThatAreNotKept_NeedAnEarlierCopy) {
  Train();
  const std::unique_ptr<MemoryStore> earlier = store_->Copy();
  const uint64_t kept_from = Entries().back().index() + 1;
  Commit(Job(), 10);
  Commit(Job(), 20);
  Batch dropped;
  for (uint64_t index = 1; index < kept_from; ++index) {
    dropped.Delete(Table::kLog, schema::EncodeU64(index));
  }
  ASSERT_OK(store_->Write({dropped}));
  EXPECT_THAT(Replay(*store_, nullptr, 0).status(),
              StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("begins with entry")));
  const absl::StatusOr<Replayed> replayed = Replay(*store_, earlier.get(), 0);
  ASSERT_OK(replayed.status());
  EXPECT_EQ(replayed->first_index, kept_from);
  EXPECT_THAT(replayed->differences, IsEmpty());
  Batch gap;
  gap.Delete(Table::kLog, schema::EncodeU64(kept_from + 1));
  gap.Delete(Table::kLog, schema::EncodeU64(kept_from));
  ASSERT_OK(store_->Write({gap}));
  EXPECT_FALSE(Replay(*store_, earlier.get(), 0).ok());
}

TEST_F(StateLogTest, RestoredState_GoesOnWithIndicesThatNobodyUsed) {
  Live();
  const uint64_t before = Entries().back().index();
  Rng rng(1);
  ASSERT_OK(MarkRestored(*store_, rng, now_));
  Restart();
  GoOn(20);
  const std::vector<v1::LogEntry> entries = Entries();
  const auto restored = std::find_if(entries.begin(), entries.end(),
                                     [](const v1::LogEntry& entry) { return entry.restored(); });
  ASSERT_NE(restored, entries.end());
  EXPECT_GT(restored->index(), before + 1'000'000);
  const absl::StatusOr<Replayed> replayed = Replay(*store_, nullptr, 0);
  ASSERT_OK(replayed.status());
  EXPECT_THAT(replayed->differences, IsEmpty());
}

TEST_F(StateLogTest, EntriesAndEvents_SayWhoAsked) {
  Hello();
  SubmitEvent submit{CallId(1), Spec(), "r"};
  submit.caller = "client ipv4:10.0.0.7";
  Handle(submit);
  EXPECT_EQ(Entries().back().actor(), "client ipv4:10.0.0.7");
  for (const EventAppended& appended : Actions<EventAppended>()) {
    EXPECT_EQ(appended.event.actor(), "client ipv4:10.0.0.7");
  }
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  EXPECT_EQ(Entries().back().actor(), "worker w");
  Wait(absl::Minutes(20));
  EXPECT_EQ(Entries().back().actor(), "coordinator");
}

}  // namespace
}  // namespace muster::coordinator
