#include "parallel/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "parallel/checkpoint/box.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/checkpoint/safetensors.h"
#include "tests/parallel/checkpoint_saving.h"
#include "tests/support/forwarding_file_system.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Crc32c, KnownAnswers) {
  // RFC 3720, B.4, and the customary check value.
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(Crc32c(""), 0u);
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 200; ++round) {
    std::string text(rng.Below(100), '\0');
    for (char& c : text) c = static_cast<char>(rng.Next());
    const size_t cut = rng.Below(text.size() + 1);
    EXPECT_EQ(Crc32c(text), Crc32cPortable(text));
    EXPECT_EQ(Crc32c(text.substr(cut), Crc32c(text.substr(0, cut))), Crc32c(text));
  }
}

// ---- boxes -------------------------------------------------------------------------------------

TEST(Box, FlatRange_IsCoveredInOrder_ByFewContiguousBoxes) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 2000; ++round) {
    Box box;
    for (uint64_t d = rng.Below(4); d > 0; --d) {
      box.offset.push_back(static_cast<int64_t>(rng.Below(5)));
      box.extent.push_back(1 + static_cast<int64_t>(rng.Below(5)));
    }
    const int64_t n = box.elements();
    const int64_t begin = static_cast<int64_t>(rng.Below(static_cast<uint64_t>(n) + 1));
    const int64_t end =
        begin + static_cast<int64_t>(rng.Below(static_cast<uint64_t>(n - begin) + 1));
    const std::vector<Box> boxes = FlatRangeToBoxes(box, begin, end);
    EXPECT_LE(boxes.size(), box.extent.empty() ? 1 : 2 * box.extent.size() - 1);
    // The elements of the boxes, in order, are the elements of the range.
    std::vector<int64_t> storage(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) storage[static_cast<size_t>(i)] = i;
    int64_t next = begin;
    for (const Box& part : boxes) {
      std::vector<int64_t> copy(static_cast<size_t>(part.elements()));
      CopyBox(part, 8, box, reinterpret_cast<const char*>(storage.data()), part,
              reinterpret_cast<char*>(copy.data()));
      for (int64_t value : copy) ASSERT_EQ(value, next++) << box.ToString();
    }
    ASSERT_EQ(next, end);
  }
}

TEST(Box, TilingProblem_NamesOverlapAndGap) {
  EXPECT_FALSE(TilingProblem({{{0, 0}, {2, 3}}, {{2, 0}, {2, 1}}, {{2, 1}, {2, 2}}}, {4, 3}));
  EXPECT_THAT(TilingProblem({{{0}, {3}}, {{2}, {2}}}, {4}).value_or(""),
              HasSubstr("[0:3] and [2:4] overlap"));
  EXPECT_THAT(TilingProblem({{{0}, {3}}}, {4}).value_or(""), HasSubstr("1 of 4 elements"));
  EXPECT_THAT(TilingProblem({{{3}, {2}}}, {4}).value_or(""), HasSubstr("not inside"));
  EXPECT_FALSE(TilingProblem({{{}, {}}}, {}));
}

// ---- saving and loading ------------------------------------------------------------------------

// Lets all operations through until a given number of writes; then all fail, as if the process had
// died at that write.
class CuttingFileSystem : public ::muster::testing::ForwardingFileSystem {
 public:
  explicit CuttingFileSystem(FileSystem& files, int64_t writes_max = 1 << 30)
      : ForwardingFileSystem(files), left_(writes_max) {}
  int64_t writes() const { return writes_; }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    if (auto status = Step(); !status.ok()) return status;
    auto file = inner_.Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*this, std::move(file).value());
  }
  absl::Status MakeDirectory(const std::string& path) override {
    const absl::Status status = Step();
    return status.ok() ? inner_.MakeDirectory(path) : status;
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    const absl::Status status = Step();
    return status.ok() ? inner_.Rename(from, to) : status;
  }
  absl::Status SyncDirectory(const std::string& path) override {
    const absl::Status status = Step();
    return status.ok() ? inner_.SyncDirectory(path) : status;
  }
  absl::Status RemoveFile(const std::string& path) override {
    const absl::Status status = Step();
    return status.ok() ? inner_.RemoveFile(path) : status;
  }
  absl::Status RemoveTree(const std::string& path) override {
    const absl::Status status = Step();
    return status.ok() ? inner_.RemoveTree(path) : status;
  }

 private:
  class File : public WritableFile {
   public:
    File(CuttingFileSystem& owner, std::unique_ptr<WritableFile> file)
        : owner_(owner), file_(std::move(file)) {}
    absl::Status Append(absl::string_view bytes) override {
      const absl::Status status = owner_.Step();
      if (!status.ok()) {
        // The process may die in the middle of a write.
        (void)file_->Append(bytes.substr(0, bytes.size() / 2));
        return status;
      }
      return file_->Append(bytes);
    }
    absl::Status Sync() override {
      const absl::Status status = owner_.Step();
      return status.ok() ? file_->Sync() : status;
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    CuttingFileSystem& owner_;
    std::unique_ptr<WritableFile> file_;
  };
  absl::Status Step() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (left_ == 0) return absl::UnavailableError("the process has died");
    --left_;
    ++writes_;
    return absl::OkStatus();
  }

  std::mutex mutex_;
  int64_t left_;
  int64_t writes_ = 0;
};

TEST(Checkpoint, SavedOnAnyNumberOfRanks_LoadsAsAnyBox) {
  for (int ranks : {1, 2, 3, 5, 7}) {
    std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
    auto results = SaveOn(ranks, *files, StateAt(150, 3));
    for (auto& result : results) ASSERT_OK(result);
    EXPECT_EQ(results[0]->directory, "root/gpt-kjv-x7k2p/step-00000150.e3");
    files->Crash();  // a save that has returned is durable
    ASSERT_OK_AND_ASSIGN(auto reader,
                         CheckpointReader::Open(*files, results[0]->directory, Verify::kFull,
                                                results[0]->manifest_checksum));
    const CheckpointState expected = StateAt(150, 3);
    EXPECT_EQ(reader->state().id, expected.id);
    EXPECT_EQ(reader->state().consumed_samples, expected.consumed_samples);
    EXPECT_EQ(reader->state().mesh, expected.mesh);
    EXPECT_EQ(reader->state().integers, expected.integers);
    EXPECT_EQ(reader->state().numbers, expected.numbers);
    EXPECT_EQ(reader->state().texts, expected.texts);
    EXPECT_EQ(reader->tensors().size(), 2u);
    // The first read of a chunk reads and verifies all of it; later ones read only the rows.
    for (Verify verify : {Verify::kSizes, Verify::kFull}) {
      ASSERT_OK_AND_ASSIGN(auto again,
                           CheckpointReader::Open(*files, results[0]->directory, verify));
      for (int64_t r0 = 0; r0 < 6; ++r0) {
        for (int64_t rows = 1; rows <= 6 - r0; ++rows) {
          for (int64_t c0 = 0; c0 < 4; ++c0) {
            const Box box{{r0, c0}, {rows, 4 - c0}};
            std::vector<float> out(static_cast<size_t>(box.elements()));
            ASSERT_OK(again->Read("weight", DType::kF32, box, out.data()));
            ASSERT_EQ(out, Counting(box, {6, 4})) << box.ToString();
          }
        }
      }
    }
    int64_t ids[3];
    ASSERT_OK(reader->Read("ids", DType::kI64, Box::Whole({3}), ids));
    EXPECT_EQ(ids[2], int64_t{1} << 40);
    EXPECT_THAT(reader->Read("wait", DType::kF32, Box::Whole({3}), ids),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tensor 'wait'")));
    EXPECT_THAT(reader->Read("ids", DType::kF32, Box::Whole({3}), ids),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("I64")));
  }
}

TEST(Checkpoint, EveryDType_RoundTrips) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  const char bytes[] = "0123456789abcdefghijklmn";
  std::vector<SaveChunk> chunks;
  for (DType dtype :
       {DType::kU8, DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64}) {
    chunks.push_back({Name(dtype), dtype, {3}, Box::Whole({3}), bytes});
  }
  chunks.push_back({"scalar", DType::kF32, {}, Box{}, bytes});
  TextExchange exchange(1);
  ASSERT_OK_AND_ASSIGN(auto result,
                       SaveCheckpoint(*files, "root", StateAt(1, 1), 0, chunks, exchange.For(0)));
  ASSERT_OK_AND_ASSIGN(auto reader,
                       CheckpointReader::Open(*files, result.directory, Verify::kFull));
  for (const SaveChunk& chunk : chunks) {
    std::string out(static_cast<size_t>(chunk.box.elements() * SizeOf(chunk.dtype)), 'x');
    ASSERT_OK(reader->Read(chunk.tensor, chunk.dtype, chunk.box, out.data()));
    EXPECT_EQ(out, std::string(bytes, out.size())) << chunk.tensor;
  }
}

TEST(Checkpoint, Shard_IsASafetensorsFile_ByteForByte) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  const uint8_t bytes[2] = {1, 2};
  const float row[2] = {1.5f, -2.f}, rest[2] = {0, 1};
  const std::vector<SaveChunk> chunks = {{"b", DType::kU8, {2}, Box::Whole({2}), bytes},
                                         {"a", DType::kF32, {2, 2}, Box{{0, 0}, {1, 2}}, row},
                                         {"a", DType::kF32, {2, 2}, Box{{1, 0}, {1, 2}}, rest}};
  TextExchange exchange(1);
  ASSERT_OK_AND_ASSIGN(auto result,
                       SaveCheckpoint(*files, "root", StateAt(5, 2), 0, chunks, exchange.For(0)));
  ASSERT_OK_AND_ASSIGN(const std::string file,
                       files->Read(result.directory + "/rank-00000.safetensors"));
  std::string json =
      R"({"__metadata__":{"epoch":"2","format":"muster","job":"gpt-kjv-x7k2p","step":"5"},)"
      R"("a[0:1, 0:2]":{"data_offsets":[0,8],"dtype":"F32","shape":[1,2]},)"
      R"("a[1:2, 0:2]":{"data_offsets":[8,16],"dtype":"F32","shape":[1,2]},)"
      R"("b":{"data_offsets":[16,18],"dtype":"U8","shape":[2]}})";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  std::string expected(reinterpret_cast<const char*>(&length), 8);
  expected += json;
  expected += std::string("\0\0\xC0\x3F\0\0\0\xC0\0\0\0\0\0\0\x80\x3F\1\2", 18);
  EXPECT_EQ(file, expected);
}

// The reference implementation reads the same file. Shard_IsASafetensorsFile covers the format
// where it is not installed.
TEST(Checkpoint, Shard_IsReadByPythonsSafetensors) {
  if (std::system("python3 -c 'import safetensors' 2>/dev/null") != 0) {
    GTEST_SKIP() << "python3 has no safetensors package (pip install safetensors)";
  }
  ::muster::testing::TemporaryDirectory directory;
  std::unique_ptr<FileSystem> files = PosixFileSystem();
  const float values[4] = {1.5f, -2.f, 0.f, 1.f};
  const int64_t id = -5;
  TextExchange exchange(1);
  ASSERT_OK_AND_ASSIGN(auto result,
                       SaveCheckpoint(*files, directory / "root", StateAt(5, 2), 0,
                                      {{"w", DType::kF32, {2, 2}, Box::Whole({2, 2}), values},
                                       {"id", DType::kI64, {1}, Box::Whole({1}), &id}},
                                      exchange.For(0)));
  const std::string script = absl::StrCat(
      "import safetensors, struct\n"
      "data = open('",
      result.directory,
      "/rank-00000.safetensors', 'rb').read()\n"
      "tensors = dict(safetensors.deserialize(data))\n"
      "assert set(tensors) == {'w', 'id'}, tensors\n"
      "assert tensors['w']['shape'] == [2, 2] and tensors['w']['dtype'] == 'F32', tensors\n"
      "assert struct.unpack('<4f', tensors['w']['data']) == (1.5, -2, 0, 1), tensors\n"
      "assert struct.unpack('<q', tensors['id']['data']) == (-5,), tensors\n");
  ASSERT_OK(files->WriteAtomically(directory / "check.py", script));
  EXPECT_EQ(std::system(absl::StrCat("python3 ", directory / "check.py").c_str()), 0);
}

TEST(Checkpoint, CutAtAnyWrite_NeverLeavesAManifestOverMissingData) {
  std::unique_ptr<MemoryFileSystem> whole = MemoryFileSystem::Make();
  CuttingFileSystem counting(*whole);
  CheckpointState state = StateAt(100, 1);
  state.files = {{"tokenizer", "of this model"}};
  for (auto& result : SaveOn(2, counting, state)) ASSERT_OK(result);
  const int64_t writes = counting.writes();
  ASSERT_GT(writes, 15);
  int complete = 0;
  for (int64_t cut = 0; cut <= writes; ++cut) {
    std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
    for (auto& result : SaveOn(2, *files, StateAt(50, 1))) ASSERT_OK(result);
    CuttingFileSystem dying(*files, cut);
    const auto results = SaveOn(2, dying, state);
    files->Crash();
    ASSERT_OK_AND_ASSIGN(auto entries, ListCheckpoints(*files, "root", JobId("gpt-kjv-x7k2p")));
    ASSERT_FALSE(entries.empty());
    EXPECT_TRUE(entries[0].complete);
    for (const CheckpointEntry& entry : entries) {
      if (!entry.complete) continue;
      const auto reader = CheckpointReader::Open(*files, entry.directory, Verify::kFull);
      ASSERT_THAT(reader, IsOk()) << "cut at write " << cut;
      ASSERT_OK_AND_ASSIGN(
          const std::string tokenizer,
          ReadCheckpointFile(*files, entry.directory, (*reader)->state(), "tokenizer"));
      EXPECT_EQ(tokenizer, entry.id.step == 100 ? "of this model" : "") << "cut at write " << cut;
      complete += entry.id.step == 100;
    }
    if (results[0].ok()) {
      EXPECT_EQ(complete, 1) << "reported saved, but not durable";
    }
  }
  EXPECT_EQ(complete, 1);  // the last one, which was not cut
}

TEST(Checkpoint, FileBesideTheShards_IsCheckedWhenItIsRead) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  CheckpointState state = StateAt(7, 1);
  state.files = {{"tokenizer", "of this model"}};
  const auto saved = SaveOn(2, *files, state);
  ASSERT_OK(saved[0]);
  const std::string& directory = saved[0]->directory;
  ASSERT_OK_AND_ASSIGN(const auto reader,
                       CheckpointReader::Open(*files, directory, Verify::kSizes));
  const auto read = [&] {
    return ReadCheckpointFile(*files, directory, reader->state(), "tokenizer");
  };
  EXPECT_EQ(*read(), "of this model");
  ASSERT_OK(files->WriteAtomically(directory + "/tokenizer", "of another"));
  EXPECT_THAT(read(), StatusIs(absl::StatusCode::kDataLoss,
                               AllOf(HasSubstr(directory + "/tokenizer"), HasSubstr("CRC32C"))));
  ASSERT_OK(files->RemoveFile(directory + "/tokenizer"));
  EXPECT_THAT(read(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is missing")));
}

TEST(Checkpoint, FailureOfOneRank_IsTheFailureOfAll) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  CuttingFileSystem dying(*files, 12);
  for (auto& result : SaveOn(3, dying, StateAt(1, 1))) {
    EXPECT_THAT(result, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank ")));
  }
  for (auto& result : SaveOn(3, *files, StateAt(2, 1), /*missing=*/5)) {
    EXPECT_THAT(result, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("tensor 'weight': 5 of 24 elements are in no chunk")));
  }
  ASSERT_OK_AND_ASSIGN(auto entries, ListCheckpoints(*files, "root", JobId("gpt-kjv-x7k2p")));
  for (const CheckpointEntry& entry : entries) EXPECT_FALSE(entry.complete);
}

TEST(Checkpoint, SecondSaveOfTheSameStep_IsRefused) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  ASSERT_OK(SaveOn(1, *files, StateAt(1, 1))[0]);
  EXPECT_THAT(SaveOn(1, *files, StateAt(1, 1))[0], StatusIs(absl::StatusCode::kAlreadyExists));
}

TEST(Checkpoint, Prune_RemovesOldOnes_ButNothingOfANewerAttemptAndNoSaveUnderWay) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  const JobId job("gpt-kjv-x7k2p");
  for (auto [step, epoch] : std::vector<std::pair<int64_t, uint64_t>>{
           {50, 1}, {100, 1}, {150, 1}, {100, 2}, {150, 2}, {200, 2}, {120, 3}}) {
    ASSERT_OK(SaveOn(1, *files, StateAt(step, epoch))[0]);
  }
  ASSERT_OK(files->WriteAtomically("root/gpt-kjv-x7k2p/notes.txt", "mine"));
  const std::vector<CheckpointId> keep = {{job, 100, Epoch(1)}, {job, 150, Epoch(2)}};
  ASSERT_OK_AND_ASSIGN(auto removed, PruneCheckpoints(*files, "root", job, Epoch(2), keep));
  EXPECT_EQ(removed.size(), 3u);
  ASSERT_OK_AND_ASSIGN(auto names, files->List("root/gpt-kjv-x7k2p"));
  EXPECT_EQ(names, (std::vector<std::string>{"notes.txt", "step-00000100.e1", "step-00000120.e3",
                                             "step-00000150.e2", "step-00000200.e2"}));
  ASSERT_OK_AND_ASSIGN(auto none, ListCheckpoints(*files, "root", JobId("other")));
  EXPECT_TRUE(none.empty());
}

// Ranks that were replaced before training may have written the same step of the same epoch.
TEST(Checkpoint, LaterMembershipOfAnEpoch_HasDirectoriesOfItsOwn) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  CheckpointState state = StateAt(100, 1);
  ASSERT_OK(SaveOn(1, *files, state)[0]);
  state.id.membership = 2;
  ASSERT_OK_AND_ASSIGN(const SaveResult saved, SaveOn(1, *files, state)[0]);
  EXPECT_EQ(saved.directory, "root/gpt-kjv-x7k2p/step-00000100.e1.m2");
  ASSERT_OK_AND_ASSIGN(auto entries, ListCheckpoints(*files, "root", state.id.job));
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[1].id, state.id);
  state.id.step = 200;
  ASSERT_OK(SaveOn(1, *files, state)[0]);
  ASSERT_OK_AND_ASSIGN(auto removed, PruneCheckpoints(*files, "root", state.id.job, Epoch(1),
                                                      std::vector<CheckpointId>{state.id}));
  EXPECT_EQ(removed.size(), 2u);
}

TEST(Checkpoint, Remove_CutAtAnyWrite_LeavesNoManifestOverMissingData) {
  for (int64_t cut = 0; cut < 5; ++cut) {
    std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
    ASSERT_OK(SaveOn(2, *files, StateAt(1, 1))[0]);
    CuttingFileSystem dying(*files, cut);
    (void)RemoveCheckpoint(dying, "root", StateAt(1, 1).id);
    files->Crash();
    ASSERT_OK_AND_ASSIGN(auto entries, ListCheckpoints(*files, "root", StateAt(1, 1).id.job));
    for (const CheckpointEntry& entry : entries) {
      if (entry.complete) {
        EXPECT_OK(CheckpointReader::Open(*files, entry.directory, Verify::kFull));
      }
    }
  }
}

}  // namespace
}  // namespace muster::parallel
