#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/data/bpe_trainer.h"
#include "parallel/data/chunk_encoder.h"
#include "parallel/data/text_input.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {
namespace {

constexpr size_t kPreTokenBytesMax = 1024;

// A tokenizer without tokens: its encoders count the pre-tokens of what they are given, each in a
// table of its own, which it leaves to the counter when it goes.
class Counter : public Tokenizer {
 public:
  explicit Counter(SplitPattern pattern) : pattern_(pattern) {}

  absl::string_view name() const override { return "pre-tokens"; }
  int64_t vocab() const override { return 1; }
  void Encode(absl::string_view, std::vector<int32_t>&) const override {}
  std::unique_ptr<Encoder> NewEncoder() const override {
    return std::make_unique<CountingEncoder>(*this);
  }
  size_t LastCut(absl::string_view text) const override {
    return parallel::LastCut(text, /*at_lines=*/true);
  }
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t>) const override {
    return std::string();
  }
  std::optional<int32_t> IdOf(absl::string_view) const override { return std::nullopt; }
  const BoundaryTokens& boundaries() const override { return none_; }

  PreTokenCounts Take() {
    MutexLock lock(&mutex_);
    return std::move(counts_);
  }

 private:
  class CountingEncoder : public Encoder {
   public:
    explicit CountingEncoder(const Counter& counter) : counter_(counter) {}
    ~CountingEncoder() override { counter_.Add(std::move(counts_)); }
    void Encode(absl::string_view text, bool, std::vector<int32_t>&) override {
      std::string valid;
      if (!IsValidUtf8(text)) {
        valid = ToValidUtf8(text);
        text = valid;
      }
      while (!text.empty()) {
        const size_t bytes = NextPreToken(counter_.pattern_, text);
        if (bytes <= kPreTokenBytesMax) ++counts_[text.substr(0, bytes)];
        text.remove_prefix(bytes);
      }
    }

   private:
    const Counter& counter_;
    PreTokenCounts counts_;
  };

  void Add(PreTokenCounts counts) const {
    MutexLock lock(&mutex_);
    if (counts_.size() < counts.size()) std::swap(counts_, counts);
    for (const auto& [word, count] : counts) counts_[word] += count;
  }

  const SplitPattern pattern_;
  const BoundaryTokens none_ = {};
  mutable Mutex mutex_;
  mutable PreTokenCounts counts_ ABSL_GUARDED_BY(mutex_);
};

void DropRarest(PreTokenCounts& counts, size_t distinct_max) {
  for (int64_t least = 2; counts.size() > distinct_max; ++least) {
    absl::erase_if(counts, [least](const auto& each) { return each.second < least; });
  }
}

}  // namespace

absl::StatusOr<PreTokenCounts> CountPreTokens(const CountOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<TextInput> inputs, ListTextInputs(options.inputs));
  int64_t bytes = 0;
  for (const TextInput& input : inputs) {
    bytes = bytes < 0 || input.bytes < 0 ? -1 : bytes + input.bytes;
  }
  Counter counter(options.pattern);
  EncodingOptions encoding;
  encoding.field = options.field.empty() ? "text" : options.field;
  encoding.threads = std::max(options.threads, 1);
  DocumentReaderOptions reading;
  reading.json_lines = !options.field.empty();
  reading.chunk_bytes = options.chunk_bytes;
  reading.text_bytes_max = options.section_bytes;
  DocumentReader reader(counter, inputs, reading, TextPosition());
  PreTokenCounts counts;
  for (bool more = true; more;) {
    more = false;
    {
      const auto pipeline = EncodingPipeline::Start(counter, inputs, reader, encoding);
      while (true) {
        ASSIGN_OR_RETURN(const std::optional<EncodedChunk> chunk, pipeline->Next());
        if (!chunk.has_value()) break;
        more = true;
        if (options.progress) options.progress(chunk->bytes_read, bytes);
      }
    }
    PreTokenCounts section = counter.Take();
    if (counts.size() < section.size()) std::swap(counts, section);
    for (const auto& [word, count] : section) counts[word] += count;
    DropRarest(counts, options.distinct_max);
  }
  if (counts.empty()) return absl::InvalidArgumentError("there is no text in the input");
  return counts;
}

}  // namespace muster::parallel
