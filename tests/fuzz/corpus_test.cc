// Runs the corpus of the fuzz targets, and inputs made of it by random changes, through the targets
// in an ordinary build.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "base/rng.h"
#include "tests/fuzz/targets/targets.h"
#include "tests/support/seed.h"

namespace muster::fuzz {
namespace {

constexpr int kChangesOfEach = 200;

std::vector<std::string> Corpus(const std::string& target) {
  std::vector<std::filesystem::path> paths;
  for (const auto& file :
       std::filesystem::directory_iterator(std::string(MUSTER_FUZZ_CORPUS "/") + target)) {
    paths.push_back(file.path());
  }
  std::sort(paths.begin(), paths.end());  // so that a seed means the same everywhere
  std::vector<std::string> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

void RunAll(const std::string& target, const std::function<void(const std::string&)>& run) {
  const std::vector<std::string> corpus = Corpus(target);
  ASSERT_FALSE(corpus.empty());
  Rng rng(testing::TestSeed());
  for (const std::string& input : corpus) {
    run(input);
    for (int i = 0; i < kChangesOfEach && !input.empty(); ++i) {
      std::string changed = input;
      for (uint64_t changes = 1 + rng.Below(4); changes > 0; --changes) {
        const size_t at = rng.Below(changed.size());
        switch (rng.Below(4)) {
          case 0:
            changed[at] = static_cast<char>(rng.Next());
            break;
          case 1:
            changed.insert(at, 1, static_cast<char>(rng.Next()));
            break;
          case 2:
            changed.append(changed.substr(at));
            break;
          default:
            if (changed.size() > 1) changed.erase(at, 1 + rng.Below(changed.size() - at));
            if (changed.empty()) changed = "x";
        }
      }
      run(changed);
    }
  }
}

TEST(FuzzCorpus, SpecYaml_NeitherCrashesNorLosesAField) { RunAll("spec_yaml", SpecYaml); }
TEST(FuzzCorpus, SpecProto_NeitherCrashesNorLosesAField) { RunAll("spec_proto", SpecProto); }
TEST(FuzzCorpus, FramesOfDaemons_BreakNoInvariantOfTheCoordinator) {
  RunAll("coordinator_frames", CoordinatorFrames);
}
TEST(FuzzCorpus, FramesOfACoordinator_BreakNoInvariantOfTheDaemon) {
  RunAll("daemon_frames", DaemonFrames);
}

TEST(FuzzCorpus, QueuePolicyYaml_IsRefusedOrMakesATree) {
  RunAll("queue_policy_yaml", QueuePolicyYaml);
}
TEST(FuzzCorpus, QueuePolicyProto_IsRefusedOrMakesATree) {
  RunAll("queue_policy_proto", QueuePolicyProto);
}

TEST(FuzzCorpus, TokenizerJson_IsRefusedOrEncodes) { RunAll("tokenizer_json", TokenizerJson); }
TEST(FuzzCorpus, TiktokenRanks_AreRefusedOrEncode) { RunAll("tiktoken_ranks", TiktokenRanks); }
TEST(FuzzCorpus, SentencePieceModel_IsRefusedOrEncodes) {
  RunAll("sentence_piece_model", SentencePieceModel);
}
TEST(FuzzCorpus, TopologyFile_IsRefusedOrHoldsGangs) { RunAll("topology_file", TopologyFile); }

TEST(FuzzCorpus, CallerText_IsRefusedOrRead) { RunAll("caller_text", CallerText); }
TEST(FuzzCorpus, WorkerText_IsRefusedOrRead) { RunAll("worker_text", WorkerText); }
TEST(FuzzCorpus, JsonLine_IsReadAsAParserOfAllJsonReadsIt) { RunAll("json_line", JsonLine); }

}  // namespace
}  // namespace muster::fuzz
