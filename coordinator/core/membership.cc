#include "coordinator/core/membership.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/network.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/planned_job.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/replacement.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// "rank 3", "ranks 2-3", "ranks 0, 2-5".
std::string RanksText(const std::vector<int32_t>& ranks) {
  std::vector<std::string> runs;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    runs.push_back(last == first ? absl::StrCat(ranks[first])
                                 : absl::StrCat(ranks[first], "-", ranks[last]));
    first = last + 1;
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(runs, ", "));
}

// True when ranks on these workers may talk over loopback: all workers are on the coordinator's
// machine.
bool ShareLoopback(const std::vector<const WorkerEntry*>& workers) {
  return std::all_of(workers.begin(), workers.end(), [&workers](const WorkerEntry* worker) {
    const v1::Worker& row = worker->row;
    return (row.address().empty() || IsLoopbackAddress(row.address())) &&
           row.boot_id() == workers.front()->row.boot_id();
  });
}

}  // namespace

void Membership::SetAddresses(v1::AttemptRow& attempt) const {
  std::vector<const WorkerEntry*> entries;
  for (const v1::Placement& placement : attempt.placements()) {
    entries.push_back(workers_.Find(WorkerId(placement.worker())));
    CHECK(entries.back() != nullptr) << placement.worker();
  }
  const bool loopback = ShareLoopback(entries);
  for (v1::Placement& placement : *attempt.mutable_placements()) {
    const v1::Worker& row = entries[static_cast<size_t>(placement.rank())]->row;
    // Other hosts cannot reach a loopback address. Where a worker has no other address, the
    // preflight of its ranks fails and says so.
    const bool outside = !loopback && (row.address().empty() || IsLoopbackAddress(row.address()));
    placement.set_address(outside && !row.outside_address().empty() ? row.outside_address()
                                                                    : row.address());
    placement.set_host(row.host());
  }
}

bool Membership::MayReplace(const JobEntry& job, const std::string& worker, v1::Cause cause) const {
  const v1::AttemptState state = job.state.attempt_state();
  const bool allocated = state == v1::ATTEMPT_STATE_ALLOCATED;
  if (!allocated && state != v1::ATTEMPT_STATE_BOOTSTRAPPING) return false;
  // A cause that counts, or that would be the same anywhere, ends the attempt.
  if (BudgetOf(cause, /*trained=*/false) != Budget::kFree) return false;
  if (job.membership() >= kMembershipsMax) return false;
  // A report may be late that says that it trains; a checkpoint of its own proves it.
  const auto& checkpoints = job.checkpoints.records();
  if (std::any_of(checkpoints.begin(), checkpoints.end(),
                  [&job](const auto& record) { return record.epoch() == job.epoch().value(); })) {
    return false;
  }
  // What the program of a user has begun cannot be taken back.
  if (job.runs_command() && !allocated) return false;
  const bool launched = job.state.launched_membership() > 0 || !allocated;
  bool any_stays = false;
  for (const auto& [name, ranks] : job.gang.by_worker()) {
    if (name == worker) continue;
    const WorkerEntry* entry = workers_.Find(WorkerId(name));
    // Once ranks may run, only a daemon that is connected has told how far they are.
    if (!entry->knows_memberships || (launched && !entry->session.has_value())) return false;
    for (const int32_t rank : ranks) {
      if (job.gang.state(rank) >= v1::RANK_STATE_TRAINING) return false;
    }
    any_stays = true;
  }
  return any_stays;
}

std::optional<std::string> Membership::Replace(JobEntry& job, const std::string& worker,
                                               const StopReason& reason, Departure departure,
                                               Turn& turn) {
  if (!MayReplace(job, worker, reason.cause)) return std::nullopt;
  const std::vector<int32_t> ranks = job.gang.On(worker);
  v1::AttemptRow& attempt = job.attempt;
  // A worker that has left an epoch takes no part in it again: what is left of its ranks there
  // cannot be taken for new ones.
  std::set<WorkerId> excluded = {WorkerId(worker)};
  for (const v1::Replacement& before : attempt.replacements()) {
    excluded.insert(WorkerId(before.worker()));
  }
  for (const auto& [id, entry] : workers_.entries()) {
    if (!entry.knows_memberships || (job.runs_command() && !entry.runs_commands)) {
      excluded.insert(id);
    }
  }
  WaitingJob waiting = AsWaiting(job, reservations_);
  if (job.elastic()) waiting = AtSize(waiting, job.size());
  std::optional<std::vector<v1::Placement>> moved;
  {
    SlotIndex::Trial trial(workers_.slots());
    moved = PlaceReplacements(trial, waiting,
                              {attempt.placements().begin(), attempt.placements().end()},
                              {ranks.begin(), ranks.end()}, excluded);
  }
  if (!moved.has_value()) return std::nullopt;

  const uint32_t membership = job.membership() + 1;
  std::set<std::string> to;
  for (const v1::Placement& placement : *moved) {
    v1::Placement& at = *attempt.mutable_placements(placement.rank());
    if (departure == Departure::kProven) {
      workers_.Free(at, job.id(), job.epoch());
    } else {
      v1::Placement& leaving = *attempt.add_leaving();
      leaving = at;
      leaving.set_membership(job.membership());
    }
    at = placement;
    at.set_membership(membership);
    workers_.Hold(at, job.id(), job.epoch(), waiting.share);
    to.insert(at.worker());
  }
  attempt.set_membership(membership);
  SetAddresses(attempt);
  *attempt.mutable_cost() =
      CostOf(workers_.slots(), waiting, {attempt.placements().begin(), attempt.placements().end()});
  v1::Replacement& replacement = *attempt.add_replacements();
  replacement.set_membership(membership);
  *replacement.mutable_time() = ToProto(turn.now());
  replacement.set_worker(worker);
  for (const int32_t rank : ranks) *replacement.add_ranks() = attempt.placements(rank);
  replacement.set_stayed(job.size() - static_cast<int32_t>(ranks.size()));
  replacement.set_cause(reason.cause);
  replacement.set_message(Bounded(reason.message));
  job.PutAttempt(turn.batch());
  turn.Persist(job.id());

  // All daemons tell anew how far their ranks are, in the new membership.
  job.gang = Gang(attempt, turn.now());
  values_.Drop(job.id(), job.epoch(),
               absl::UnavailableError(absl::StrCat("job ", job.fixed.id(), " epoch ",
                                                   attempt.epoch(), ": membership ", membership - 1,
                                                   " was replaced by ", membership)),
               turn);
  v1::Event row = About(job, v1::EVENT_KIND_RANKS_REPLACED);
  row.set_worker(worker);
  row.set_rank(ranks.front());
  row.set_cause(reason.cause);
  const std::string what = absl::StrCat("membership ", membership, ": ", RanksText(ranks), " of ",
                                        job.size(), ranks.size() == 1 ? " goes" : " go", " from ",
                                        worker, " to ", absl::StrJoin(to, ", "));
  row.set_message(absl::StrCat(what, ", the others stay; ", replacement.message()));
  turn.Log(std::move(row));
  return what;
}

void Membership::Departed(JobEntry& job, const std::string& worker, int32_t rank, Turn& turn) {
  auto& leaving = *job.attempt.mutable_leaving();
  for (int i = leaving.size() - 1; i >= 0; --i) {
    if (leaving[i].worker() != worker || (rank >= 0 && leaving[i].rank() != rank)) continue;
    workers_.Free(leaving[i], job.id(), job.epoch());
    leaving.DeleteSubrange(i, 1);
  }
  job.PutAttempt(turn.batch());
  turn.Persist(job.id());
  turn.DesiredChanged(WorkerId(worker));
  turn.Reschedule();
  turn.FreeSlots(job.id(), worker);  // the attempt may have waited for this alone
}

bool Membership::MayHaveStarted(const JobEntry& job, const std::string& worker) {
  if (job.state.attempt_state() != v1::ATTEMPT_STATE_ALLOCATED) return true;
  const std::vector<int32_t>& ranks = job.gang.On(worker);
  return std::any_of(ranks.begin(), ranks.end(), [&job](int32_t rank) {
    const uint32_t since = std::max<uint32_t>(1, job.attempt.placements(rank).membership());
    return since <= job.state.launched_membership();
  });
}

void Membership::Check(const JobEntry& job, std::vector<std::string>& broken) const {
  const auto claim = [&](bool holds, absl::string_view what) {
    if (!holds) broken.push_back(absl::StrCat("job ", job.fixed.id(), ": ", what));
  };
  const v1::AttemptRow& attempt = job.attempt;
  claim(static_cast<int>(job.membership()) == attempt.replacements_size() + 1,
        "its membership is not that of its last replacement");
  claim(job.state.launched_membership() <= job.membership(),
        "ranks of a membership that does not exist were told to start");
  const bool allocated = job.state.attempt_state() == v1::ATTEMPT_STATE_ALLOCATED;
  claim(!job.up() || allocated || job.state.launched_membership() == job.membership() ||
            job.state.launched_membership() == 0,
        "ranks run that were not told to start");
  for (const v1::Placement& placement : attempt.placements()) {
    claim(placement.membership() <= job.membership(), "a rank is of a membership to come");
    claim(!job.Leaves(placement.worker()), "a worker has ranks that stay and ranks that leave");
  }
  for (const v1::Placement& placement : attempt.leaving()) {
    claim(workers_.Holds(placement, job.id(), Epoch(attempt.epoch())),
          "a rank that leaves has lost its slot without a release");
    claim(placement.membership() >= 1 && placement.membership() < job.membership(),
          "a rank that leaves is of the current membership");
  }
  int64_t held = attempt.leaving_size();
  for (const v1::Placement& placement : attempt.placements()) {
    if (workers_.Holds(placement, job.id(), Epoch(attempt.epoch()))) ++held;
  }
  claim(held * spec::ShareOf(job.spec()) == workers_.HeldBy(job.id()),
        "it holds a slot for no rank");
}

}  // namespace muster::coordinator
