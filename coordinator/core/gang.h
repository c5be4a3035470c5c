// The ranks of the newest attempt of a job, as their daemons report them. Only what has ended is
// durable: after a restart of the coordinator the daemons report the rest again.
#ifndef MUSTER_COORDINATOR_CORE_GANG_H_
#define MUSTER_COORDINATOR_CORE_GANG_H_

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/core/loss_curve.h"
#include "coordinator/core/slow_ranks.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// What users see of a job's progress.
struct ProgressView {
  v1::ProgressRow& stored;
  LossCurve& curve;
  std::string& phase;  // of rank 0
  int64_t steps;       // of the job
  int64_t sequence_length;
};

// A report costs O(1), and O(ranks) once a second for the median of step times.
class Gang {
 public:
  Gang() = default;
  // All ranks are ASSIGNED, or as the attempt was stored when it had ended.
  Gang(const v1::AttemptRow& attempt, absl::Time now);

  int size() const { return static_cast<int>(ranks_.size()); }
  bool Has(int rank) const { return rank >= 0 && rank < size(); }
  const std::vector<v1::RankStatus>& ranks() const { return ranks_; }
  const v1::RankStatus& rank(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  v1::RankState state(int rank) const { return ranks_[static_cast<size_t>(rank)].state(); }
  // The ranks on this worker, ascending; none where the attempt has no rank there.
  const std::vector<int32_t>& On(const std::string& worker) const;
  const std::map<std::string, std::vector<int32_t>>& by_worker() const { return by_worker_; }
  // The place of this rank's worker among the gang's, in the order of their first ranks.
  int32_t group_rank(int rank) const { return group_ranks_[static_cast<size_t>(rank)]; }
  bool AllAtLeast(v1::RankState least) const;

  void SetState(int rank, v1::RankState state);
  void SetPid(int rank, int64_t pid);
  // True for the first exit of this rank that is reported.
  bool AddExit(int rank, v1::RankExit exit);
  const v1::RankExit& exit(int rank) const { return exits_.find(rank)->second; }
  // Ranks that ended for another cause than CAUSE_COMPLETED, ascending.
  const std::set<int32_t>& failed() const { return failed_; }
  int completed() const { return completed_; }

  // Takes a report and folds it into what users see. kOlder: a report that came late, dropped.
  enum class Report { kOlder, kSame, kChanged };
  Report Take(int rank, const v1::RankProgress& report, absl::Time now, const ProgressView& job);
  const std::vector<v1::RankProgress>& reports() const { return reports_; }
  // The largest step that a rank has reported; 0 before the first.
  int64_t step() const { return front_ < 0 ? 0 : reports_[static_cast<size_t>(front_)].step(); }
  // Whether a rank has told what it does.
  bool reported() const { return advanced_at_ != absl::InfinitePast(); }
  // By rank: when its report last changed at all.
  const std::vector<absl::Time>& answered() const { return answered_; }
  // When a rank last reported a step, or another phase; InfinitePast: none has.
  absl::Time advanced_at() const { return advanced_at_; }
  SlowRanks& slow_ranks() { return slow_ranks_; }
  // Of a command: a rank of it has reported progress.
  bool command_reports() const { return command_reports_; }
  // The coordinator did not run for `away`.
  void ForgivePause(absl::Duration away, absl::Time now);

  // The ranks that have exited or are gone.
  std::vector<v1::RankRun> Gone() const;
  void RecoverGone(const v1::RankRun& run);
  // True when a rank changed since the last call.
  bool TakeChanged() { return std::exchange(changed_, false); }

 private:
  void Count(v1::RankState state, int by) { by_state_[static_cast<size_t>(state)] += by; }
  bool FoldFront(const ProgressView& job);

  std::vector<v1::RankStatus> ranks_;
  std::map<std::string, std::vector<int32_t>> by_worker_;
  std::vector<int32_t> group_ranks_;  // by rank
  std::array<int, v1::RankState_ARRAYSIZE> by_state_ = {};
  std::map<int32_t, v1::RankExit> exits_;
  std::set<int32_t> failed_;
  int completed_ = 0;
  std::vector<v1::RankProgress> reports_;
  std::vector<absl::Time> answered_;
  SlowRanks slow_ranks_;
  absl::Time advanced_at_ = absl::InfinitePast();
  int front_ = -1;        // the first of the ranks at the largest step; -1: none has a step
  int with_points_ = -1;  // the first rank that reports points of the curve
  bool command_reports_ = false;
  absl::Time median_at_ = absl::InfinitePast();
  bool changed_ = true;
};

// Takes an evaluation of the job; false when it is known.
bool AddEvaluation(int64_t step, double loss, v1::ProgressRow& progress, LossCurve& curve);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_GANG_H_
