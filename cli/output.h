// How commands print: messages as JSON or YAML for scripts, tables and short texts for people.
#ifndef MUSTER_CLI_OUTPUT_H_
#define MUSTER_CLI_OUTPUT_H_

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "google/protobuf/timestamp.pb.h"
#include "muster/v1/job.pb.h"

namespace muster::cli {

using Json = nlohmann::ordered_json;

enum class Format { kTable, kJson, kYaml };

// Where a command writes.
struct Terminal {
  std::ostream& out;
  std::ostream& err;
  bool is_tty = false;  // `out` is a terminal, on which progress is redrawn in place
  bool colour = false;  // `out` is a terminal, and NO_COLOR is not set
  int columns = 80;     // width of the terminal
};

// Protobuf's JSON form (lowerCamelCase, defaults printed, enum values by name, RFC 3339 times),
// which any protobuf library reads back, with one difference that scripts want and those libraries
// accept: 64-bit integers are numbers. Absent messages and optional fields are left out.
Json ToJson(const google::protobuf::Message& message);

// `value` as one JSON document with a line end, or as YAML.
void Print(const Json& value, Format format, std::ostream& out);
// One line of JSON, or one YAML document: for streams.
void PrintItem(const Json& value, Format format, std::ostream& out);

// Columns padded to their widest cell; the first row is the heading. No trailing blanks.
std::string Table(const std::vector<std::vector<std::string>>& rows);

// "running" in green, "failed" in red, ...; unchanged when the terminal has no colour.
std::string Coloured(const std::string& state, const Terminal& terminal);

// "42s", "3m20s", "5h7m", "12d".
std::string ShortDuration(absl::Duration duration);
// The time since `time` as ShortDuration; "-" when it is not set.
std::string Age(const google::protobuf::Timestamp& time, absl::Time now);
// "2026-11-21 04:25:03", local time; "-" when it is not set.
std::string LocalTime(const google::protobuf::Timestamp& time);
// "12.3k", "4.5M".
std::string ShortNumber(double value);
// "1.9 MiB".
std::string Bytes(int64_t bytes);
// "120/600", steps done and to do; "120" or "-" of a command that has not said how many.
std::string StepText(const v1::Job& job);
// Four decimals; "-" for 0, which stands for not measured yet.
std::string Loss(double loss);

}  // namespace muster::cli

#endif  // MUSTER_CLI_OUTPUT_H_
