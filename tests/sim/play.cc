#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/spec/array.h"
#include "proto/spec/spec.h"
#include "proto/time.h"
#include "tests/sim/world.h"
#include "tests/support/job_spec.h"

namespace muster::sim {

namespace {

constexpr absl::Duration kFaultsFor = absl::Seconds(40);
constexpr absl::Duration kFaultsForADay = absl::Hours(24);
// Time from the last fault to the end of every job. It is enough for back-offs, lost workers, a
// hang and the training.
constexpr absl::Duration kFinishWithin = absl::Seconds(240);

}  // namespace

World::World(const Options& options) : options_(options), rng_(options.seed) {
  store_ = coordinator::MemoryStore::Make("simulated");
  // Racks or blocks of which three or more can fall silent, and be a minority of all.
  const bool domains = options.faults == Faults::kReachability && rng_.Chance(0.5);
  const bool blocks = domains && rng_.Chance(0.5);
  const int workers = static_cast<int>(options.large() ? 20 + rng_.Below(31)
                                       : domains       ? 6 + rng_.Below(3)
                                                       : 2 + rng_.Below(3));
  for (int i = 1; i <= workers; ++i) {
    Machine& machine = machines_[absl::StrCat("w", i)];
    machine.name = absl::StrCat("w", i);
    machine.slots = 1 + static_cast<int>(rng_.Below(3));
    machine.rack = absl::StrCat("r", (i - 1) / (options.large() ? 8 : domains && !blocks ? 3 : 2));
    if (blocks) machine.block = absl::StrCat("b", (i - 1) / 4);
  }
}

// Random queues in a tree, with quotas.
void World::DefineQueues() {
  const int count = 1 + static_cast<int>(rng_.Below(4));
  for (int i = 0; i < count; ++i) {
    v1::QueueSpec& queue = *policy_.add_queues();
    queue.set_name(absl::StrCat("q", i));
    queue.set_weight(static_cast<double>(1 + rng_.Below(3)));
    if (i > 0 && rng_.Chance(0.5)) {
      queue.set_parent(absl::StrCat("q", rng_.Below(static_cast<uint64_t>(i))));
    } else {
      (*queue.mutable_guaranteed())["cpu"] = static_cast<int64_t>(rng_.Below(4));
    }
    if (rng_.Chance(0.5)) {
      (*queue.mutable_borrowing_limit())["cpu"] = static_cast<int64_t>(1 + rng_.Below(6));
    }
    if (rng_.Chance(0.3)) queue.set_running_jobs_max(static_cast<int32_t>(1 + rng_.Below(3)));
    if (rng_.Chance(0.3)) {
      (*queue.mutable_tenant_limit())["cpu"] = static_cast<int64_t>(1 + rng_.Below(4));
    }
  }
  // Some keep devices free for jobs that recover, and think badly of workers sooner or later.
  Rng more(options_.seed * 15'485'863);
  if (more.Chance(0.5)) {
    v1::SparePolicy& spares = *policy_.add_spares();
    spares.set_level(more.Chance(0.5) ? v1::TOPOLOGY_LEVEL_CLUSTER : v1::TOPOLOGY_LEVEL_RACK);
    (*spares.mutable_devices())["cpu"] = 1;
  }
  policy_.mutable_reputation()->mutable_half_life()->set_seconds(
      static_cast<int64_t>(60 + more.Below(600)));
  policy_.mutable_reputation()->set_avoid_above(0.2 + 2 * more.Uniform());
  policy_.mutable_passed_over_max()->set_seconds(static_cast<int64_t>(rng_.Below(60)));
  policy_.mutable_turn_after()->set_seconds(static_cast<int64_t>(60 + rng_.Below(60)));
  policy_.mutable_half_life()->set_seconds(static_cast<int64_t>(60 + rng_.Below(600)));
  absl::StatusOr<coordinator::QueueTree> tree = coordinator::QueueTree::Make(policy_);
  CHECK_OK(tree.status());
  tree_ = *std::move(tree);
}

void World::TryApplyQueues() {
  if (queues_applied_) return;
  if (core_ != nullptr) {
    queues_call_ = next_id_++;
    Feed(coordinator::ApplyQueuesEvent{coordinator::CallId(queues_call_), policy_});
  }
  queue_.After(absl::Milliseconds(500), [this] { TryApplyQueues(); });
}

void World::Submit(int number) {
  int slots = 0;
  for (const auto& [name, machine] : machines_) slots += machine.slots;
  Submission submission;
  v1::JobSpec& spec = submission.spec;
  spec = testing::SmallJobSpec(absl::StrCat("job", number));
  spec.set_priority(static_cast<int32_t>(rng_.Below(3) * 40));
  v1::TrainingSpec* training = spec.mutable_engine()->mutable_training();
  training->set_steps((5 + static_cast<int64_t>(rng_.Below(60))) * (options_.day() ? 20 : 1));
  submission.feasible = !rng_.Chance(0.1);
  const int ranks = submission.feasible
                        ? 1 + static_cast<int>(rng_.Below(options_.large() ? 16 : slots))
                        : slots + 1;
  training->set_global_batch(ranks);
  std::map<std::string, int> racks;
  for (const auto& [name, machine] : machines_) racks[machine.rack] += machine.slots;
  const bool fits_a_rack = std::any_of(racks.begin(), racks.end(),
                                       [ranks](const auto& rack) { return rack.second >= ranks; });
  v1::PlacementSpec& placement = *spec.mutable_placement();
  if (fits_a_rack && rng_.Chance(0.2)) {
    placement.set_required(v1::TOPOLOGY_LEVEL_RACK);
  } else if (rng_.Chance(0.1)) {
    placement.set_preferred(v1::TOPOLOGY_LEVEL_RACK);
  } else if (rng_.Chance(0.1)) {
    placement.set_spread(v1::TOPOLOGY_LEVEL_HOST);
  }
  if (rng_.Chance(0.3)) (*spec.mutable_labels())["team"] = "vision";
  spec.mutable_resources()->set_ranks(ranks);
  if (rng_.Chance(0.9)) {
    spec.mutable_checkpoint()->set_path("/checkpoints");
    spec.mutable_checkpoint()->set_every_steps(2 + static_cast<int64_t>(rng_.Below(8)));
  }
  spec.mutable_restart()->set_max_failures(static_cast<int32_t>(rng_.Below(6)));
  spec.mutable_restart()->mutable_backoff()->mutable_initial()->set_nanos(200'000'000);
  spec.mutable_restart()->mutable_backoff()->mutable_max()->set_seconds(5);
  spec.mutable_preemption()->mutable_grace()->set_seconds(1 + static_cast<int64_t>(rng_.Below(4)));
  // Where only some faults happen, tests count the attempts that are repeated.
  google::protobuf::Duration& min_runtime = *spec.mutable_preemption()->mutable_min_runtime();
  if (options_.faults == Faults::kAll) {
    min_runtime.set_nanos(static_cast<int32_t>(rng_.Below(900'000'000)));
  } else {
    min_runtime.set_seconds(86'400);
  }
  if (queues_applied_) {
    const std::string queue = absl::StrCat("q", rng_.Below(policy_.queues_size()));
    if (rng_.Chance(0.5)) (*spec.mutable_labels())["tenant"] = "other";
    if (tree_.CheckJob(queue, v1::DEVICE_KIND_CPU, ranks).ok()) spec.set_queue(queue);
  }
  // Some may have any number of ranks that divides the batch.
  Rng elastic(options_.seed * 7919 + static_cast<uint64_t>(number));
  if (submission.feasible && ranks > 1 && options_.faults == Faults::kAll && elastic.Chance(0.3)) {
    v1::RankRange& range = *spec.mutable_resources()->mutable_rank_range();
    range.set_min(1);
    range.set_max(ranks);
    spec.mutable_preemption()->mutable_grow_after()->set_seconds(
        static_cast<int64_t>(elastic.Below(20)));
  }
  if (Rng shares(options_.seed * 15'485'863 + static_cast<uint64_t>(number));
      options_.shares() && !spec.resources().has_rank_range() && shares.Chance(0.6)) {
    constexpr double kShares[] = {0.5, 0.5, 0.25, 0.333, 0.75};
    spec.mutable_resources()->set_share(kShares[shares.Below(std::size(kShares))]);
  }
  submission.cancel = !submission.feasible || rng_.Chance(0.1);
  // Beside spares it may never fit.
  submission.cancel |= !policy_.spares().empty();
  submission.poisoned = rng_.Chance(0.05);
  if (submission.poisoned) (*spec.mutable_labels())["poisoned"] = "yes";
  AddBounds(number, spec);
  spec::ApplyDefaults(spec);
  CHECK_OK(spec::Validate(spec));
  Rng arrays(options_.seed * 104'729 + static_cast<uint64_t>(number));
  if (options_.faults == Faults::kAll && !options_.large() && !options_.day() &&
      arrays.Chance(0.15)) {
    return SubmitArray(number, submission, arrays);
  }
  submission.request_id = absl::StrCat("request-", number);
  const std::string id = submission.request_id;
  submissions_[id] = submission;
  TrySubmit(id, spec);
}

// Several jobs as one, of which only some run at a time.
void World::SubmitArray(int number, const Submission& like, Rng rng) {
  const std::string request_id = absl::StrCat("array-", number);
  std::vector<v1::JobSpec> tasks(1 + rng.Below(4));
  const auto max_running = static_cast<int32_t>(rng.Below(3));
  for (size_t i = 0; i < tasks.size(); ++i) {
    tasks[i] = like.spec;
    v1::ArrayTask& task = *tasks[i].mutable_array_task();
    task.set_array(like.spec.name());
    task.set_index(static_cast<int32_t>(i));
    task.set_tasks(static_cast<int32_t>(tasks.size()));
    task.set_max_running(max_running);
    tasks[i].set_name(absl::StrCat(like.spec.name(), "-", i));
    (*tasks[i].mutable_labels())[spec::kArrayLabel] = like.spec.name();
    (*tasks[i].mutable_labels())[spec::kArrayIndexLabel] = absl::StrCat(i);
    CHECK_OK(spec::Validate(tasks[i]));
    Submission submission = like;
    submission.request_id = absl::StrCat(request_id, "/", i);
    submission.spec = tasks[i];
    submissions_[submission.request_id] = submission;
  }
  Count("array submitted");
  TrySubmitArray(request_id, tasks);
}

void World::TrySubmitArray(const std::string& request_id, std::vector<v1::JobSpec> tasks) {
  if (array_ids_.contains(request_id)) return;
  for (v1::JobSpec& task : tasks) DropForgotten(task);
  if (MaySubmit()) {
    const uint64_t call = next_id_++;
    if (!(Disturbed() && rng_.Chance(0.2))) array_calls_[call] = request_id;
    Feed(coordinator::SubmitArrayEvent{coordinator::CallId(call), tasks, request_id, {}});
  }
  queue_.After(absl::Milliseconds(500 + rng_.Below(1000)),
               [this, request_id, tasks] { TrySubmitArray(request_id, tasks); });
}

void World::TakeArrayReply(const std::string& request_id, const coordinator::ReplyAction& reply) {
  if (!reply.status.ok()) {
    return Violate(absl::StrCat("submission refused: ", reply.status.ToString()));
  }
  std::string& known = array_ids_[request_id];
  if (!known.empty() && known != reply.array.array_id()) {
    return Violate(absl::StrCat("request ", request_id, " made two arrays"));
  }
  known = reply.array.array_id();
  for (int32_t i = 0; i < reply.array.tasks(); ++i) {
    Submission& submission = submissions_[absl::StrCat(request_id, "/", i)];
    const absl::StatusOr<v1::Job> job = core_->GetJob(submission.spec.name());
    if (!job.ok()) {
      return Violate(absl::StrCat("a task of ", known, " is missing: ", job.status().ToString()));
    }
    submission.id = job->id();
    if (!submission.cancel) continue;
    const std::string id = submission.id;
    queue_.After(absl::Milliseconds(rng_.Below(20000)), [this, id] { TryCancel(id); });
  }
}

// Some jobs may run for a while only, and some wait for the end of another one.
void World::AddBounds(int number, v1::JobSpec& spec) {
  Rng rng(options_.seed * 1000 + static_cast<uint64_t>(number));
  if (rng.Chance(0.15)) spec.mutable_time_limit()->set_seconds(2 + static_cast<int>(rng.Below(20)));
  // Where only some faults happen, tests want every job to succeed.
  Rng deadlines(options_.seed * 31337 + static_cast<uint64_t>(number));
  if (options_.faults == Faults::kAll && deadlines.Chance(0.1)) {
    spec.set_deadline(absl::StrCat(5 + deadlines.Below(120), "s"));
  }
  if (!rng.Chance(0.25)) return;
  std::vector<std::string> known;
  for (const auto& [request, other] : submissions_) {
    if (!other.id.empty()) known.push_back(other.id);
  }
  if (known.empty()) return;
  spec.add_after(absl::StrCat(known[rng.Below(known.size())], ":ended"));
  Count("waits for the end of another job");
}

// Submits again and again with the same request id until a reply arrives; replies can get lost.
void World::TrySubmit(const std::string& request_id, v1::JobSpec spec) {
  if (!submissions_[request_id].id.empty()) return;
  if (spec.has_array_task()) return;  // its array is submitted again
  DropForgotten(spec);
  if (MaySubmit()) {
    const uint64_t call = next_id_++;
    if (!(Disturbed() && rng_.Chance(0.2))) submit_calls_[call] = request_id;
    Feed(coordinator::SubmitEvent{coordinator::CallId(call), spec, request_id});
  }
  queue_.After(absl::Milliseconds(500 + rng_.Below(1000)),
               [this, request_id, spec] { TrySubmit(request_id, spec); });
}

bool World::Awaited(const std::string& id) const {
  return final_states_.count(id) == 0 &&
         std::any_of(submissions_.begin(), submissions_.end(),
                     [&id](const auto& submission) { return submission.second.id == id; });
}

bool World::MaySubmit() const {
  const bool queues = queues_applied_ || policy_.queues().empty();
  return core_ != nullptr && (queues || !returned_);
}

void World::DropForgotten(v1::JobSpec& spec) const {
  if (core_ == nullptr || !returned_) return;
  auto& after = *spec.mutable_after();
  after.erase(std::remove_if(after.begin(), after.end(),
                             [this](const std::string& entry) {
                               return !core_->GetJob(entry.substr(0, entry.find(':'))).ok();
                             }),
              after.end());
}

void World::TryCancel(const std::string& id) {
  if (!Awaited(id)) return;
  if (core_ != nullptr) Feed(coordinator::CancelEvent{coordinator::CallId(next_id_++), id});
  queue_.After(absl::Seconds(2), [this, id] { TryCancel(id); });
}

// Users change when jobs run: all of them are let go when the faults are over.
void World::ScheduleChange() {
  queue_.After(absl::Milliseconds(rng_.Below(options_.day() ? 2'400'000 : 4000)), [this] {
    if (!faults_on_) return;
    ChangeSomeJob();
    ScheduleChange();
  });
}

void World::ChangeSomeJob() {
  using Change = coordinator::ChangeJobEvent::Change;
  std::vector<std::string> live;
  for (const auto& [request, submission] : submissions_) {
    if (!submission.id.empty() && final_states_.count(submission.id) == 0) {
      live.push_back(submission.id);
    }
  }
  if (live.empty() || core_ == nullptr) return;
  coordinator::ChangeJobEvent event;
  event.call = coordinator::CallId(next_id_++);
  event.job = live[rng_.Below(live.size())];
  event.change = std::vector<Change>{Change::kPreempt, Change::kSuspend, Change::kHold,
                                     Change::kRelease, Change::kRequeue}[rng_.Below(5)];
  const absl::StatusOr<v1::Job> job = core_->GetJob(event.job);
  if (job.ok() && job->spec().has_array_task() && rng_.Chance(0.3)) {
    Count("array changed");
    return Feed(coordinator::ChangeArrayEvent{
        event.call,
        job->spec().array_task().array_id(),
        std::vector<Change>{Change::kHold, Change::kRelease, Change::kRequeue}[rng_.Below(3)],
        "",
        {}});
  }
  if (job.ok() && !job->sizes().empty() && rng_.Chance(0.5)) {
    event.change = Change::kResize;
    event.ranks =
        rng_.Chance(0.3) ? 0 : job->sizes(static_cast<int>(rng_.Below(job->sizes_size())));
  }
  Feed(event);
}

void World::TryRelease(const std::string& id) {
  if (!Awaited(id)) return;
  if (core_ != nullptr) {
    coordinator::ChangeJobEvent event;
    event.call = coordinator::CallId(next_id_++);
    event.job = id;
    event.change = coordinator::ChangeJobEvent::Change::kRelease;
    Feed(event);
  }
  queue_.After(absl::Seconds(10), [this, id] { TryRelease(id); });
}

void World::ScheduleFault() {
  const uint64_t most_ms = options_.large() ? 600 : options_.day() ? 1'200'000 : 6000;
  queue_.After(absl::Milliseconds(rng_.Below(most_ms)), [this] {
    if (!faults_on_) return;
    if (options_.day()) rough_until_ = queue_.now() + absl::Seconds(rng_.Below(200));
    InjectFault();
    ScheduleFault();
  });
}

void World::InjectFault() {
  auto any = machines_.begin();
  std::advance(any, rng_.Below(machines_.size()));
  Machine& machine = any->second;
  std::vector<Process*> alive;
  for (auto& [name, m] : machines_) {
    for (auto& [key, process] : m.processes) {
      if (process.alive) alive.push_back(&process);
    }
  }
  uint64_t kind = rng_.Below(options_.faults == Faults::kAll ? 20 : 13);
  if (options_.faults == Faults::kServices) kind %= 2;
  if (options_.faults == Faults::kReachability) kind = kind % 3 == 2 ? 19 : 9 + kind % 3;
  if (options_.faults == Faults::kRestore) kind = kind == 2 || kind == 3 ? 16 : kind % 2;
  if (options_.faults == Faults::kRanks) kind = 2 + kind % 3;
  switch (kind) {
    case 13:
    case 14:
    case 15:
      return DisturbFleet(machine, kind);
    case 16:
      return ReturnToBackup();
    case 17:
      return StrikeDisk(machine);
    case 18: {
      // In a small cluster all must end within minutes.
      const uint64_t most_ms = rng_.Chance(0.3) ? (options_.day() ? 300'000 : 45'000) : 10'000;
      return PauseDaemon(machine, absl::Seconds(1) + absl::Milliseconds(rng_.Below(most_ms)));
    }
    case 19:
      return CutOffDomain(machine);
    case 0:
      // Half of the kills wait for the next write: few moments fall into one by chance.
      if (rng_.Chance(0.5)) return CrashCoordinator("killed");
      crash_in_write_ = true;
      return;
    case 1:
      return KillDaemon(machine);
    case 2:
    case 3: {
      if (alive.empty()) return;
      Count("rank killed");
      return End(*alive[rng_.Below(alive.size())], v1::CAUSE_CRASH, -1, 9, "killed by signal 9");
    }
    case 4: {
      if (alive.empty()) return;
      Count("gang killed");
      const worker::AttemptKey attempt = alive[rng_.Below(alive.size())]->key.attempt;
      for (Process* process : alive) {
        if (process->key.attempt == attempt) {
          End(*process, v1::CAUSE_CRASH, -1, 9, "killed by signal 9");
        }
      }
      return;
    }
    case 5:
      if (rng_.Chance(0.5)) return KillHost(machine);
      store_->FailWrites(true);  // the next write ends the coordinator
      return;
    case 8: {
      std::vector<std::pair<Process*, Process*>> pairs;
      for (Process* a : alive) {
        for (Process* b : alive) {
          if (a->key.attempt == b->key.attempt && a->worker != b->worker) pairs.emplace_back(a, b);
        }
      }
      if (pairs.empty()) return;
      Count("link broken");
      const auto [a, b] = pairs[rng_.Below(pairs.size())];
      return BreakLink(*a, *b, v1::CAUSE_NETWORK);
    }
    case 6:
    case 7: {
      if (machine.partitioned) return;
      Count("partition");
      return CutOff(machine, absl::Milliseconds(rng_.Below(rng_.Chance(0.3) ? 30000 : 4000)));
    }
    case 11:
      Trace("the coordinator's disk is slow");
      Count("slow disk");
      slow_disk_until_ = queue_.now() + absl::Milliseconds(rng_.Below(10000));
      return;
    case 12:
      if (machine.partitioned) return;
      Count("cut in one direction");
      return CutOff(machine, absl::Milliseconds(rng_.Below(rng_.Chance(0.3) ? 30000 : 4000)),
                    rng_.Chance(0.5) ? Cut::kSent : Cut::kReceived);
    case 9:
      return PauseCoordinator(absl::Milliseconds(rng_.Below(rng_.Chance(0.3) ? 45000 : 5000)));
    case 10: {
      // The switch of the fleet, or the coordinator's own link. It may last for longer than one
      // worker would be waited for.
      const bool whole = std::none_of(machines_.begin(), machines_.end(),
                                      [](const auto& m) { return m.second.partitioned; });
      if (!whole) return;
      Count("all cut off");
      const absl::Duration time = absl::Milliseconds(rng_.Below(rng_.Chance(0.5) ? 60000 : 5000));
      for (auto& [name, m] : machines_) CutOff(m, time + absl::Milliseconds(rng_.Below(500)));
      return;
    }
  }
}

// Its switch fails.
void World::CutOffDomain(const Machine& machine) {
  std::vector<Machine*> members;
  for (auto& [name, m] : machines_) {
    if (machine.block.empty() ? m.rack == machine.rack : m.block == machine.block) {
      members.push_back(&m);
    }
  }
  const auto cut = [](const Machine* m) { return m->partitioned; };
  if (options_.faults == Faults::kReachability) {
    // Of fewer workers each may be given up, and so may those that were silent before the others.
    if (members.size() < 3) return;
    for (const auto& [name, m] : machines_) {
      if (m.partitioned) return;
    }
  }
  members.erase(std::remove_if(members.begin(), members.end(), cut), members.end());
  if (members.empty()) return;
  Count("rack cut off");
  const uint64_t long_ms = options_.day() ? 600'000 : 60'000;
  const absl::Duration time = absl::Milliseconds(rng_.Below(rng_.Chance(0.5) ? long_ms : 5000));
  for (Machine* m : members) CutOff(*m, time + absl::Milliseconds(rng_.Below(500)));
}

void World::DisturbFleet(Machine& machine, uint64_t kind) {
  const std::string name = machine.name;
  if (kind == 13) {
    Count("cordon");
    v1::CordonRequest request;
    request.add_workers(name);
    AskFleet(request);
  } else if (kind == 14) {
    Count("drain");
    v1::DrainRequest request;
    request.add_workers(name);
    request.mutable_timeout()->set_seconds(static_cast<int64_t>(rng_.Below(20)));
    AskFleet(request);
  } else {
    Count("reservation");
    v1::ReserveRequest request;
    request.mutable_reservation()->set_name("r" + name);
    request.mutable_reservation()->set_label("team=vision");
    *request.mutable_reservation()->mutable_until() =
        ToProto(CoreNow() + absl::Seconds(1 + static_cast<int64_t>(rng_.Below(20))));
    v1::ReservedDevices& devices = *request.add_workers();
    devices.set_worker(name);
    if (rng_.Chance(0.5)) devices.add_devices("cpu:0");
    AskFleet(request);
  }
  queue_.After(absl::Milliseconds(rng_.Below(25000)), [this, name] {
    v1::UncordonRequest request;
    request.add_workers(name);
    AskFleet(request);
    v1::ForgiveRequest forgive;
    forgive.add_workers(name);
    AskFleet(forgive);
  });
}

void World::AskFleet(coordinator::FleetEvent::Request request) {
  if (core_ == nullptr) return;
  Feed(coordinator::FleetEvent{coordinator::CallId(next_id_++), std::move(request)});
}

void World::OpenFleet() {
  for (const auto& [name, machine] : machines_) {
    v1::UncordonRequest uncordon;
    uncordon.add_workers(name);
    AskFleet(uncordon);
    v1::UnreserveRequest unreserve;
    unreserve.set_name("r" + name);
    AskFleet(unreserve);
  }
  queue_.After(absl::Seconds(3), [this] { OpenFleet(); });
}

void World::CutOff(Machine& machine, absl::Duration time, Cut cut) {
  Trace(absl::StrCat(machine.name, " is cut off for ", absl::FormatDuration(time)));
  machine.partitioned = true;
  machine.mute = cut != Cut::kReceived;
  machine.deaf = cut != Cut::kSent;
  if (machine.connection.has_value() && rng_.Chance(0.5)) Break(*machine.connection);
  queue_.After(time, [this, name = machine.name] {
    Machine& m = machines_[name];
    if (!m.partitioned) return;
    m.partitioned = m.mute = m.deaf = false;
    Trace(absl::StrCat(name, " is reachable again"));
    // The stream does not survive; the messages on it are lost.
    if (m.connection.has_value()) Break(*m.connection);
  });
}

absl::Duration World::Outage(double late_chance, uint64_t late_ms, uint64_t soon_ms) {
  const bool late = options_.faults == Faults::kAll && rng_.Chance(late_chance);
  return absl::Milliseconds(rng_.Below(late ? late_ms : soon_ms));
}

void World::Heal() {
  Trace("no more faults");
  faults_on_ = false;
  store_->FailWrites(false);
  crash_in_write_ = false;
  slow_disk_until_ = absl::InfinitePast();
  for (auto& [name, machine] : machines_) {
    machine.disk_slow_until = machine.disk_fails_until = absl::InfinitePast();
    ResumeDaemon(machine);
    // Until it is upgraded, jobs may wait that share devices.
    if (machine.older && options_.shares()) KillDaemon(machine);
  }
  if (options_.faults == Faults::kAll) OpenFleet();
  if (options_.faults != Faults::kAll) return;
  for (const auto& [request, submission] : submissions_) {
    if (!submission.id.empty()) TryRelease(submission.id);
  }
}

bool World::Finished() const {
  if (core_ == nullptr || !unsynced_.empty()) return false;
  for (const auto& [request, submission] : submissions_) {
    if (submission.id.empty() || final_states_.count(submission.id) == 0) return false;
  }
  for (const auto& [name, machine] : machines_) {
    if (machine.daemon == nullptr || machine.partitioned || !machine.unwritten.empty()) {
      return false;
    }
    for (const auto& [key, process] : machine.processes) {
      if (process.alive || process.stray) return false;
    }
    if (machine.daemon->Summary().attempts > 0) return false;
  }
  return true;
}

Result World::Play() {
  StartCoordinator();
  if (options_.faults == Faults::kAll && rng_.Chance(0.5)) {
    DefineQueues();
    TryApplyQueues();
  }
  for (auto& [name, machine] : machines_) StartDaemon(machine);
  const int jobs = static_cast<int>(options_.large() ? 50 + rng_.Below(151)
                                    : options_.day() ? 20 + rng_.Below(20)
                                                     : 2 + rng_.Below(4));
  const uint64_t submit_ms = options_.day() ? 80'000'000 : 20'000;
  for (int i = 0; i < jobs; ++i) {
    queue_.After(absl::Milliseconds(rng_.Below(submit_ms)), [this, i] { Submit(i); });
  }
  const absl::Time begin = queue_.now();
  const absl::Time quiet = begin + (options_.day() ? kFaultsForADay : kFaultsFor);
  if (options_.faults != Faults::kNone) ScheduleFault();
  if (options_.faults == Faults::kAll) ScheduleChange();
  while (result_.violation.empty() && queue_.Step(quiet)) {
    ++result_.events;
    CheckAll();
  }
  Heal();
  // What is left of a day's jobs may be more than 20 hours of training on a few devices.
  const absl::Time deadline = quiet + (options_.large() ? 10
                                       : options_.day() ? 450
                                                        : 1) *
                                          kFinishWithin;
  while (result_.violation.empty() && !Finished() && queue_.Step(deadline)) {
    ++result_.events;
    CheckAll();
  }
  if (result_.violation.empty()) CheckEnd();
  result_.trace_hash = hash_;
  result_.time = queue_.now() - begin;
  return result_;
}

Result Simulate(const Options& options) { return World(options).Play(); }

}  // namespace muster::sim
