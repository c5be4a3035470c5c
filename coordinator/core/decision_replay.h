// Makes the plans of a log of changes again: from what the log says of the cluster at that time,
// by the scheduler of this program, and compares what both decided.
#ifndef MUSTER_COORDINATOR_CORE_DECISION_REPLAY_H_
#define MUSTER_COORDINATOR_CORE_DECISION_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/core/state_log.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// One job about which a plan decided something else than then. What is said of it is for people.
struct DecisionDifference {
  uint64_t entry = 0;  // LogEntry.index
  std::string job;     // id
  std::string then;    // "starts on w-1/cuda:0 to w-1/cuda:7"; "nothing"
  std::string now;
};
struct DecisionReport {
  int64_t plans = 0;                              // that were made again
  int64_t different = 0;                          // of them
  std::vector<DecisionDifference> differences;    // the first kDecisionDifferencesMax
  std::map<std::string, int64_t> not_comparable;  // plans that could not be made again, by reason
};
constexpr size_t kDecisionDifferencesMax = 100;

// Only plans that decided something are in the log. A plan costs as much as it did then, and what
// it takes to bring the jobs and workers up to date that have changed since the one before. Thread:
// one at a time.
class DecisionReplay {
 public:
  DecisionReplay();
  ~DecisionReplay();
  DecisionReplay(const DecisionReplay&) = delete;
  DecisionReplay& operator=(const DecisionReplay&) = delete;

  // The log goes on behind the state of `base`, whose rows of logged tables are `rows`. kDataLoss.
  absl::Status Begin(Store& base, const LoggedRows& rows);
  // The next entry, and all rows as they are after it. kDataLoss: a row cannot be read.
  absl::Status Take(const v1::LogEntry& entry, const LoggedRows& rows);

  const DecisionReport& report() const { return report_; }

 private:
  class Cluster;  // at one time
  using States = std::map<JobId, v1::StateRow>;
  using Usage = std::map<std::string, std::optional<v1::QueueUsage>>;  // by queue

  absl::Status SetConditions(const v1::PlanConditions& conditions, const LoggedRows& rows);
  void Changed(const v1::RowChange& change);
  absl::Status MakeAgain(const v1::LogEntry& entry, int plan, const LoggedRows& rows);
  void Compare(const v1::LogEntry& entry, const v1::PlanRecord& record,
               const std::vector<v1::PlanDecision>& now);

  std::unique_ptr<Cluster> cluster_;  // null: its conditions are not known
  // What has changed since the cluster was brought up to date.
  std::set<JobId> changed_jobs_;
  std::set<WorkerId> changed_workers_;
  bool policy_changed_ = true;
  Usage usage_;
  DecisionReport report_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DECISION_REPLAY_H_
