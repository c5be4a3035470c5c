#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace muster {
namespace {

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "info";
}

using Json = nlohmann::ordered_json;

// Replaces bytes that are not UTF-8, for example of a user's path, instead of throwing.
std::string Dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Without bytes that would end the line or tell a terminal what to do.
std::string PlainText(const std::string& text) {
  const std::string quoted = Dump(text);
  std::string plain;
  for (size_t i = 1; i + 1 < quoted.size(); ++i) {
    const bool escaped = quoted[i] == '\\' && (quoted[i + 1] == '"' || quoted[i + 1] == '\\');
    if (escaped) ++i;
    plain += quoted[i] == '\x7f' ? '?' : quoted[i];
  }
  return plain;
}

bool IsBareWord(const std::string& text) {
  return !text.empty() && text.find_first_not_of(
                              "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                              "0123456789._:/@%+,-[]") == std::string::npos;
}

// TIME LEVEL COMPONENT: MESSAGE key=value ..., with the keys of the schema before those of
// "fields".
std::string TextOf(const Json& line) {
  std::string text = absl::StrCat(line["time"].get<std::string>(), " ",
                                  absl::AsciiStrToUpper(line["level"].get<std::string>()), " ",
                                  PlainText(line["component"].get<std::string>()), ": ",
                                  PlainText(line["message"].get<std::string>()));
  const auto append = [&text](const std::string& key, const Json& value) {
    const bool bare = value.is_string() && IsBareWord(value.get<std::string>());
    absl::StrAppend(&text, " ", key, "=", bare ? value.get<std::string>() : Dump(value));
  };
  for (const auto& [key, value] : line.items()) {
    const bool said = key == "time" || key == "level" || key == "component" || key == "message";
    if (!said && key != "fields") append(key, value);
  }
  if (const auto fields = line.find("fields"); fields != line.end()) {
    for (const auto& [key, value] : fields->items()) append(key, value);
  }
  return text;
}

class SpdlogLogger : public Logger {
 public:
  SpdlogLogger(spdlog::sink_ptr sink, LogLevel level, LogOrigin origin, LogFormat format)
      : origin_(std::move(origin)), format_(format), logger_("muster", std::move(sink)) {
    logger_.set_level(ToSpdlog(level));
    logger_.set_pattern("%v");
    logger_.flush_on(spdlog::level::debug);
  }

  void Write(LogLevel level, absl::string_view message, Fields fields) override {
    if (!logger_.should_log(ToSpdlog(level))) return;
    Json line;
    line["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
    line["level"] = Name(level);
    line["component"] = origin_.component;
    if (!origin_.job.empty()) line["job"] = origin_.job;
    if (origin_.epoch > 0) line["epoch"] = origin_.epoch;
    if (origin_.rank >= 0) line["rank"] = origin_.rank;
    if (!origin_.worker.empty()) line["worker"] = origin_.worker;
    Json others;
    for (const LogField& field : fields) {
      const bool named = field.key == "job" || field.key == "epoch" || field.key == "rank" ||
                         field.key == "worker";
      Json& object = named ? line : others;
      std::visit([&](const auto& value) { object[std::string(field.key)] = value; }, field.value);
    }
    line["message"] = std::string(message);
    if (!others.empty()) line["fields"] = std::move(others);
    logger_.log(ToSpdlog(level), format_ == LogFormat::kText ? TextOf(line) : Dump(line));
  }

 private:
  const LogOrigin origin_;
  const LogFormat format_;
  spdlog::logger logger_;
};

class DiscardLogger : public Logger {
 public:
  void Write(LogLevel, absl::string_view, Fields) override {}
};

}  // namespace

std::shared_ptr<Logger> Logger::ToStderr(LogLevel level, LogOrigin origin, LogFormat format) {
  return std::make_shared<SpdlogLogger>(std::make_shared<spdlog::sinks::stderr_sink_mt>(), level,
                                        std::move(origin), format);
}

std::shared_ptr<Logger> Logger::Discard() { return std::make_shared<DiscardLogger>(); }

absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view text) {
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return absl::InvalidArgumentError(
      absl::StrCat("log level '", text, "' is not one of debug, info, warning, error"));
}

absl::StatusOr<LogFormat> ParseLogFormat(absl::string_view text) {
  if (text == "json") return LogFormat::kJson;
  if (text == "text") return LogFormat::kText;
  return absl::InvalidArgumentError(
      absl::StrCat("log format '", text, "' is not one of json, text"));
}

}  // namespace muster
