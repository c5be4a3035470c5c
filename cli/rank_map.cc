#include "cli/rank_map.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace muster::cli {
namespace {

std::string PlaceOf(const v1::RankMap& map, int rank) {
  if (rank >= map.placements_size()) return "-";
  return absl::StrCat(map.placements(rank).worker(), " ", map.placements(rank).device());
}

}  // namespace

absl::Status DiffRankMap(CoordinatorClient& client, const std::string& job, uint64_t from,
                         uint64_t to, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::GetRankMapsResponse response, client.GetRankMaps(job));
  std::vector<uint64_t> epochs;
  for (const v1::RankMap& map : response.maps()) epochs.push_back(map.epoch());
  if (epochs.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", response.job_id(),
                                                      " has not started; `muster explain ", job,
                                                      "` says why it waits"));
  }
  if (to == 0) to = epochs.back();
  const auto find = [&](uint64_t epoch) { return std::find(epochs.begin(), epochs.end(), epoch); };
  if (from == 0) {
    const auto newer = find(to);
    if (newer == epochs.begin()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", response.job_id(), ": no attempt is known before epoch ", to,
          ", so that there is nothing to compare with; its ranks: `muster describe job ", job,
          "`"));
    }
    from = newer == epochs.end() ? to : *(newer - 1);
  }
  for (const uint64_t epoch : {from, to}) {
    if (find(epoch) != epochs.end()) continue;
    return absl::NotFoundError(absl::StrCat("job ", response.job_id(),
                                            ": nothing is known of epoch ", epoch, "; known are ",
                                            absl::StrJoin(epochs, ", ")));
  }
  const v1::RankMap& before = response.maps(static_cast<int>(find(from) - epochs.begin()));
  const v1::RankMap& after = response.maps(static_cast<int>(find(to) - epochs.begin()));
  const int ranks = std::max(before.placements_size(), after.placements_size());
  std::vector<int> moved;
  for (int rank = 0; rank < ranks; ++rank) {
    if (PlaceOf(before, rank) != PlaceOf(after, rank)) moved.push_back(rank);
  }
  // Of a job that was resized, some ranks are new, or are gone.
  const int kept = std::min(before.placements_size(), after.placements_size());
  const auto stayed = [kept](int rank) { return rank < kept; };
  const auto elsewhere = std::count_if(moved.begin(), moved.end(), stayed);
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const int rank : moved) {
      Json row = {{"rank", rank}};
      if (rank < before.placements_size()) row["from"] = ToJson(before.placements(rank));
      if (rank < after.placements_size()) row["to"] = ToJson(after.placements(rank));
      list.push_back(std::move(row));
    }
    Print(Json{{"jobId", response.job_id()},
               {"from", from},
               {"to", to},
               {"ranks", ranks},
               {"moved", std::move(list)}},
          format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << response.job_id() << ": " << elsewhere << " of " << kept
               << " ranks moved between epoch " << from << " and " << to;
  if (ranks > kept) {
    terminal.out << ", " << ranks - kept
                 << (kept == before.placements_size() ? " were added" : " were given up");
  }
  terminal.out << "\n";
  if (moved.empty()) return absl::OkStatus();
  std::vector<std::vector<std::string>> rows = {
      {"RANK", absl::StrCat("EPOCH ", from), absl::StrCat("EPOCH ", to)}};
  for (const int rank : moved) {
    rows.push_back({absl::StrCat(rank), PlaceOf(before, rank), PlaceOf(after, rank)});
  }
  terminal.out << Table(rows);
  return absl::OkStatus();
}

}  // namespace muster::cli
