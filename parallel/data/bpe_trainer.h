// Trains byte-level byte-pair encoding (Sennrich et al., arXiv 1508.07909) to a tokenizer.json.
#ifndef MUSTER_PARALLEL_DATA_BPE_TRAINER_H_
#define MUSTER_PARALLEL_DATA_BPE_TRAINER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "parallel/data/document_reader.h"
#include "parallel/data/pre_tokenizer.h"

namespace muster::parallel {

// How often each pre-token occurs.
using PreTokenCounts = absl::flat_hash_map<std::string, int64_t>;

struct CountOptions {
  std::vector<std::string> inputs;  // as for ListTextInputs
  std::string field;                // as in TokenizeOptions
  SplitPattern pattern = SplitPattern::kGpt2;
  int threads = 1;
  // Text is counted in sections of so many bytes. Behind each, the rarest pre-tokens are dropped
  // until there are at most `distinct_max`, which bounds the memory.
  int64_t section_bytes = int64_t{1} << 30;
  size_t distinct_max = 16'000'000;
  int64_t chunk_bytes = 1 << 20;
  std::function<void(int64_t, int64_t)> progress;  // as in TokenizeOptions
};
// The same for any number of threads. Pre-tokens of more than 1,024 bytes are left out. Codes are
// those of Tokenize().
absl::StatusOr<PreTokenCounts> CountPreTokens(const CountOptions& options);

struct BpeModel {
  std::vector<std::string> tokens;                          // bytes, by id; the first 256 are bytes
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
};
// Merges the most frequent pair, of several the one of the smallest ids, until there are
// `vocabulary` tokens or no pair occurs `frequency_min` times. kInvalidArgument for a vocabulary
// below 256 or above kIdMax. `progress` is called with (tokens so far, tokens at most); may be
// empty.
absl::StatusOr<BpeModel> TrainBpe(const PreTokenCounts& counts, int64_t vocabulary,
                                  int64_t frequency_min,
                                  const std::function<void(int64_t, int64_t)>& progress = {});

// A tokenizer.json of the model, with `specials` behind its tokens. kWhole has no regular
// expression: kInvalidArgument; so for kCl100kRanks.
absl::StatusOr<std::string> ToTokenizerJson(const BpeModel& model, SplitPattern pattern,
                                            const std::vector<std::string>& specials);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_BPE_TRAINER_H_
