#include "coordinator/targets.h"

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "coordinator/core/job_view.h"
#include "nlohmann/json.hpp"

namespace muster::coordinator {

using Json = nlohmann::ordered_json;

std::string TargetsJson(const PublishedState& published, const std::string& cluster_id,
                        const std::string& own_address) {
  const auto target = [&](const std::string& address, const char* component, const Json& more) {
    Json labels = {{"cluster", cluster_id}, {"component", component}};
    labels.update(more);
    absl::string_view bare = address;
    if (absl::ConsumePrefix(&bare, "https://")) labels["__scheme__"] = "https";
    return Json{{"targets", Json::array({std::string(bare)})}, {"labels", std::move(labels)}};
  };
  Json list = Json::array({target(own_address, "coordinator", Json::object())});
  const std::shared_ptr<const std::vector<v1::Worker>> workers = published.workers();
  for (const v1::Worker& worker : *workers) {
    if (worker.metrics_address().empty() || worker.state() == v1::WORKER_STATE_LOST) continue;
    list.push_back(target(worker.metrics_address(), "worker", {{"worker", worker.name()}}));
  }
  std::map<std::pair<std::string, int>, Json> ranks;
  for (const JobView& job : published.UnfinishedJobs()) {
    const v1::Job* placed = job[JobPart::kRanks].get();
    if (placed == nullptr) continue;
    const std::string& name = job[JobPart::kState]->name();
    for (const v1::RankStatus& rank : placed->ranks()) {
      const bool runs =
          rank.state() == v1::RANK_STATE_RUNNING || rank.state() == v1::RANK_STATE_TRAINING;
      if (!runs || rank.metrics_address().empty()) continue;
      ranks[{name, rank.rank()}] = target(rank.metrics_address(), "rank",
                                          {{"worker", rank.worker()},
                                           {"__meta_muster_job_name", name},
                                           {"__meta_muster_rank", absl::StrCat(rank.rank())}});
    }
  }
  for (auto& [key, of_rank] : ranks) list.push_back(std::move(of_rank));
  return list.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace muster::coordinator
