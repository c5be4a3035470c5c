// Structured JSON-lines logging. A Logger is built in main.cc and passed; there is no global one.
#ifndef MUSTER_BASE_LOG_H_
#define MUSTER_BASE_LOG_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <variant>
#include "absl/strings/string_view.h"

#include "absl/status/statusor.h"

namespace muster {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
// kText is for people who read along: the same on a line that begins with time, level and who.
enum class LogFormat { kJson, kText };

struct LogField {
  absl::string_view key;
  std::variant<std::string, int64_t, double, bool> value;

  LogField(absl::string_view k, absl::string_view v) : key(k), value(std::string(v)) {}
  LogField(absl::string_view k, const std::string& v) : key(k), value(v) {}
  LogField(absl::string_view k, const char* v) : key(k), value(std::string(v)) {}
  LogField(absl::string_view k, bool v) : key(k), value(v) {}
  LogField(absl::string_view k, int v) : key(k), value(static_cast<int64_t>(v)) {}
  LogField(absl::string_view k, int64_t v) : key(k), value(v) {}
  LogField(absl::string_view k, uint64_t v) : key(k), value(static_cast<int64_t>(v)) {}
  LogField(absl::string_view k, double v) : key(k), value(v) {}
};

// Who writes: on every line. What is empty, 0 for `epoch` and -1 for `rank`, is left out.
struct LogOrigin {
  std::string component;  // "coordinator", "worker", "rank"
  std::string worker;
  std::string job;  // its id
  uint64_t epoch = 0;
  int32_t rank = -1;
};

// Thread-safe. Each call writes one line of JSON (docs/logs.md): time, level, component, then job,
// epoch, rank and worker, of the fields where they are among these, else of the origin; message,
// and the other fields as an object "fields"; or the line of text that says the same.
class Logger {
 public:
  using Fields = std::initializer_list<LogField>;

  // Writes lines at or above `level` to stderr.
  static std::shared_ptr<Logger> ToStderr(LogLevel level, LogOrigin origin,
                                          LogFormat format = LogFormat::kJson);
  // Writes nothing.
  static std::shared_ptr<Logger> Discard();

  virtual ~Logger() = default;
  virtual void Write(LogLevel level, absl::string_view message, Fields fields) = 0;

  void Debug(absl::string_view message, Fields fields = {}) {
    Write(LogLevel::kDebug, message, fields);
  }
  void Info(absl::string_view message, Fields fields = {}) {
    Write(LogLevel::kInfo, message, fields);
  }
  void Warning(absl::string_view message, Fields fields = {}) {
    Write(LogLevel::kWarning, message, fields);
  }
  void Error(absl::string_view message, Fields fields = {}) {
    Write(LogLevel::kError, message, fields);
  }
};

// "debug", "info", "warning" or "error"; anything else is kInvalidArgument.
absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view text);
// "json" or "text"; anything else is kInvalidArgument.
absl::StatusOr<LogFormat> ParseLogFormat(absl::string_view text);

}  // namespace muster

#endif  // MUSTER_BASE_LOG_H_
