// Files that the engine reads, damaged at random. Reading each gives a clear error or a valid
// result, never a crash, a hang or a huge allocation.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/checkpoint/safetensors.h"
#include "parallel/data/indexed_dataset.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;

// Edge values for length and offset fields.
constexpr uint64_t kEdges[] = {0,          1,          0x7F,       0xFF,
                               0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF,
                               1ull << 63, ~0ull,      1ull << 40, 0x2020202020202020};

// One to four random edits: a byte, an edge value, a cut, an insertion, a doubled range.
std::string Mutate(Rng& rng, std::string bytes) {
  for (uint64_t edits = 1 + rng.Below(4); edits > 0; --edits) {
    const size_t at = rng.Below(bytes.size() + 1);
    switch (rng.Below(6)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(rng.Next());
        break;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.Below(8)));
        break;
      case 2: {
        const uint64_t edge = kEdges[rng.Below(std::size(kEdges))];
        if (at + 8 <= bytes.size()) std::memcpy(&bytes[at], &edge, 8);
        break;
      }
      case 3:
        bytes.resize(at);
        break;
      case 4: {
        static constexpr const char* kTokens[] = {
            "\"",   "{",     "}",  "[",    "]",   ",",   ":",   "-1",
            "1e99", "99999", "[[", "null", "{\"", "\\u", "1.5", "18446744073709551616"};
        bytes.insert(at, kTokens[rng.Below(std::size(kTokens))]);
        break;
      }
      default: {
        const std::string range = bytes.substr(at, rng.Below(40));
        bytes.insert(rng.Below(bytes.size() + 1), range);
      }
    }
  }
  return bytes;
}

TEST(Fuzz, IndexOfADataset_Damaged_NeverCrashes) {
  ::muster::testing::TemporaryDirectory directory;
  std::unique_ptr<FileSystem> files = PosixFileSystem();
  const std::string prefix = directory / "d";
  ASSERT_OK_AND_ASSIGN(auto writer, IndexedDatasetWriter::Create(*files, prefix, TokenType::kU16));
  for (int32_t document = 0; document < 20; ++document) {
    ASSERT_OK(writer->Append(std::vector<int32_t>(static_cast<size_t>(document), document)));
    ASSERT_OK(writer->EndDocument());
  }
  ASSERT_OK(writer->Finish());
  ASSERT_OK_AND_ASSIGN(const std::string sound, files->Read(prefix + ".idx"));
  Rng rng(::muster::testing::TestSeed());
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    ASSERT_OK_AND_ASSIGN(auto file, files->Create(prefix + ".idx"));
    ASSERT_OK(file->Append(Mutate(rng, sound)));
    ASSERT_OK(file->Close());
    auto dataset = IndexedDataset::Open(prefix);
    if (!dataset.ok()) {
      EXPECT_THAT(dataset, StatusIs(absl::StatusCode::kDataLoss));
      EXPECT_TRUE(absl::StrContains(dataset.status().message(), prefix)) << dataset.status();
      ++refused;
      continue;
    }
    // Accepted, so that everything in it must be readable.
    std::vector<int32_t> ids(static_cast<size_t>((*dataset)->tokens()));
    (void)(*dataset)->Read(0, 65536, absl::MakeSpan(ids));
    for (int64_t i = 0; i <= (*dataset)->documents(); ++i) {
      EXPECT_LE((*dataset)->DocumentBegin(i), (*dataset)->tokens());
    }
  }
  EXPECT_GT(refused, 2000);
}

TEST(Fuzz, SafetensorsHeader_Damaged_NeverCrashes) {
  SafetensorsHeader header;
  header.metadata = {{"format", "muster"}, {"step", "17"}};
  int64_t at = 0;
  for (int i = 0; i < 6; ++i) {
    header.entries.push_back(
        {absl::StrCat("blocks.", i, ".weight"), DType::kF32, {i, 3}, at, at + 12 * i});
    at += 12 * i;
  }
  const std::string sound =
      EncodeSafetensorsHeader(header) + std::string(static_cast<size_t>(at), 'x');
  ASSERT_OK(DecodeSafetensorsHeader(sound, static_cast<int64_t>(sound.size()), "f"));
  Rng rng(::muster::testing::TestSeed());
  int refused = 0;
  for (int round = 0; round < 10'000; ++round) {
    const std::string bytes = Mutate(rng, sound);
    const int64_t size = static_cast<int64_t>(bytes.size());
    auto decoded = DecodeSafetensorsHeader(bytes, size, "f");
    if (!decoded.ok()) {
      EXPECT_THAT(decoded, StatusIs(absl::StatusCode::kDataLoss));
      EXPECT_TRUE(absl::StartsWith(decoded.status().message(), "f: "));
      ++refused;
      continue;
    }
    int64_t end = 0;
    for (const SafetensorsEntry& entry : decoded->entries) {
      EXPECT_EQ(entry.begin, end);
      end = entry.end;
    }
    EXPECT_EQ(decoded->bytes + end, size);
  }
  EXPECT_GT(refused, 5000);
}

TEST(Fuzz, ManifestWithARightChecksum_Damaged_NeverCrashes) {
  std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
  CheckpointState state;
  state.id = {JobId("job-abcde"), 7, Epoch(2)};
  state.numbers = {{"x", 0.1}};
  state.mesh = {{"data", 2}};
  const float data[12] = {};
  const std::vector<SaveChunk> chunks = {{"w", DType::kF32, {4, 3}, Box{{0, 0}, {2, 3}}, data},
                                         {"w", DType::kF32, {4, 3}, Box{{2, 0}, {2, 3}}, data},
                                         {"b", DType::kU8, {5}, Box::Whole({5}), data}};
  ASSERT_OK_AND_ASSIGN(auto saved, SaveCheckpoint(*files, "root", state, 0, chunks, GatherAlone()));
  const std::string path = saved.directory + "/manifest.json";
  ASSERT_OK_AND_ASSIGN(const std::string sound, files->Read(path));
  const size_t body_at = sound.find("\"manifest\":") + 11;
  const std::string body = sound.substr(body_at, sound.size() - body_at - 2);
  Rng rng(::muster::testing::TestSeed());
  const size_t in_use_before = mallinfo2().uordblks;
  int refused = 0;
  for (int round = 0; round < 10'000; ++round) {
    const std::string damaged = Mutate(rng, body);
    ASSERT_OK(files->WriteAtomically(path, absl::StrCat("{\"crc32c\":\"", CrcText(Crc32c(damaged)),
                                                        "\",\"manifest\":", damaged, "}\n")));
    auto reader = CheckpointReader::Open(*files, saved.directory, Verify::kFull);
    if (!reader.ok()) {
      EXPECT_THAT(reader, StatusIs(absl::StatusCode::kDataLoss)) << damaged;
      ++refused;
      continue;
    }
    for (const auto& [name, info] : (*reader)->tensors()) {
      const Box whole = Box::Whole(info.shape);
      std::string out(static_cast<size_t>(whole.elements() * SizeOf(info.dtype)), '\0');
      EXPECT_OK((*reader)->Read(name, info.dtype, whole, out.data())) << damaged;
    }
  }
  EXPECT_GT(refused, 5000);
  EXPECT_LT(mallinfo2().uordblks, in_use_before + (32u << 20));
}

TEST(Fuzz, DeeplyNestedJson_IsRefused) {
  std::string json(2'000'000, '[');
  const uint64_t length = json.size();
  const std::string file = std::string(reinterpret_cast<const char*>(&length), 8) + json;
  EXPECT_THAT(DecodeSafetensorsHeader(file, static_cast<int64_t>(file.size()), "f"),
              StatusIs(absl::StatusCode::kDataLoss));
}

}  // namespace
}  // namespace muster::parallel
