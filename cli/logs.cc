#include "cli/logs.h"

#include <regex.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cli/reconnect.h"

namespace muster::cli {
namespace {

// A POSIX extended regular expression.
class Pattern {
 public:
  // kInvalidArgument says what is wrong with it.
  static absl::StatusOr<std::unique_ptr<Pattern>> Compile(const std::string& text) {
    auto pattern = std::make_unique<Pattern>();
    const int code = ::regcomp(&pattern->regex_, text.c_str(), REG_EXTENDED | REG_NOSUB);
    if (code != 0) {
      char why[256] = "";
      ::regerror(code, &pattern->regex_, why, sizeof(why));
      return absl::InvalidArgumentError(absl::StrCat("--grep '", text, "': ", why));
    }
    pattern->compiled_ = true;
    return pattern;
  }
  ~Pattern() {
    if (compiled_) ::regfree(&regex_);
  }
  bool Matches(const std::string& line) const {
    return ::regexec(&regex_, line.c_str(), 0, nullptr, 0) == 0;
  }

 private:
  regex_t regex_ = {};
  bool compiled_ = false;
};

// Prints chunks as they are, or line by line where lines are chosen or told apart by rank.
class Printer {
 public:
  Printer(const Pattern* pattern, bool prefix, Format format, Terminal& terminal)
      : pattern_(pattern), prefix_(prefix), format_(format), terminal_(terminal) {}
  ~Printer() { Finish(); }

  void Print(uint64_t epoch, int32_t rank, int64_t offset, const std::string& data) {
    if (pattern_ == nullptr && !prefix_) {
      if (format_ == Format::kTable) {
        terminal_.out << data << std::flush;
      } else {
        Item(epoch, rank, offset, data);
      }
      return;
    }
    // What an attempt that is over left without a line end is a line.
    if (epoch != epoch_ || rank != rank_) Finish();
    epoch_ = epoch;
    rank_ = rank;
    size_t begin = 0;
    for (size_t end; (end = data.find('\n', begin)) != std::string::npos; begin = end + 1) {
      line_.append(data, begin, end - begin);
      Line(offset + static_cast<int64_t>(end) - static_cast<int64_t>(line_.size()));
    }
    line_.append(data, begin, std::string::npos);
    end_ = offset + static_cast<int64_t>(data.size());
    terminal_.out << std::flush;
  }

 private:
  void Finish() {
    if (!line_.empty()) Line(end_ - static_cast<int64_t>(line_.size()));
  }
  void Line(int64_t offset) {
    const std::string line = std::exchange(line_, "");
    if (pattern_ != nullptr && !pattern_->Matches(line)) return;
    if (format_ != Format::kTable) {
      Item(epoch_, rank_, offset, line);
    } else {
      if (prefix_) terminal_.out << "[rank " << rank_ << "] ";
      terminal_.out << line << "\n";
    }
  }
  void Item(uint64_t epoch, int32_t rank, int64_t offset, const std::string& text) {
    PrintItem(Json{{"epoch", epoch}, {"rank", rank}, {"offset", offset}, {"text", text}}, format_,
              terminal_.out);
  }

  const Pattern* const pattern_;
  const bool prefix_;
  const Format format_;
  Terminal& terminal_;
  uint64_t epoch_ = 0;
  int32_t rank_ = -1;
  int64_t end_ = 0;
  std::string line_;  // begun and not ended
};

absl::Status ReadRank(CoordinatorClient& client, const LogsOptions& options, int32_t rank,
                      Printer& printer, Terminal& terminal) {
  v1::GetLogsRequest request;
  request.set_name(options.job);
  request.set_rank(rank);
  request.set_epoch(options.epoch);
  request.set_follow(options.follow);
  request.set_tail_bytes(options.tail_bytes);
  // The position of the next byte to print, so that a stream that is opened again repeats nothing.
  uint64_t epoch = 0;
  int64_t next_offset = 0;
  const auto open = [&](Absence& absence) {
    return client.GetLogs(request, [&](const v1::LogChunk& chunk) {
      absence.Heard();
      if (chunk.epoch() < epoch) return true;
      if (chunk.epoch() > epoch) next_offset = 0;
      epoch = chunk.epoch();
      const int64_t skip = std::clamp<int64_t>(next_offset - chunk.offset(), 0,
                                               static_cast<int64_t>(chunk.data().size()));
      const std::string data = chunk.data().substr(static_cast<size_t>(skip));
      next_offset =
          std::max(next_offset, chunk.offset() + static_cast<int64_t>(chunk.data().size()));
      if (!data.empty()) printer.Print(chunk.epoch(), chunk.rank(), chunk.offset() + skip, data);
      return terminal.out.good();
    });
  };
  if (options.follow) return ReadReconnecting(client, terminal, open);
  Absence once(absl::ZeroDuration());
  return open(once);
}

}  // namespace

absl::Status Logs(CoordinatorClient& client, const LogsOptions& options, Format format,
                  Terminal& terminal) {
  std::unique_ptr<Pattern> pattern;
  if (!options.grep.empty()) {
    ASSIGN_OR_RETURN(pattern, Pattern::Compile(options.grep));
  }
  Printer printer(pattern.get(), options.all_ranks, format, terminal);
  if (!options.all_ranks) return ReadRank(client, options, options.rank, printer, terminal);
  if (options.follow) {
    return absl::InvalidArgumentError("--all-ranks shows what is there; --follow takes one --rank");
  }
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(options.job));
  absl::Status first;
  for (int32_t rank = 0; rank < job.spec().resources().ranks(); ++rank) {
    const absl::Status read = ReadRank(client, options, rank, printer, terminal);
    if (read.ok()) continue;
    // The others' logs are worth having when one worker is away.
    terminal.err << "rank " << rank << ": " << read.message() << std::endl;
    if (first.ok()) first = read;
  }
  return first;
}

}  // namespace muster::cli
