#include "cli/logs.h"

#include <regex.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "cli/reconnect.h"
#include "cli/usage.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

constexpr size_t kAllRanksBytesMax = 256 << 20;

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

// Chunks of one rank, put together to lines.
class Lines {
 public:
  struct Line {
    uint64_t epoch = 0;
    int32_t rank = 0;
    int64_t offset = 0;
    absl::Time time = absl::InfinitePast();  // when its first byte was read; not known of all
    std::string text;
  };
  explicit Lines(std::function<void(Line)> each) : each_(std::move(each)) {}
  ~Lines() { Finish(); }

  void Add(const v1::LogChunk& chunk, absl::string_view data, int64_t offset) {
    // What an attempt that is over left without a line end is a line.
    if (chunk.epoch() != line_.epoch || chunk.rank() != line_.rank) Finish();
    line_.epoch = chunk.epoch();
    line_.rank = chunk.rank();
    int mark = 0;
    const auto time_at = [&](int64_t at) {
      while (mark + 1 < chunk.marks_size() && chunk.marks(mark + 1).offset() <= at) ++mark;
      return mark < chunk.marks_size() && chunk.marks(mark).offset() <= at
                 ? FromProto(chunk.marks(mark).time())
                 : absl::InfinitePast();
    };
    for (size_t begin = 0; begin < data.size();) {
      if (line_.text.empty()) {
        line_.offset = offset + static_cast<int64_t>(begin);
        line_.time = time_at(line_.offset);
      }
      const size_t end = data.find('\n', begin);
      absl::StrAppend(&line_.text, data.substr(begin, end - begin));
      if (end == absl::string_view::npos) return;
      if (line_.text.empty()) line_.offset = offset + static_cast<int64_t>(end);
      each_(std::exchange(line_, {line_.epoch, line_.rank}));
      begin = end + 1;
    }
  }

 private:
  void Finish() {
    if (!line_.text.empty()) each_(std::exchange(line_, {}));
  }

  const std::function<void(Line)> each_;
  Line line_;  // begun and not ended
};

// Prints lines, or chunks as they are.
class Printer {
 public:
  Printer(bool prefix, Format format, Terminal& terminal)
      : prefix_(prefix), format_(format), terminal_(terminal) {}

  void Print(const v1::LogChunk& chunk, absl::string_view data, int64_t offset) {
    if (format_ == Format::kTable) {
      terminal_.out << data << std::flush;
    } else {
      Item(chunk.epoch(), chunk.rank(), offset, absl::InfinitePast(), std::string(data));
    }
  }
  void Print(const Lines::Line& line) {
    if (format_ != Format::kTable) {
      return Item(line.epoch, line.rank, line.offset, line.time, line.text);
    }
    if (prefix_) terminal_.out << Prefix(line.rank);
    terminal_.out << line.text << "\n";
  }
  void Flush() { terminal_.out << std::flush; }

 private:
  // Neighbouring ranks have different colours.
  std::string Prefix(int32_t rank) const {
    const std::string text = absl::StrCat("[rank ", rank, "] ");
    static constexpr int kColours[] = {36, 33, 35, 32, 34, 31};
    if (!terminal_.colour) return text;
    return absl::StrCat("\x1b[", kColours[static_cast<size_t>(rank) % std::size(kColours)], "m",
                        text, "\x1b[0m");
  }
  void Item(uint64_t epoch, int32_t rank, int64_t offset, absl::Time time,
            const std::string& text) {
    Json item = {{"epoch", epoch}, {"rank", rank}, {"offset", offset}, {"text", text}};
    if (time != absl::InfinitePast()) {
      item["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
    }
    PrintItem(item, format_, terminal_.out);
  }

  const bool prefix_;
  const Format format_;
  Terminal& terminal_;
};

using OnData =
    std::function<void(const v1::LogChunk& chunk, absl::string_view data, int64_t offset)>;

absl::Status ReadRank(CoordinatorClient& client, const LogsOptions& options, int32_t rank,
                      const OnData& on_data, Terminal& terminal) {
  v1::GetLogsRequest request;
  request.set_name(options.job);
  request.set_rank(rank);
  request.set_epoch(options.epoch);
  request.set_follow(options.follow);
  request.set_tail_bytes(options.tail_bytes);
  if (!options.since.empty()) {
    ASSIGN_OR_RETURN(const absl::Time since, ParseSince(options.since, absl::Now(), "--since"));
    *request.mutable_since() = ToProto(since);
  }
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
      const absl::string_view data =
          absl::string_view(chunk.data()).substr(static_cast<size_t>(skip));
      next_offset =
          std::max(next_offset, chunk.offset() + static_cast<int64_t>(chunk.data().size()));
      if (!data.empty()) on_data(chunk, data, chunk.offset() + skip);
      return terminal.out.good();
    });
  };
  if (options.follow) return ReadReconnecting(client, terminal, open);
  Absence once(absl::ZeroDuration());
  return open(once);
}

}  // namespace

namespace {

// The lines of all ranks in the order in which they were written, as far as that is known.
absl::Status AllRanks(CoordinatorClient& client, const LogsOptions& options, const Pattern* pattern,
                      Printer& printer, Terminal& terminal) {
  if (options.follow) {
    return absl::InvalidArgumentError("--all-ranks shows what is there; --follow takes one --rank");
  }
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(options.job));
  // Before the first attempt nothing says how many an elastic job will have.
  const int32_t ranks = job.ranks_size() > 0 ? job.ranks_size() : job.spec().resources().ranks();
  std::vector<Lines::Line> all;
  size_t bytes = 0;
  absl::Status first;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    absl::Status read;
    {
      Lines lines([&](Lines::Line line) {
        if (pattern != nullptr && !pattern->Matches(line.text)) return;
        bytes += line.text.size() + sizeof(line);
        all.push_back(std::move(line));
      });
      read = ReadRank(
          client, options, rank,
          [&](const v1::LogChunk& chunk, absl::string_view data, int64_t offset) {
            if (bytes < kAllRanksBytesMax) lines.Add(chunk, data, offset);
          },
          terminal);
    }
    if (bytes >= kAllRanksBytesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the logs of all ranks are larger than ", kAllRanksBytesMax >> 20,
                       " MiB; --since, --tail or --grep makes them fewer"));
    }
    if (read.ok()) continue;
    // The others' logs are worth having when one worker is away.
    terminal.err << "rank " << rank << ": " << read.message() << std::endl;
    if (first.ok()) first = read;
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Lines::Line& a, const Lines::Line& b) { return a.time < b.time; });
  for (const Lines::Line& line : all) printer.Print(line);
  printer.Flush();
  return first;
}

}  // namespace

absl::Status Logs(CoordinatorClient& client, const LogsOptions& options, Format format,
                  Terminal& terminal) {
  std::unique_ptr<Pattern> pattern;
  if (!options.grep.empty()) {
    ASSIGN_OR_RETURN(pattern, Pattern::Compile(options.grep));
  }
  Printer printer(options.all_ranks, format, terminal);
  if (options.all_ranks) return AllRanks(client, options, pattern.get(), printer, terminal);
  if (pattern == nullptr) {
    return ReadRank(
        client, options, options.rank,
        [&](const v1::LogChunk& chunk, absl::string_view data, int64_t offset) {
          printer.Print(chunk, data, offset);
        },
        terminal);
  }
  Lines lines([&](const Lines::Line& line) {
    if (pattern->Matches(line.text)) printer.Print(line);
  });
  return ReadRank(
      client, options, options.rank,
      [&](const v1::LogChunk& chunk, absl::string_view data, int64_t offset) {
        lines.Add(chunk, data, offset);
        printer.Flush();
      },
      terminal);
}

}  // namespace muster::cli
