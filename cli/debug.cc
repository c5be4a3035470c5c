#include "cli/debug.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

bool IsUnfinished(const v1::Collective& call) {
  return call.state() == v1::COLLECTIVE_STATE_UNFINISHED;
}

std::string CallText(const v1::Collective& call) {
  return absl::StrCat("call ", call.number(), ", ", call.operation(), " of ", Bytes(call.bytes()));
}

std::string StateText(v1::CollectiveState state) {
  switch (state) {
    case v1::COLLECTIVE_STATE_UNFINISHED:
      return "unfinished";
    case v1::COLLECTIVE_STATE_FINISHED:
      return "finished";
    case v1::COLLECTIVE_STATE_FAILED:
      return "failed";
    default:
      return "-";
  }
}

std::string Milliseconds(absl::Duration duration) {
  return absl::StrFormat("%.1f", absl::ToDoubleMilliseconds(duration));
}

std::string RanksOf(const GroupProgress& group) {
  return absl::StrJoin(group.calls, " ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.first);
  });
}

// One row per group: how many calls its ranks have made, and which one is unfinished.
std::string GroupsTable(const std::vector<GroupProgress>& groups) {
  std::vector<std::vector<std::string>> rows = {
      {"GROUP", "RANKS", "CALLS", "UNFINISHED", "ON RANK", "FOR MS", "BEHIND"}};
  for (const GroupProgress& group : groups) {
    int64_t least = group.calls.begin()->second, most = least;
    for (const auto& [rank, calls] : group.calls) {
      least = std::min(least, calls);
      most = std::max(most, calls);
    }
    rows.push_back({group.group, RanksOf(group),
                    least == most ? absl::StrCat(most) : absl::StrCat(least, "-", most),
                    group.waits == nullptr ? "-" : CallText(*group.waits),
                    group.waits == nullptr ? "-" : absl::StrCat(group.waiting_rank),
                    group.waits == nullptr ? "-" : Milliseconds(group.waited),
                    group.behind.empty() ? "-" : absl::StrJoin(group.behind, " ")});
  }
  return Table(rows);
}

std::string CallsTable(const std::map<int, v1::CollectiveRecord>& records) {
  std::vector<std::vector<std::string>> rows = {
      {"RANK", "GROUP", "CALL", "OPERATION", "SIZE", "PEER", "STATE", "MS AGO"}};
  for (const auto& [rank, record] : records) {
    for (const v1::Collective& call : record.collectives()) {
      rows.push_back({absl::StrCat(rank), call.group(), absl::StrCat(call.number()),
                      call.operation(), Bytes(call.bytes()),
                      call.peer() < 0 ? "-" : absl::StrCat(call.peer()), StateText(call.state()),
                      Milliseconds(FromProto(record.time()) - FromProto(call.enqueued()))});
    }
  }
  return Table(rows);
}

// Says which ranks the others wait for, and which did not answer; empty when there are none.
std::string Verdict(const std::vector<GroupProgress>& groups,
                    const std::map<int, std::string>& silent) {
  std::string text;
  for (const auto& [rank, why] : silent) absl::StrAppend(&text, "rank ", rank, ": ", why, "\n");
  for (const GroupProgress& group : groups) {
    if (group.behind.empty() || group.waits == nullptr) continue;
    absl::StrAppend(&text, group.behind.size() == 1 ? "rank " : "ranks ",
                    absl::StrJoin(group.behind, " "), group.behind.size() == 1 ? " is" : " are",
                    " behind in group ", group.group, " (ranks ", RanksOf(group), "): rank ",
                    group.waiting_rank, " waits in ", CallText(*group.waits), ", for ",
                    Milliseconds(group.waited), " ms\n");
  }
  return text;
}

Json GroupJson(const GroupProgress& group) {
  Json json;
  json["group"] = group.group;
  json["path"] = group.path;
  for (const auto& [rank, calls] : group.calls) {
    json["calls"].push_back(Json{{"rank", rank}, {"calls", calls}});
  }
  if (group.waits != nullptr) {
    json["unfinished"] = ToJson(*group.waits);
    json["waitingRank"] = group.waiting_rank;
    json["waitedSeconds"] = absl::ToDoubleSeconds(group.waited);
  }
  json["behind"] = group.behind;
  return json;
}

}  // namespace

std::vector<GroupProgress> Compare(const std::map<int, v1::CollectiveRecord>& records) {
  std::map<std::string, GroupProgress> groups;  // by path
  std::map<std::string, bool> pairs;            // sends and receives, by path
  for (const auto& [rank, record] : records) {
    for (const v1::Collective& call : record.collectives()) {
      GroupProgress& group = groups[call.path()];
      group.group = call.group();
      group.path = call.path();
      int64_t& calls = group.calls[rank];
      calls = std::max(calls, call.number() + 1);
      pairs[call.path()] |= call.operation() == "send" || call.operation() == "receive";
    }
  }
  // Sets the oldest unfinished call of a group, among those with numbers from `first` on.
  const auto wait = [&](GroupProgress& group, int64_t first) {
    for (const auto& [rank, record] : records) {
      for (const v1::Collective& call : record.collectives()) {
        if (call.path() != group.path || call.number() < first || !IsUnfinished(call)) continue;
        const absl::Duration waited = FromProto(record.time()) - FromProto(call.enqueued());
        if (group.waits != nullptr && waited <= group.waited) continue;
        group.waits = &call;
        group.waiting_rank = rank;
        group.waited = waited;
      }
    }
  };
  std::vector<GroupProgress> compared;
  for (auto& [path, group] : groups) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const auto& [rank, calls] : group.calls) least = std::min(least, calls);
    if (!pairs[path]) wait(group, least);
    if (group.waits != nullptr) {
      for (const auto& [rank, calls] : group.calls) {
        if (calls == least) group.behind.push_back(rank);
      }
    } else {
      wait(group, 0);
    }
    compared.push_back(std::move(group));
  }
  return compared;
}

absl::Status Debug(CoordinatorClient& client, const DebugOptions& options, Format format,
                   Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(options.job));
  const auto answers =
      client.GetCollectives(job.id(), std::max(1, job.ranks_size()), options.timeout);
  std::map<int, v1::CollectiveRecord> records;
  std::map<int, std::string> silent;
  for (int rank = 0; rank < static_cast<int>(answers.size()); ++rank) {
    const auto& answer = answers[static_cast<size_t>(rank)];
    if (answer.ok()) {
      records[rank] = *answer;
    } else if (answer.status().code() == absl::StatusCode::kFailedPrecondition ||
               answers.size() == 1) {
      return answer.status();
    } else {
      silent[rank] = std::string(answer.status().message());
    }
  }
  const std::vector<GroupProgress> groups = Compare(records);
  if (format != Format::kTable) {
    Json json;
    json["job"] = job.name();
    json["epoch"] = job.epoch();
    json["groups"] = Json::array();
    for (const GroupProgress& group : groups) json["groups"].push_back(GroupJson(group));
    json["ranks"] = Json::array();
    for (const auto& [rank, record] : records) {
      Json entry = ToJson(record);
      entry["rank"] = rank;
      json["ranks"].push_back(std::move(entry));
    }
    for (const auto& [rank, why] : silent) {
      json["ranks"].push_back(Json{{"rank", rank}, {"error", why}});
    }
    Print(json, format, terminal.out);
    return absl::OkStatus();
  }
  if (options.calls) {
    terminal.out << CallsTable(records);
    return absl::OkStatus();
  }
  terminal.out << GroupsTable(groups);
  const std::string verdict = Verdict(groups, silent);
  terminal.out << (verdict.empty() ? "no rank waits for another at this moment\n" : verdict);
  return absl::OkStatus();
}

}  // namespace muster::cli
