#include "parallel/data/chunk_encoder.h"

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/data/json_field.h"
#include "parallel/data/paragraphs.h"

namespace muster::parallel {
namespace {

// Encodes chunks on one thread.
class ChunkEncoder {
 public:
  ChunkEncoder(const Tokenizer& tokenizer, const std::vector<TextInput>& inputs,
               const EncodingOptions& options)
      : inputs_(inputs), options_(options), encoder_(tokenizer.NewEncoder()) {}

  absl::StatusOr<EncodedChunk> Encode(const TextChunk& chunk) {
    EncodedChunk encoded;
    encoded.ends = chunk.ends;
    encoded.ends_split = chunk.ends_split;
    encoded.bytes_read = chunk.bytes_read;
    encoded.next = chunk.next;
    encoded.tokens.reserve(chunk.text.size() / 3);
    if (chunk.json_lines) {
      RETURN_IF_ERROR(EncodeJsonLines(chunk, encoded));
      return encoded;
    }
    absl::string_view rest = chunk.text;
    for (bool first = true; !rest.empty(); first = false) {
      const size_t bytes = DocumentBytes(rest);
      const bool last = bytes == rest.size();
      Document(rest.substr(0, bytes), !first || chunk.begins, !last || chunk.ends, encoded);
      rest.remove_prefix(bytes);
    }
    return encoded;
  }

 private:
  size_t DocumentBytes(absl::string_view text) const {
    size_t bytes = 0;
    if (options_.boundary == DocumentBoundary::kLine) bytes = text.find('\n') + 1;
    if (options_.boundary == DocumentBoundary::kBlankLine) bytes = FirstParagraph(text, 1);
    return bytes == 0 ? text.size() : bytes;
  }

  void Document(absl::string_view text, bool begins, bool ends, EncodedChunk& encoded) {
    std::vector<int32_t>& tokens = encoded.tokens;
    const size_t before = tokens.size();
    if (begins) tokens.insert(tokens.end(), options_.bos.begin(), options_.bos.end());
    encoder_->Encode(text, begins, tokens);
    if (ends) tokens.insert(tokens.end(), options_.eos.begin(), options_.eos.end());
    encoded.documents.push_back(static_cast<int64_t>(tokens.size() - before));
    encoded.text_bytes += static_cast<int64_t>(text.size());
  }

  absl::Status EncodeJsonLines(const TextChunk& chunk, EncodedChunk& encoded) {
    absl::string_view rest = chunk.text;
    for (int64_t line_number = chunk.from.line; !rest.empty(); ++line_number) {
      const size_t bytes = std::min(rest.find('\n'), rest.size() - 1) + 1;
      const absl::string_view line = absl::StripAsciiWhitespace(rest.substr(0, bytes));
      rest.remove_prefix(bytes);
      if (line.empty()) continue;
      if (const absl::Status status = ReadStringField(line, options_.field, text_); !status.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat(inputs_[static_cast<size_t>(chunk.from.file)].path, ":", line_number, ": ",
                         status.message()));
      }
      if (!text_.empty()) Document(text_, /*begins=*/true, /*ends=*/true, encoded);
    }
    return absl::OkStatus();
  }

  const std::vector<TextInput>& inputs_;
  const EncodingOptions& options_;
  const std::unique_ptr<Tokenizer::Encoder> encoder_;
  std::string text_;
};

class Pipeline : public EncodingPipeline {
 public:
  Pipeline(const Tokenizer& tokenizer, const std::vector<TextInput>& inputs, DocumentReader& reader,
           const EncodingOptions& options)
      : tokenizer_(tokenizer),
        inputs_(inputs),
        reader_(reader),
        options_(options),
        under_way_max_(2 * static_cast<size_t>(options.threads) + 2) {
    threads_.emplace_back([this] { Read(); });
    for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Pipeline() override {
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  absl::StatusOr<std::optional<EncodedChunk>> Next() override {
    MutexLock lock(&mutex_);
    mutex_.Await(Condition(this, &Pipeline::FirstIsDone));
    if (under_way_.empty()) {
      RETURN_IF_ERROR(reader_status_);
      return std::nullopt;
    }
    const std::unique_ptr<Job> job = std::move(under_way_.front());
    under_way_.pop_front();
    ++taken_;
    RETURN_IF_ERROR(job->result.status());
    return std::optional<EncodedChunk>(*std::move(job->result));
  }

 private:
  struct Job {
    TextChunk chunk;
    absl::StatusOr<EncodedChunk> result = absl::UnknownError("not encoded");
    bool done = false;
  };

  // Conditions of waiting.
  bool FirstIsDone() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return under_way_.empty() ? read_all_ : under_way_.front()->done;
  }
  bool HasRoom() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopped_ || under_way_.size() < under_way_max_;
  }
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopped_ || read_all_ || next_ < taken_ + under_way_.size();
  }

  void Read() {
    while (true) {
      {
        MutexLock lock(&mutex_);
        mutex_.Await(Condition(this, &Pipeline::HasRoom));
        if (stopped_) return;
      }
      absl::StatusOr<std::optional<TextChunk>> chunk = reader_.Next();
      MutexLock lock(&mutex_);
      if (!chunk.ok() || !chunk->has_value()) {
        reader_status_ = chunk.status();
        read_all_ = true;
        return;
      }
      under_way_.push_back(std::make_unique<Job>());
      under_way_.back()->chunk = **std::move(chunk);
    }
  }

  void Work() {
    ChunkEncoder encoder(tokenizer_, inputs_, options_);
    while (true) {
      Job* job = nullptr;
      {
        MutexLock lock(&mutex_);
        mutex_.Await(Condition(this, &Pipeline::HasWork));
        if (stopped_ || next_ == taken_ + under_way_.size()) return;
        job = under_way_[next_ - taken_].get();
        ++next_;
      }
      absl::StatusOr<EncodedChunk> result = encoder.Encode(job->chunk);
      MutexLock lock(&mutex_);
      job->result = std::move(result);
      job->chunk.text = std::string();
      job->done = true;
    }
  }

  const Tokenizer& tokenizer_;
  const std::vector<TextInput>& inputs_;
  DocumentReader& reader_;
  const EncodingOptions options_;
  const size_t under_way_max_;
  Mutex mutex_;
  // In the order of the input. A job is changed by the thread that works on it, and taken out when
  // it is done.
  std::deque<std::unique_ptr<Job>> under_way_ ABSL_GUARDED_BY(mutex_);
  size_t taken_ ABSL_GUARDED_BY(mutex_) = 0;  // jobs that Next() gave
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;  // the next one to be worked on, counted from the first
  bool read_all_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status reader_status_ ABSL_GUARDED_BY(mutex_);  // once read_all_
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<EncodingPipeline> EncodingPipeline::Start(const Tokenizer& tokenizer,
                                                          const std::vector<TextInput>& inputs,
                                                          DocumentReader& reader,
                                                          const EncodingOptions& options) {
  return std::make_unique<Pipeline>(tokenizer, inputs, reader, options);
}

}  // namespace muster::parallel
