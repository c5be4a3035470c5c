#include "cli/data.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "parallel/data/bpe_trainer.h"
#include "parallel/data/tokenize.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/tokenizer_file.h"

namespace muster::cli {
namespace {

// Prints the progress of a long run; a short one prints nothing.
class Progress {
 public:
  Progress(Terminal& terminal, std::string what) : terminal_(terminal), what_(std::move(what)) {}
  // An earlier run has read so much.
  void Resumed(int64_t done) {
    terminal_.err << "continuing the run that was interrupted behind " << Bytes(done) << "\n"
                  << std::flush;
    first_ = done;
  }
  // `total` is -1 where it is not known.
  void operator()(int64_t done, int64_t total) {
    const absl::Time now = absl::Now();
    if (now - shown_ < (terminal_.is_tty ? absl::Milliseconds(200) : absl::Seconds(5))) return;
    shown_ = now;
    const double speed = static_cast<double>(done - first_) / absl::ToDoubleSeconds(now - begun_);
    std::string line = absl::StrCat(what_, ": ", Bytes(done));
    if (total >= 0) absl::StrAppend(&line, " of ", Bytes(total));
    absl::StrAppend(&line, ", ", Bytes(static_cast<int64_t>(speed)), "/s");
    if (total >= done && speed > 0) {
      const absl::Duration left = absl::Seconds(static_cast<double>(total - done) / speed);
      absl::StrAppend(&line, ", ", absl::FormatDuration(absl::Ceil(left, absl::Seconds(1))),
                      " left");
    }
    drawn_ = terminal_.is_tty;
    terminal_.err << (drawn_ ? "\r" : "") << line << (drawn_ ? "\033[K" : "\n") << std::flush;
  }
  void End() {
    if (drawn_) terminal_.err << "\r\033[K" << std::flush;
  }

 private:
  Terminal& terminal_;
  const std::string what_;
  const absl::Time begun_ = absl::Now();
  absl::Time shown_ = absl::Now();
  int64_t first_ = 0;
  bool drawn_ = false;
};

int ThreadsOf(int asked) {
  return asked > 0 ? asked : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

absl::Status DataTrainTokenizer(const TrainTokenizerArguments& arguments, Format format,
                                Terminal& terminal) {
  const std::pair<const char*, parallel::SplitPattern> patterns[] = {
      {"gpt2", parallel::SplitPattern::kGpt2},
      {"llama3", parallel::SplitPattern::kCl100k},
      {"qwen2", parallel::SplitPattern::kQwen2},
      {"o200k", parallel::SplitPattern::kO200k}};
  parallel::CountOptions options;
  for (const auto& [name, pattern] : patterns) {
    if (arguments.pattern == name) options.pattern = pattern;
  }
  options.inputs = arguments.inputs;
  options.field = arguments.field;
  options.threads = ThreadsOf(arguments.threads);
  Progress progress(terminal, "counting words");
  options.progress = [&progress](int64_t done, int64_t total) { progress(done, total); };
  const auto counts = parallel::CountPreTokens(options);
  progress.End();
  RETURN_IF_ERROR(counts.status());
  const int64_t specials = static_cast<int64_t>(arguments.specials.size());
  ASSIGN_OR_RETURN(
      const parallel::BpeModel model,
      parallel::TrainBpe(*counts, arguments.vocabulary - specials, arguments.frequency_min));
  ASSIGN_OR_RETURN(const std::string file,
                   parallel::ToTokenizerJson(model, options.pattern, arguments.specials));
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  RETURN_IF_ERROR(files->MakeDirectory(ParentDirectory(arguments.output)));
  RETURN_IF_ERROR(files->WriteAtomically(arguments.output, file));
  const int64_t tokens = static_cast<int64_t>(model.tokens.size()) + specials;
  if (tokens < arguments.vocabulary) {
    terminal.err << "the text has pairs for " << tokens << " tokens only, not for "
                 << arguments.vocabulary << "\n";
  }
  if (format == Format::kTable) {
    terminal.out << Table({{"tokenizer:", arguments.output},
                           {"tokens:", absl::StrCat(tokens)},
                           {"distinct words:", absl::StrCat(counts->size())}});
  } else {
    Print({{"tokenizer", arguments.output}, {"tokens", tokens}, {"distinctWords", counts->size()}},
          format, terminal.out);
  }
  return absl::OkStatus();
}

absl::Status DataTokenize(const TokenizeArguments& arguments, Format format, Terminal& terminal) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const std::unique_ptr<parallel::Tokenizer> tokenizer,
                   parallel::OpenTokenizer(*files, arguments.tokenizer));
  parallel::TokenizeOptions options;
  options.inputs = arguments.inputs;
  options.output = arguments.output;
  if (!arguments.splits.empty()) {
    ASSIGN_OR_RETURN(options.splits, parallel::ParseSplits(arguments.splits));
  }
  ASSIGN_OR_RETURN(options.boundary, parallel::ParseDocumentBoundary(arguments.boundary));
  options.field = arguments.field;
  ASSIGN_OR_RETURN(const parallel::BoundaryTokens around,
                   parallel::ChooseBoundaries(*tokenizer, arguments.bos, arguments.eos));
  options.bos = around.bos;
  options.eos = around.eos;
  if (arguments.tokenizer != "bytes") {
    ASSIGN_OR_RETURN(options.tokenizer_file,
                     parallel::ReadTokenizerFile(*files, arguments.tokenizer));
  }
  options.threads = ThreadsOf(arguments.threads);
  Progress progress(terminal, "tokenizing");
  options.progress = [&progress](int64_t done, int64_t total) { progress(done, total); };
  options.resumed = [&progress](int64_t done) { progress.Resumed(done); };
  const absl::StatusOr<std::vector<parallel::TokenizedSplit>> splits =
      parallel::Tokenize(*files, *tokenizer, options);
  progress.End();
  RETURN_IF_ERROR(splits.status());
  Json list = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"DATASET", "DOCUMENTS", "TOKENS", "TEXT", "BYTES/TOKEN"}};
  for (const parallel::TokenizedSplit& split : *splits) {
    list.push_back({{"prefix", split.prefix},
                    {"documents", split.documents},
                    {"tokens", split.tokens},
                    {"textBytes", split.text_bytes},
                    {"bos", options.bos},
                    {"eos", options.eos}});
    rows.push_back({split.prefix, absl::StrCat(split.documents), absl::StrCat(split.tokens),
                    Bytes(split.text_bytes),
                    absl::StrFormat("%.2f", static_cast<double>(split.text_bytes) /
                                                static_cast<double>(split.tokens))});
  }
  if (format == Format::kTable) {
    terminal.out << Table(rows);
  } else {
    Print(list, format, terminal.out);
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
