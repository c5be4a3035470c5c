#include "parallel/data/document_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/data/paragraphs.h"

namespace muster::parallel {
namespace {

constexpr int64_t kUncutMax = int64_t{64} << 20;

bool IsLineEnd(char c) { return c == '\n' || c == '\r'; }

}  // namespace

DocumentReader::DocumentReader(const Tokenizer& tokenizer, const std::vector<TextInput>& inputs,
                               DocumentReaderOptions options, const TextPosition& from)
    : tokenizer_(tokenizer), inputs_(inputs), options_(std::move(options)), position_(from) {}

absl::StatusOr<std::optional<TextChunk>> DocumentReader::Next() {
  if (text_bytes_ >= options_.text_bytes_max) {
    text_bytes_ = 0;
    return std::nullopt;
  }
  while (position_.file < static_cast<int64_t>(inputs_.size())) {
    if (stream_ == nullptr) RETURN_IF_ERROR(OpenFile());
    int64_t want = options_.chunk_bytes;
    while (true) {
      ASSIGN_OR_RETURN(const bool more, stream_->Fill(static_cast<size_t>(want), pending_));
      if (pending_.empty()) break;
      const auto window =
          static_cast<size_t>(std::min(want, static_cast<int64_t>(pending_.size())));
      const bool file_ends = !more && window == pending_.size();
      const Cut cut = FindCut(absl::string_view(pending_).substr(0, window), file_ends);
      if (cut.at > 0) return Take(cut);
      if (want >= kUncutMax) {
        const absl::string_view what = JsonLines() ? "a line of JSON that is longer than "
                                                   : "text without a place to cut it in ";
        return absl::InvalidArgumentError(absl::StrCat(
            inputs_[position_.file].path, ":", position_.line, ": ", what, kUncutMax >> 20, " MiB",
            JsonLines() ? ""
                        : "; documents that are lines or paragraphs are shorter (--documents)"));
      }
      want *= 2;
    }
    position_.text_before += position_.offset;
    position_.read_before += stream_->bytes_read();
    ++position_.file;
    position_.offset = 0;
    position_.line = 1;
    position_.begins = true;
    stream_ = nullptr;
  }
  return std::nullopt;
}

absl::Status DocumentReader::OpenFile() {
  ASSIGN_OR_RETURN(stream_, TextStream::Open(inputs_[position_.file].path));
  return position_.offset == 0 ? absl::OkStatus() : stream_->Skip(position_.offset);
}

bool DocumentReader::JsonLines() const {
  return options_.json_lines || inputs_[position_.file].json_lines;
}

DocumentReader::Cut DocumentReader::FindCut(absl::string_view text, bool file_ends) const {
  Cut cut;
  if (file_ends) {
    cut.at = text.size();
  } else if (JsonLines() || options_.boundary == DocumentBoundary::kLine) {
    cut.at = text.rfind('\n') + 1;  // npos + 1 is 0
  } else if (options_.boundary == DocumentBoundary::kBlankLine) {
    cut.at = LastParagraph(text);
  }
  if (cut.at == 0 && !JsonLines()) {
    cut = {CutInDocument(text), /*ends_document=*/false, /*ends_split=*/false};
  }
  if (cut.at > 0) MaybeEndSplit(text, cut);
  return cut;
}

// Not beside a line end where lines matter: a part that began in the middle of one would look like
// another line.
size_t DocumentReader::CutInDocument(absl::string_view text) const {
  size_t at = tokenizer_.LastCut(text);
  if (options_.boundary == DocumentBoundary::kFile) return at;
  while (at > 0 && (IsLineEnd(text[at - 1]) || IsLineEnd(text[at]))) {
    at = tokenizer_.LastCut(text.substr(0, at));
  }
  return at;
}

void DocumentReader::MaybeEndSplit(absl::string_view text, Cut& cut) const {
  const auto split = static_cast<size_t>(position_.split);
  if (split + 1 >= options_.split_ends.size()) return;
  const int64_t needed =
      std::max<int64_t>(options_.split_ends[split] - position_.text_before - position_.offset, 1);
  if (static_cast<int64_t>(cut.at) < needed) return;
  text = text.substr(0, cut.at);
  const auto from = static_cast<size_t>(needed);
  const bool paragraphs = !JsonLines() && options_.boundary == DocumentBoundary::kBlankLine;
  const size_t end = paragraphs ? FirstParagraph(text, from) : text.find('\n', from - 1) + 1;
  if (end > 0) {
    cut = {end, /*ends_document=*/true, /*ends_split=*/true};
  } else {
    cut.ends_split = cut.ends_document;
  }
}

TextChunk DocumentReader::Take(const Cut& cut) {
  TextChunk chunk;
  chunk.text = pending_.substr(0, cut.at);
  pending_.erase(0, cut.at);
  chunk.json_lines = JsonLines();
  chunk.begins = position_.begins;
  chunk.ends = cut.ends_document;
  chunk.ends_split = cut.ends_split;
  chunk.from = position_;
  position_.offset += static_cast<int64_t>(cut.at);
  text_bytes_ += static_cast<int64_t>(cut.at);
  position_.line += std::count(chunk.text.begin(), chunk.text.end(), '\n');
  position_.begins = cut.ends_document;
  position_.split += cut.ends_split ? 1 : 0;
  chunk.next = position_;
  chunk.bytes_read = position_.read_before + stream_->bytes_read();
  return chunk;
}

}  // namespace muster::parallel
