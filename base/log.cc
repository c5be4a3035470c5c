#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/status/status.h"
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

class SpdlogLogger : public Logger {
 public:
  SpdlogLogger(spdlog::sink_ptr sink, LogLevel level, LogOrigin origin)
      : origin_(std::move(origin)), logger_("muster", std::move(sink)) {
    logger_.set_level(ToSpdlog(level));
    logger_.set_pattern("%v");
    logger_.flush_on(spdlog::level::debug);
  }

  void Write(LogLevel level, absl::string_view message, Fields fields) override {
    if (!logger_.should_log(ToSpdlog(level))) return;
    nlohmann::ordered_json line;
    line["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
    line["level"] = Name(level);
    line["component"] = origin_.component;
    if (!origin_.job.empty()) line["job"] = origin_.job;
    if (origin_.epoch > 0) line["epoch"] = origin_.epoch;
    if (origin_.rank >= 0) line["rank"] = origin_.rank;
    if (!origin_.worker.empty()) line["worker"] = origin_.worker;
    nlohmann::ordered_json others;
    for (const LogField& field : fields) {
      const bool named = field.key == "job" || field.key == "epoch" || field.key == "rank" ||
                         field.key == "worker";
      nlohmann::ordered_json& object = named ? line : others;
      std::visit([&](const auto& value) { object[std::string(field.key)] = value; }, field.value);
    }
    line["message"] = std::string(message);
    if (!others.empty()) line["fields"] = std::move(others);
    // Replaces bytes that are not UTF-8, for example of a user's path, instead of throwing.
    logger_.log(ToSpdlog(level),
                line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  }

 private:
  const LogOrigin origin_;
  spdlog::logger logger_;
};

class DiscardLogger : public Logger {
 public:
  void Write(LogLevel, absl::string_view, Fields) override {}
};

}  // namespace

std::shared_ptr<Logger> Logger::ToStderr(LogLevel level, LogOrigin origin) {
  return std::make_shared<SpdlogLogger>(std::make_shared<spdlog::sinks::stderr_sink_mt>(), level,
                                        std::move(origin));
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

}  // namespace muster
