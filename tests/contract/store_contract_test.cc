// What every Store promises, tested on each implementation, and what only one of them can show.
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/store/store.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

namespace fs = std::filesystem;

using Rows = std::vector<std::pair<std::string, std::string>>;

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (fs::temp_directory_path() / "muster-store-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryDirectory() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

Rows All(Store& store, Table table, const std::string& begin = "", const std::string& end = "") {
  Rows rows;
  EXPECT_OK(store.Scan(table, begin, end, [&](const std::string& key, const std::string& value) {
    rows.emplace_back(key, value);
    return true;
  }));
  return rows;
}

Batch Puts(const std::vector<std::string>& keys, const std::string& value) {
  Batch batch;
  for (const std::string& key : keys) batch.Put(Table::kJobs, key, value);
  return batch;
}

// One implementation under test, with a way to lose the process.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual Store& store() = 0;
  // Kills the process, as far as the data can tell, and opens them in another one.
  virtual void CrashAndReopen() = 0;
};

class MemorySubject : public Subject {
 public:
  Store& store() override { return *store_; }
  void CrashAndReopen() override { store_->Crash(); }

 private:
  std::unique_ptr<MemoryStore> store_ = MemoryStore::Make("cluster-a");
};

class RocksDbSubject : public Subject {
 public:
  RocksDbSubject() { Open(); }
  Store& store() override { return *store_; }
  void CrashAndReopen() override {
    // A copy of the open store's files is what a killed process leaves behind.
    const std::string left = Path();
    ++copies_;
    fs::copy(left, Path(), fs::copy_options::recursive);
    store_.reset();
    Open();
  }

 private:
  std::string Path() const { return directory_ / absl::StrCat("store", copies_); }
  void Open() {
    auto opened = OpenRocksDbStore(Path(), "cluster-a", "unused");
    CHECK_OK(opened);
    store_ = *std::move(opened);
  }

  TemporaryDirectory directory_;
  int copies_ = 0;
  std::unique_ptr<Store> store_;
};

struct Implementation {
  const char* name;
  std::function<std::unique_ptr<Subject>()> make;
};

class StoreContract : public ::testing::TestWithParam<Implementation> {
 protected:
  StoreContract() : subject_(GetParam().make()) {}
  Store& store() { return subject_->store(); }

  std::unique_ptr<Subject> subject_;
};

TEST_P(StoreContract, NewStore_KnowsItsClusterAndSchema) {
  ASSERT_OK_AND_ASSIGN(auto cluster, store().Get(Table::kMeta, kMetaClusterId));
  EXPECT_EQ(cluster, "cluster-a");
  ASSERT_OK_AND_ASSIGN(auto version, store().Get(Table::kMeta, kMetaSchemaVersion));
  EXPECT_EQ(version, absl::StrCat(kSchemaVersion));
}

TEST_P(StoreContract, Get_OfAnAbsentKey_IsEmptyAndNoError) {
  ASSERT_OK_AND_ASSIGN(auto value, store().Get(Table::kJobs, "none"));
  EXPECT_FALSE(value.has_value());
}

TEST_P(StoreContract, Scan_IsInByteOrderWithinBounds) {
  ASSERT_OK(store().Write({Puts({"b", "a", std::string("a\0z", 3), "\xff", "c"}, "v")}));
  EXPECT_THAT(All(store(), Table::kJobs),
              ElementsAre(Pair("a", "v"), Pair(std::string("a\0z", 3), "v"), Pair("b", "v"),
                          Pair("c", "v"), Pair("\xff", "v")));
  EXPECT_THAT(All(store(), Table::kJobs, "b", "\xff"), ElementsAre(Pair("b", "v"), Pair("c", "v")));
  EXPECT_THAT(All(store(), Table::kJobs, "bb"), ElementsAre(Pair("c", "v"), Pair("\xff", "v")));
}

TEST_P(StoreContract, Scan_StopsWhenTheVisitorHasEnough_AndMayUseTheStoreMeanwhile) {
  ASSERT_OK(store().Write({Puts({"a", "b", "c"}, "v")}));
  std::vector<std::string> seen;
  ASSERT_OK(store().Scan(Table::kJobs, "", "", [&](const std::string& key, const std::string&) {
    EXPECT_OK(store().Get(Table::kJobs, key));
    seen.push_back(key);
    return seen.size() < 2;
  }));
  EXPECT_THAT(seen, ElementsAre("a", "b"));
}

TEST_P(StoreContract, Tables_AreSeparate) {
  Batch batch;
  batch.Put(Table::kJobs, "k", "job");
  batch.Put(Table::kEvents, "k", "event");
  ASSERT_OK(store().Write({batch}));
  EXPECT_THAT(All(store(), Table::kJobs), ElementsAre(Pair("k", "job")));
  EXPECT_THAT(All(store(), Table::kEvents), ElementsAre(Pair("k", "event")));
  EXPECT_TRUE(All(store(), Table::kWorkers).empty());
}

TEST_P(StoreContract, LaterChanges_WinWithinABatchAndBetweenBatches) {
  Batch first;
  first.Put(Table::kJobs, "a", "1");
  first.Put(Table::kJobs, "a", "2");
  first.Put(Table::kJobs, "b", "1");
  first.Delete(Table::kJobs, "b");
  first.Delete(Table::kJobs, "never");
  Batch second;
  second.Put(Table::kJobs, "a", "3");
  second.Put(Table::kJobs, "b", "2");
  ASSERT_OK(store().Write({first, second}));
  EXPECT_THAT(All(store(), Table::kJobs), ElementsAre(Pair("a", "3"), Pair("b", "2")));
}

TEST_P(StoreContract, WrittenBatches_SurviveACrash) {
  Batch removal;
  removal.Delete(Table::kJobs, "a");
  ASSERT_OK(store().Write({Puts({"a", "b"}, "1")}));
  ASSERT_OK(store().Write({Puts({"c"}, std::string(100000, 'x')), removal}));
  subject_->CrashAndReopen();
  EXPECT_THAT(All(store(), Table::kJobs),
              ElementsAre(Pair("b", "1"), Pair("c", std::string(100000, 'x'))));
  ASSERT_OK(store().Write({Puts({"d"}, "1")}));
  subject_->CrashAndReopen();
  EXPECT_EQ(All(store(), Table::kJobs).size(), 3u);
}

TEST_P(StoreContract, EmptyWrite_IsOk) {
  EXPECT_OK(store().Write({}));
  EXPECT_OK(store().Write({Batch()}));
}

INSTANTIATE_TEST_SUITE_P(
    Implementations, StoreContract,
    ::testing::Values(Implementation{"Memory", [] { return std::make_unique<MemorySubject>(); }},
                      Implementation{"RocksDb", [] { return std::make_unique<RocksDbSubject>(); }}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- what only the memory store can do ----------------------------------------------------------

TEST(MemoryStore, Crash_LosesUnsyncedBatchesAndOnlyThose) {
  const auto store = MemoryStore::Make("c");
  ASSERT_OK(store->Write({Puts({"a", "b"}, "1")}));
  Batch unsynced = Puts({"a", "c"}, "2");
  unsynced.Delete(Table::kJobs, "b");
  ASSERT_OK(store->WriteUnsynced({unsynced, Puts({"a"}, "3")}));
  EXPECT_THAT(All(*store, Table::kJobs), ElementsAre(Pair("a", "3"), Pair("c", "2")));
  store->Crash();
  EXPECT_THAT(All(*store, Table::kJobs), ElementsAre(Pair("a", "1"), Pair("b", "1")));
}

TEST(MemoryStore, SyncOrALaterWrite_MakesEarlierBatchesDurable) {
  const auto store = MemoryStore::Make("c");
  ASSERT_OK(store->WriteUnsynced({Puts({"a"}, "1")}));
  store->Sync();
  ASSERT_OK(store->WriteUnsynced({Puts({"b"}, "1")}));
  ASSERT_OK(store->Write({Puts({"c"}, "1")}));
  store->Crash();
  EXPECT_EQ(All(*store, Table::kJobs).size(), 3u);
}

TEST(MemoryStore, FailedWrite_BreaksTheStoreUntilANewProcessOpensIt) {
  const auto store = MemoryStore::Make("c");
  store->FailWrites(true);
  EXPECT_THAT(store->Write({Puts({"a"}, "1")}), StatusIs(absl::StatusCode::kUnavailable));
  store->FailWrites(false);
  EXPECT_THAT(store->Write({Puts({"a"}, "1")}), StatusIs(absl::StatusCode::kUnavailable));
  store->Crash();
  EXPECT_OK(store->Write({Puts({"a"}, "1")}));
}

// ---- what only the store on disk can do ---------------------------------------------------------

TEST(RocksDbStore, DirectoryOfAnotherCluster_IsRefusedByName) {
  const TemporaryDirectory directory;
  ASSERT_OK(OpenRocksDbStore(directory / "s", "", "cluster-a"));
  ASSERT_OK(OpenRocksDbStore(directory / "s", "", "ignored"));
  ASSERT_OK(OpenRocksDbStore(directory / "s", "cluster-a", "ignored"));
  EXPECT_THAT(OpenRocksDbStore(directory / "s", "cluster-b", "ignored"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ::testing::AllOf(HasSubstr("cluster-a"), HasSubstr("cluster-b"),
                                        HasSubstr(directory / "s"))));
}

TEST(RocksDbStore, NewerSchema_IsRefusedAndLeftAsItIs) {
  const TemporaryDirectory directory;
  Batch newer;
  newer.Put(Table::kMeta, kMetaSchemaVersion, absl::StrCat(kSchemaVersion + 1));
  {
    ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(directory / "s", "", "c"));
    ASSERT_OK(store->Write({newer}));
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(OpenRocksDbStore(directory / "s", "", "c"),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr(absl::StrCat("schema ", kSchemaVersion + 1))));
  }
}

TEST(RocksDbStore, RowsWithoutAnIdentity_AreDataLoss) {
  const TemporaryDirectory directory;
  Batch damage;
  damage.Delete(Table::kMeta, kMetaClusterId);
  {
    ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(directory / "s", "", "c"));
    ASSERT_OK(store->Write({damage}));
  }
  EXPECT_THAT(OpenRocksDbStore(directory / "s", "", "c"), StatusIs(absl::StatusCode::kDataLoss));
}

TEST(RocksDbStore, DirectoryInUse_IsUnavailableAndSaysSo) {
  const TemporaryDirectory directory;
  ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(directory / "s", "", "c"));
  EXPECT_THAT(
      OpenRocksDbStore(directory / "s", "", "c"),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("in use by a running coordinator")));
}

TEST(RocksDbStore, Backup_HasWhatWasWrittenBeforeAndIsNotChangedByReading) {
#ifdef __SANITIZE_THREAD__
  // A backup flushes on a thread of RocksDB, whose locks the thread sanitizer does not see.
  GTEST_SKIP() << "RocksDB is built without the thread sanitizer";
#endif
  const TemporaryDirectory directory;
  ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(directory / "s", "", "c"));
  ASSERT_OK(store->Write({Puts({"a", "b"}, "1")}));
  ASSERT_OK(store->Backup(directory / "backup"));
  ASSERT_OK(store->Write({Puts({"a", "c"}, "2")}));
  const auto files = [&] {
    std::map<std::string, std::string> contents;
    for (const auto& entry : std::filesystem::directory_iterator(directory / "backup")) {
      std::ifstream file(entry.path(), std::ios::binary);
      contents[entry.path().filename()].assign(std::istreambuf_iterator<char>(file), {});
    }
    return contents;
  };
  const auto before = files();
  {
    ASSERT_OK_AND_ASSIGN(auto copy, OpenRocksDbStoreForReading(directory / "backup"));
    EXPECT_THAT(All(*copy, Table::kJobs), ElementsAre(Pair("a", "1"), Pair("b", "1")));
    EXPECT_THAT(copy->Write({Puts({"d"}, "3")}), StatusIs(absl::StatusCode::kUnavailable));
  }
  EXPECT_EQ(files(), before);
  EXPECT_THAT(store->Backup(directory / "backup"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(directory / "backup")));
}

TEST(RocksDbStore, ReadingADirectoryWithoutAStore_IsNotFoundAndMakesNothing) {
  const TemporaryDirectory directory;
  EXPECT_THAT(OpenRocksDbStoreForReading(directory / "none"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(directory / "none")));
  EXPECT_FALSE(std::filesystem::exists(directory / "none"));
}

TEST(RocksDbStore, DirectoryThatCannotBeMade_IsUnavailableAndNamed) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "file") << "x";
  EXPECT_THAT(OpenRocksDbStore(directory / "file/s", "", "c"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(directory / "file/s")));
}

// Wherever a power cut ends the log, each Write is found whole or not at all, in order.
TEST(RocksDbStore, LogCutAnywhere_LeavesAPrefixOfWholeWrites) {
  const TemporaryDirectory directory;
  constexpr int kWrites = 8;
  {
    ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(directory / "s", "", "c"));
    for (int i = 0; i < kWrites; ++i) {
      const std::string value(200, static_cast<char>('a' + i));
      ASSERT_OK(store->Write({Puts({absl::StrCat(i, "x")}, value),
                              Puts({absl::StrCat(i, "y"), absl::StrCat(i, "z")}, value)}));
    }
    fs::copy(directory / "s", directory / "left", fs::copy_options::recursive);
  }
  std::string log;
  for (const auto& entry : fs::directory_iterator(directory / "left")) {
    const std::string name = entry.path().filename().string();
    if (absl::EndsWith(name, ".log") && (log.empty() || name > log)) log = name;
  }
  const auto size = fs::file_size(directory / "left/" + log);
  ASSERT_GT(size, kWrites * 600u);
  size_t previous = 0;
  for (uintmax_t cut = 300; cut <= size; cut += 211) {
    const std::string copy = directory / "cut";
    fs::remove_all(copy);
    fs::copy(directory / "left", copy, fs::copy_options::recursive);
    fs::resize_file(copy + "/" + log, cut);
    ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(copy, "", "c"));
    const Rows rows = All(*store, Table::kJobs);
    EXPECT_EQ(rows.size() % 3, 0u) << "cut at " << cut;
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].first, absl::StrCat(i / 3, std::string(1, "xyz"[i % 3])));
    }
    EXPECT_GE(rows.size(), previous);
    previous = rows.size();
  }
  EXPECT_GT(previous, 0u);
}

TEST(RocksDbStore, FailedWrite_IsUnavailableAndEndsWritingForThisProcess) {
  const TemporaryDirectory directory;
  ASSERT_OK_AND_ASSIGN(auto store, OpenRocksDbStore(directory / "s", "", "c"));
  ASSERT_OK(store->Write({Puts({"kept"}, "1")}));

  // A file size limit has the effect of a full disk.
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limited = before;
  limited.rlim_cur = 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
  const absl::Status failed = store->Write({Puts({"lost"}, std::string(1 << 20, 'x'))});
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);

  EXPECT_THAT(failed, StatusIs(absl::StatusCode::kUnavailable, HasSubstr(directory / "s")));
  EXPECT_THAT(store->Write({Puts({"later"}, "1")}), StatusIs(absl::StatusCode::kUnavailable));
  store.reset();
  ASSERT_OK_AND_ASSIGN(auto reopened, OpenRocksDbStore(directory / "s", "", "c"));
  EXPECT_THAT(All(*reopened, Table::kJobs), ElementsAre(Pair("kept", "1")));
}

}  // namespace
}  // namespace muster::coordinator
