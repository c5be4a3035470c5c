#include "worker/command/progress_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster::worker {
namespace {

using Json = nlohmann::json;

constexpr int64_t kCountMax = int64_t{1} << 53;  // what every JSON reader keeps exact
constexpr size_t kPhaseBytesMax = 32;
constexpr size_t kPathBytesMax = 4096;
constexpr size_t kErrorBytesMax = 500;

absl::Status Wrong(const char* field, const char* expected) {
  return absl::InvalidArgumentError(absl::StrCat("\"", field, "\" is not ", expected));
}

bool Printable(const std::string& text) {
  return std::none_of(text.begin(), text.end(),
                      [](char c) { return absl::ascii_iscntrl(static_cast<unsigned char>(c)); });
}

absl::Status ReadCount(const Json& object, const char* field, std::optional<int64_t>& out) {
  const auto found = object.find(field);
  if (found == object.end() || found->is_null()) return absl::OkStatus();
  // 3.0 is a count too: some languages know no other numbers.
  if (!found->is_number()) return Wrong(field, "a whole number");
  const double value = found->get<double>();
  if (!(value >= 0 && value <= static_cast<double>(kCountMax)) || value != std::floor(value)) {
    return Wrong(field, "a whole number from 0 to 2^53");
  }
  out = static_cast<int64_t>(value);
  return absl::OkStatus();
}

absl::Status ReadNumber(const Json& object, const char* field, std::optional<double>& out) {
  const auto found = object.find(field);
  if (found == object.end() || found->is_null()) return absl::OkStatus();
  if (!found->is_number() || !std::isfinite(found->get<double>())) return Wrong(field, "a number");
  out = found->get<double>();
  return absl::OkStatus();
}

absl::Status ReadText(const Json& object, const char* field, size_t bytes_max,
                      std::optional<std::string>& out) {
  const auto found = object.find(field);
  if (found == object.end() || found->is_null()) return absl::OkStatus();
  if (!found->is_string()) return Wrong(field, "a text");
  std::string text = found->get<std::string>();
  if (text.size() > bytes_max || !Printable(text)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", field, "\" is longer than ", bytes_max,
                                                   " bytes or has control characters"));
  }
  out = std::move(text);
  return absl::OkStatus();
}

absl::Status ReadCheckpoint(const Json& object, std::optional<CommandReport::Checkpoint>& out) {
  const auto found = object.find("checkpoint");
  if (found == object.end() || found->is_null()) return absl::OkStatus();
  if (!found->is_object()) return Wrong("checkpoint", "an object");
  std::optional<int64_t> step;
  std::optional<std::string> path;
  RETURN_IF_ERROR(ReadCount(*found, "step", step));
  RETURN_IF_ERROR(ReadText(*found, "path", kPathBytesMax, path));
  if (step.value_or(0) < 1 || path.value_or("").empty()) {
    return Wrong("checkpoint", "{\"step\": at least 1, \"path\": a text}");
  }
  out = CommandReport::Checkpoint{*step, *std::move(path)};
  return absl::OkStatus();
}

struct Tail {
  FileVersion version;
  std::string content;
};

// The end of the file, from the beginning of a line when it is longer than kBytesMax. No value: it
// cannot be read, is no file, or has not changed since `seen`.
std::optional<Tail> ReadTail(const std::string& path, const std::optional<FileVersion>& seen) {
  // Whatever the command put there, opening it must not wait, as a pipe would.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return std::nullopt;
  struct stat info = {};
  std::optional<Tail> tail;
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
    const FileVersion version = {info.st_dev, info.st_ino, info.st_size, info.st_mtim.tv_sec,
                                 info.st_mtim.tv_nsec};
    if (seen != version) tail = Tail{version, ""};
  }
  if (tail.has_value()) {
    const int64_t skip = std::max<int64_t>(0, info.st_size - ProgressFile::kBytesMax);
    std::string& content = tail->content;
    content.resize(static_cast<size_t>(info.st_size - skip));
    size_t filled = 0;
    while (filled < content.size()) {
      const ssize_t got = ::pread(fd, content.data() + filled, content.size() - filled,
                                  skip + static_cast<int64_t>(filled));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      filled += static_cast<size_t>(got);
    }
    content.resize(filled);
    // The first line may be cut.
    if (skip > 0) {
      const size_t end = content.find('\n');
      content.erase(0, end == std::string::npos ? end : end + 1);
    }
  }
  ::close(fd);
  return tail;
}

}  // namespace

absl::StatusOr<CommandReport> ParseReport(const std::string& json) {
  const Json object = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return absl::InvalidArgumentError("it is not a JSON object");
  CommandReport report;
  RETURN_IF_ERROR(ReadCount(object, "step", report.step));
  RETURN_IF_ERROR(ReadCount(object, "steps", report.steps));
  RETURN_IF_ERROR(ReadCount(object, "tokens", report.tokens));
  RETURN_IF_ERROR(ReadNumber(object, "loss", report.loss));
  RETURN_IF_ERROR(ReadNumber(object, "validation_loss", report.validation_loss));
  RETURN_IF_ERROR(ReadNumber(object, "tokens_per_second", report.tokens_per_second));
  if (report.tokens_per_second.value_or(0) < 0) {
    return Wrong("tokens_per_second", "at least 0");
  }
  RETURN_IF_ERROR(ReadText(object, "phase", kPhaseBytesMax, report.phase));
  RETURN_IF_ERROR(ReadCheckpoint(object, report.checkpoint));
  return report;
}

CommandReports ParseReports(const std::string& content) {
  CommandReports out;
  if (absl::StatusOr<CommandReport> whole = ParseReport(content); whole.ok()) {
    out.reports.push_back(*std::move(whole));
    return out;
  }
  size_t at = 0;
  for (int line = 1; at < content.size(); ++line) {
    const size_t end = std::min(content.find('\n', at), content.size());
    const std::string text(absl::StripAsciiWhitespace(content.substr(at, end - at)));
    at = end + 1;
    if (text.empty()) continue;
    absl::StatusOr<CommandReport> report = ParseReport(text);
    if (report.ok()) {
      out.reports.push_back(*std::move(report));
    } else if (out.problem.empty()) {
      out.problem = absl::StrCat("line ", line, ": ", report.status().message());
    }
  }
  return out;
}

CommandReports ProgressFile::Read(bool last) {
  std::optional<Tail> tail = ReadTail(path_, seen_);
  if (!tail.has_value()) {
    CommandReports out;
    if (!told_ && !problem_.empty()) {
      told_ = true;
      out.problem = problem_;
    }
    return out;
  }
  seen_ = tail->version;
  CommandReports out = ParseReports(tail->content);
  problem_ = std::exchange(out.problem, "");
  if (last && !told_) {
    told_ = !problem_.empty();
    out.problem = problem_;
  }
  return out;
}

std::string ReadErrorFile(const std::string& path) {
  const std::optional<Tail> tail = ReadTail(path, std::nullopt);
  if (!tail.has_value()) return "";
  const Json object = Json::parse(tail->content, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("message")) return "";
  const Json& message = object["message"];
  const Json& text =
      message.is_object() && message.contains("message") ? message["message"] : message;
  if (!text.is_string()) return "";
  std::string line = text.get<std::string>().substr(0, kErrorBytesMax);
  std::replace_if(
      line.begin(), line.end(),
      [](char c) { return absl::ascii_iscntrl(static_cast<unsigned char>(c)); }, ' ');
  return line;
}

}  // namespace muster::worker
