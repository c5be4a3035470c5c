#include "cli/usage.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "proto/class_time.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

struct KeyColumn {
  const char* name;
  const char* title;
  v1::UsageKey key;
};
constexpr KeyColumn kKeys[] = {{"job", "JOB", v1::USAGE_KEY_JOB},
                               {"queue", "QUEUE", v1::USAGE_KEY_QUEUE},
                               {"tenant", "TENANT", v1::USAGE_KEY_TENANT},
                               {"cause", "CAUSE", v1::USAGE_KEY_CAUSE}};

std::string ValueOf(const KeyColumn& column, const v1::UsageTotal& total) {
  switch (column.key) {
    case v1::USAGE_KEY_JOB:
      return total.job_id();
    case v1::USAGE_KEY_QUEUE:
      return total.queue();
    case v1::USAGE_KEY_TENANT:
      return total.tenant();
    default:
      return total.cause() == v1::CAUSE_UNSPECIFIED ? "" : spec::EnumName(total.cause());
  }
}

// What a line calls a job, by its id: its name, and the id too where another job of the rows has
// the same name.
std::map<std::string, std::string> JobTexts(const v1::GetUsageResponse& response) {
  std::map<std::string, std::set<std::string>> ids;
  for (const v1::UsageTotal& row : response.rows()) ids[row.job_name()].insert(row.job_id());
  std::map<std::string, std::string> texts;
  for (const auto& [name, of_name] : ids) {
    for (const std::string& id : of_name) {
      texts[id] = name.empty()          ? id
                  : of_name.size() == 1 ? name
                                        : absl::StrCat(name, " (", id, ")");
    }
  }
  return texts;
}

bool Unused(v1::UsageClass usage_class) {
  return usage_class == v1::USAGE_CLASS_IDLE || usage_class == v1::USAGE_CLASS_SPARE ||
         usage_class == v1::USAGE_CLASS_AWAY;
}

std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

// Device-hours: small clusters and short times need more digits.
std::string Hours(double seconds, int digits) {
  return seconds == 0 ? "-" : absl::StrFormat("%.*f", digits, seconds / 3600);
}

struct Line {
  std::map<v1::UsageClass, double> seconds;
  double all = 0;

  void Add(v1::UsageClass usage_class, double by) {
    seconds[usage_class] += by;
    all += by;
  }
  std::string Goodput() const {
    double used = 0;
    for (const auto& [usage_class, spent] : seconds) used += Unused(usage_class) ? 0 : spent;
    const auto productive = seconds.find(v1::USAGE_CLASS_PRODUCTIVE);
    if (used == 0) return "-";
    return Percent(productive == seconds.end() ? 0 : productive->second / used);
  }
};

std::string UsageTable(const v1::GetUsageResponse& response,
                       const std::vector<const KeyColumn*>& columns) {
  std::map<std::vector<std::string>, Line> lines;
  Line total;
  for (const v1::UsageTotal& row : response.rows()) {
    std::vector<std::string> keys;
    for (const KeyColumn* column : columns) keys.push_back(ValueOf(*column, row));
    lines[keys].Add(row.usage_class(), row.device_seconds());
    total.Add(row.usage_class(), row.device_seconds());
  }
  std::vector<std::pair<std::vector<std::string>, Line>> sorted(lines.begin(), lines.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.all > b.second.all; });
  const std::map<std::string, std::string> jobs = JobTexts(response);
  for (auto& [keys, line] : sorted) {
    for (size_t i = 0; i < columns.size(); ++i) {
      if (columns[i]->key == v1::USAGE_KEY_JOB) keys[i] = jobs.at(keys[i]);
    }
  }
  if (sorted.size() > 1 || columns.empty()) {
    std::vector<std::string> keys(columns.size());
    if (!keys.empty()) keys[0] = "all";
    sorted.emplace_back(std::move(keys), total);
  }
  const int digits = total.all < 36'000 ? 4 : total.all < 3'600'000 ? 2 : 0;
  std::vector<std::vector<std::string>> rows(1);
  for (const KeyColumn* column : columns) rows[0].emplace_back(column->title);
  rows[0].insert(rows[0].end(), {"DEVICE-HOURS", "GOODPUT"});
  for (const auto& [usage_class, seconds] : total.seconds) {
    rows[0].push_back(
        absl::AsciiStrToUpper(absl::StrReplaceAll(spec::EnumName(usage_class), {{"_", "-"}})));
  }
  for (const auto& [keys, line] : sorted) {
    std::vector<std::string>& row = rows.emplace_back();
    for (const std::string& key : keys) row.push_back(key.empty() ? "-" : key);
    row.push_back(Hours(line.all, digits));
    row.push_back(line.Goodput());
    for (const auto& [usage_class, all] : total.seconds) {
      const auto spent = line.seconds.find(usage_class);
      row.push_back(Hours(spent == line.seconds.end() ? 0 : spent->second, digits));
    }
  }
  return Table(rows);
}

}  // namespace

absl::StatusOr<absl::Time> ParseSince(const std::string& text, absl::Time now,
                                      const std::string& flag) {
  if (!text.empty()) {
    double count = 0;
    const char unit = text.back();
    const absl::Duration each = unit == 's'   ? absl::Seconds(1)
                                : unit == 'm' ? absl::Minutes(1)
                                : unit == 'h' ? absl::Hours(1)
                                : unit == 'd' ? absl::Hours(24)
                                              : absl::ZeroDuration();
    if (each > absl::ZeroDuration() && absl::SimpleAtod(text.substr(0, text.size() - 1), &count) &&
        count >= 0 && count < 1e6) {
      return now - count * each;
    }
    absl::Time time;
    std::string error;
    if (absl::ParseTime(absl::RFC3339_full, text, &time, &error)) return time;
    for (const char* form : {"%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M",
                             "%Y-%m-%dT%H:%M:%S"}) {
      if (absl::ParseTime(form, text, absl::LocalTimeZone(), &time, &error)) return time;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " ", spec::Quoted(text),
                   ": give how long ago (90s, 10m, 36h, 7d), or a time like 2026-11-24 13:05"));
}

std::vector<std::pair<v1::ClassTime, double>> DeviceSecondsAt(const v1::Usage& usage,
                                                              absl::Time now) {
  const double since =
      usage.has_as_of() ? std::max(0.0, absl::ToDoubleSeconds(now - FromProto(usage.as_of()))) : 0;
  std::vector<std::pair<v1::ClassTime, double>> times;
  for (const v1::ClassTime& time : usage.times()) {
    times.emplace_back(time, time.device_seconds() + DevicesIn(time) * since);
  }
  return times;
}

double GoodputAt(const v1::Usage& usage, absl::Time now) {
  double productive = 0, used = 0;
  for (const auto& [time, seconds] : DeviceSecondsAt(usage, now)) {
    if (!Unused(time.usage_class())) used += seconds;
    if (time.usage_class() == v1::USAGE_CLASS_PRODUCTIVE) productive += seconds;
  }
  return used > 0 ? productive / used : 0;
}

std::string GoodputText(const v1::Usage& usage, absl::Time now) {
  double all = 0;
  std::vector<std::pair<double, std::string>> rest;
  for (const auto& [time, seconds] : DeviceSecondsAt(usage, now)) {
    all += seconds;
    if (time.usage_class() == v1::USAGE_CLASS_PRODUCTIVE || seconds <= 0) continue;
    std::string what = absl::StrReplaceAll(spec::EnumName(time.usage_class()), {{"_", " "}});
    if (time.cause() != v1::CAUSE_UNSPECIFIED) {
      absl::StrAppend(&what, " (", absl::StrReplaceAll(spec::EnumName(time.cause()), {{"_", " "}}),
                      ")");
    }
    rest.emplace_back(-seconds, what);
  }
  if (all <= 0) return "";
  std::sort(rest.begin(), rest.end());
  std::string text =
      absl::StrCat(Percent(GoodputAt(usage, now)), " of ",
                   absl::StrFormat("%.*f", all < 36'000 ? 3 : 1, all / 3600), " device-hours");
  const char* separator = "; ";
  for (const auto& [minus_seconds, what] : rest) {
    absl::StrAppend(&text, separator, Percent(-minus_seconds / all), " ", what);
    separator = ", ";
  }
  return text;
}

absl::Status Usage(CoordinatorClient& client, const UsageOptions& options, Format format,
                   Terminal& terminal) {
  v1::GetUsageRequest request;
  request.set_job(options.job);
  request.set_queue(options.queue);
  request.set_tenant(options.tenant);
  const absl::Time now = absl::Now();
  if (!options.since.empty()) {
    ASSIGN_OR_RETURN(const absl::Time since, ParseSince(options.since, now, "--since"));
    *request.mutable_since() = ToProto(since);
  }
  if (!options.until.empty()) {
    ASSIGN_OR_RETURN(const absl::Time until, ParseSince(options.until, now, "--until"));
    *request.mutable_until() = ToProto(until);
  }
  std::vector<const KeyColumn*> columns;
  for (const KeyColumn& column : kKeys) {
    if (std::count(options.by.begin(), options.by.end(), column.name) == 0) continue;
    columns.push_back(&column);
    request.add_by(column.key);
  }
  request.add_by(v1::USAGE_KEY_CLASS);
  ASSIGN_OR_RETURN(const v1::GetUsageResponse response, client.GetUsage(request));
  if (format != Format::kTable) {
    Print(ToJson(response), format, terminal.out);
    return absl::OkStatus();
  }
  if (response.rows().empty()) {
    terminal.out << "no device time is known for this; it is counted from the first worker on\n";
    return absl::OkStatus();
  }
  terminal.out << "from " << LocalTime(response.since()) << " to " << LocalTime(response.until())
               << ": goodput " << Percent(response.goodput()) << " of the device-hours in use\n"
               << UsageTable(response, columns);
  if (response.rows_left_out() > 0) {
    terminal.out << response.rows_left_out() << " smaller rows are not shown, "
                 << absl::StrFormat("%.2f", response.left_out_device_seconds() / 3600)
                 << " device-hours; a JOB, --queue or --tenant narrows it\n";
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
