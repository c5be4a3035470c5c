#include <cstddef>
#include <deque>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "tests/sim/world.h"

namespace muster::sim {

using worker::DaemonCore;
using worker::DaemonOutput;
using worker::RankKey;

void World::StartDaemon(Machine& machine) {
  if (!machine.up || machine.daemon != nullptr) return;
  ++machine.generation;
  machine.connection.reset();
  machine.calls.clear();
  worker::DaemonCoreConfig config;
  machine.older = Disturbed() && rng_.Chance(0.2);
  if (machine.older) Count("older daemon");
  if (Disturbed()) {
    machine.skew = absl::Seconds(static_cast<int64_t>(rng_.Below(1200)) - 600);
  }
  config.new_identity = absl::StrCat("identity ", machine.disks, " of ", machine.name);
  config.hello.set_worker(machine.name);
  config.hello.set_host(machine.name);
  config.hello.set_boot_id("boot-" + machine.name);
  config.hello.set_address(absl::StrCat("10.0.0.", machine.name.substr(1)));
  config.hello.set_pid(1);
  (*config.hello.mutable_labels())["rack"] = machine.rack;
  if (!machine.block.empty()) (*config.hello.mutable_labels())["block"] = machine.block;
  for (int slot = 0; slot < machine.slots; ++slot) {
    v1::Device* device = config.hello.add_devices();
    device->set_name(absl::StrCat("cpu:", slot));
    device->set_kind(v1::DEVICE_KIND_CPU);
  }
  config.rank_socket = "socket";
  config.attempts_directory = "attempts";
  DaemonOutput output;
  absl::StatusOr<std::unique_ptr<DaemonCore>> daemon =
      DaemonCore::Recover(config, machine.disk, queue_.now() + machine.skew, &output);
  if (!daemon.ok()) {
    return Violate(absl::StrCat(machine.name, " recovery failed: ", daemon.status().ToString()));
  }
  machine.daemon = *std::move(daemon);
  Trace(absl::StrCat(machine.name, " daemon starts, incarnation ",
                     machine.daemon->incarnation().value()));
  CarryOut(machine, std::move(output));
  Dial(machine);
}

void World::KillDaemon(Machine& machine) {
  if (machine.daemon == nullptr) return;
  Trace(absl::StrCat(machine.name, " daemon is killed"));
  Count("daemon crash");
  machine.daemon.reset();
  ++machine.generation;
  machine.paused = false;
  machine.arrived.clear();
  LoseUnwritten(machine);
  // The ranks' open calls fail, and the ranks retry them.
  for (const auto& [id, call] : machine.calls) {
    queue_.After(absl::Milliseconds(200),
                 [this, call = call] { CallDaemon(call.key, call.generation, call.request); });
  }
  machine.calls.clear();
  machine.timer = absl::InfiniteFuture();
  if (machine.connection.has_value()) {
    const uint64_t id = *machine.connection;
    machine.connection.reset();
    connections_[id].worker_open = false;
    queue_.After(absl::Milliseconds(rng_.Chance(0.7) ? rng_.Below(10) : rng_.Below(5000)),
                 [this, id] { CloseCoordinatorSide(id); });
  }
  const uint64_t generation = machine.generation;
  queue_.After(absl::Milliseconds(200) + Outage(0.2, 25000, 3000),
               [this, name = machine.name, generation] {
                 Machine& m = machines_[name];
                 if (m.generation == generation) StartDaemon(m);
               });
}

// All processes of the machine end; its disk stays.
void World::KillHost(Machine& machine) {
  if (!machine.up) return;
  Trace(absl::StrCat(machine.name, " host goes down"));
  Count("host crash");
  machine.up = false;
  for (auto& [key, process] : machine.processes) {
    process.stray = false;
    if (process.alive) End(process, v1::CAUSE_UNKNOWN, -1, 0, "the machine went down");
  }
  if (machine.daemon != nullptr) KillDaemon(machine);
  ++machine.generation;
  if (rng_.Chance(0.2)) {
    Trace(absl::StrCat(machine.name, " has lost its disk"));
    Count("disk lost");
    ++machine.disks;
    machine.disk.clear();
    machine.processes.clear();
  }
  queue_.After(absl::Milliseconds(1000 + rng_.Below(rng_.Chance(0.3) ? 40000 : 8000)),
               [this, name = machine.name] {
                 machines_[name].up = true;
                 StartDaemon(machines_[name]);
               });
}

// Of the records that waited for the disk, any prefix may have reached it.
void World::LoseUnwritten(Machine& machine) {
  size_t records = 0;
  for (const DaemonOutput& output : machine.unwritten) records += output.records.size();
  size_t reached = records == 0 ? 0 : rng_.Below(records + 1);
  for (DaemonOutput& output : machine.unwritten) {
    for (worker::DaemonRecord& record : output.records) {
      if (reached == 0) break;
      --reached;
      ToDisk(machine, record);
    }
  }
  machine.unwritten.clear();
  machine.observed.reset();
  machine.writing = false;
  machine.written = 0;
}

void World::PauseDaemon(Machine& machine, absl::Duration time) {
  if (machine.daemon == nullptr || machine.paused) return;
  Trace(absl::StrCat(machine.name, " daemon is stopped for ", absl::FormatDuration(time)));
  Count("daemon pause");
  machine.paused = true;
  // The coordinator's pings are not answered.
  const absl::Duration found_dead = absl::Seconds(10) * rng_.Uniform();
  if (machine.connection.has_value() && found_dead < time) {
    queue_.After(found_dead, [this, id = *machine.connection] { CloseCoordinatorSide(id); });
  }
  queue_.After(time, [this, name = machine.name, generation = machine.generation] {
    Machine& m = machines_[name];
    if (m.generation == generation) ResumeDaemon(m);
  });
}

// Whether the timer or another event runs first is up to the operating system.
void World::ResumeDaemon(Machine& machine) {
  if (!machine.paused) return;
  Trace(absl::StrCat(machine.name, " daemon goes on, ", machine.arrived.size(), " events wait"));
  machine.paused = false;
  const uint64_t generation = machine.generation;
  std::deque<worker::DaemonEvent> events = std::exchange(machine.arrived, {});
  if (const size_t written = std::exchange(machine.written, 0); written > 0) {
    DiskDone(machine, written);
  }
  if (machine.generation == generation && machine.timer <= queue_.now() + machine.skew) {
    machine.timer = absl::InfiniteFuture();
    rng_.Chance(0.5) ? events.push_front(worker::TimerFired{})
                     : events.push_back(worker::TimerFired{});
  }
  for (worker::DaemonEvent& event : events) {
    if (machine.generation == generation) Feed(machine, std::move(event));
  }
}

// It is slow for a while, or it refuses every record.
void World::StrikeDisk(Machine& machine) {
  if (rng_.Chance(0.7)) {
    Trace(absl::StrCat(machine.name, " has a slow disk"));
    Count("slow disk of a daemon");
    machine.disk_slow_until = queue_.now() + absl::Milliseconds(rng_.Below(20'000));
  } else {
    Trace(absl::StrCat(machine.name, " has a disk that refuses writes"));
    machine.disk_fails_until = queue_.now() + absl::Milliseconds(rng_.Below(5000));
  }
}

void World::Feed(Machine& machine, worker::DaemonEvent event) {
  if (machine.daemon == nullptr) return;
  if (machine.paused) {
    machine.arrived.push_back(std::move(event));
    return;
  }
  CarryOut(machine, machine.daemon->Handle(event, queue_.now() + machine.skew));
}

// Like the shell's OutputQueue: while the disk is slow, outputs wait for the records before them.
void World::CarryOut(Machine& machine, DaemonOutput output) {
  const bool slow = queue_.now() < machine.disk_slow_until && !output.records.empty();
  if (slow || !machine.unwritten.empty()) return Await(machine, std::move(output));
  if (WriteRecords(machine, output.records)) Carry(machine, output.actions);
}

bool World::WriteRecords(Machine& machine, std::vector<worker::DaemonRecord>& records) {
  for (worker::DaemonRecord& record : records) {
    // A crash can come between any two.
    const bool may_die = Disturbed() || (faults_on_ && options_.faults == Faults::kServices);
    if (may_die && rng_.Chance(0.0005)) {
      Count("daemon crash between records");
      KillDaemon(machine);
      return false;
    }
    if (queue_.now() < machine.disk_fails_until) {
      Trace(absl::StrCat(machine.name, " cannot write its state"));
      Count("daemon's disk refused a write");
      KillDaemon(machine);
      return false;
    }
    ToDisk(machine, record);
  }
  return true;
}

void World::ToDisk(Machine& machine, worker::DaemonRecord& record) {
  if (record.value.has_value()) {
    machine.disk[record.name] = *std::move(record.value);
  } else {
    machine.disk.erase(record.name);
  }
}

// A timer is seen by nobody else and does not wait. An Observed that would wait behind records of
// others is a heartbeat: the newest one of its session that has been sent is sent again.
void World::Await(Machine& machine, DaemonOutput output) {
  const bool changed = !output.records.empty();
  std::vector<worker::DaemonAction> waiting;
  for (worker::DaemonAction& action : output.actions) {
    if (const auto* timer = std::get_if<worker::ArmTimer>(&action)) {
      Do(machine, *timer);
      continue;
    }
    const auto* send = std::get_if<worker::SendToCoordinator>(&action);
    if (send != nullptr && send->message.has_observed() && !changed &&
        machine.observed.has_value() && machine.observed->session == send->session) {
      Do(machine, worker::SendToCoordinator(*machine.observed));
    }
    waiting.push_back(std::move(action));
  }
  output.actions = std::move(waiting);
  machine.unwritten.push_back(std::move(output));
  WriteNext(machine);
}

// All that waits is written as one group.
void World::WriteNext(Machine& machine) {
  if (machine.writing || machine.unwritten.empty()) return;
  machine.writing = true;
  const bool slow = queue_.now() < machine.disk_slow_until;
  queue_.After(absl::Milliseconds(rng_.Below(slow ? 2500 : 5)),
               [this, name = machine.name, generation = machine.generation,
                outputs = machine.unwritten.size()] {
                 Machine& m = machines_[name];
                 if (m.generation == generation) DiskDone(m, outputs);
               });
}

void World::DiskDone(Machine& machine, size_t outputs) {
  if (machine.paused) {
    machine.written = outputs;
    return;
  }
  for (size_t i = 0; i < outputs; ++i) {
    if (!WriteRecords(machine, machine.unwritten[i].records)) return;
  }
  std::vector<worker::DaemonAction> actions;
  for (size_t i = 0; i < outputs; ++i) {
    for (worker::DaemonAction& action : machine.unwritten.front().actions) {
      actions.push_back(std::move(action));
    }
    machine.unwritten.pop_front();
  }
  machine.writing = false;
  WriteNext(machine);
  Carry(machine, actions);
}

void World::Carry(Machine& machine, const std::vector<worker::DaemonAction>& actions) {
  const uint64_t generation = machine.generation;
  for (const worker::DaemonAction& action : actions) {
    std::visit([&](const auto& a) { Do(machine, a); }, action);
    if (machine.generation != generation) return;
  }
}

void World::Answer(Machine& machine, absl::Duration delay, worker::DaemonEvent event) {
  const uint64_t generation = machine.generation;
  queue_.After(delay, [this, name = machine.name, generation, event = std::move(event)]() mutable {
    Machine& m = machines_[name];
    if (m.generation == generation) Feed(m, std::move(event));
  });
}

void World::Do(Machine& machine, const worker::PrepareAttempt& action) {
  worker::AttemptPrepared prepared{action.attempt, absl::OkStatus()};
  if (Disturbed() && rng_.Chance(0.02)) {
    prepared.status = absl::UnavailableError("the run directory cannot be made");
    prepared.cause = v1::CAUSE_LAUNCH;
    Count("launch refused");
  }
  StrikeWhilePreparing(machine.name);
  Answer(machine, absl::Milliseconds(1 + rng_.Below(20)), prepared);
}

void World::StrikeWhilePreparing(const std::string& name) {
  if (!Disturbed() || !rng_.Chance(0.08)) return;
  // From before its answer arrives until its ranks bootstrap.
  queue_.After(absl::Milliseconds(rng_.Below(300)), [this, name] {
    Machine& machine = machines_[name];
    if (!Disturbed() || !machine.up) return;
    Count("struck while it prepares");
    if (rng_.Chance(0.5)) return KillHost(machine);
    if (machine.partitioned) return;
    CutOff(machine, absl::Seconds(13 + static_cast<int64_t>(rng_.Below(25))));
  });
}

void World::Do(Machine& machine, const worker::StartRank& action) {
  auto known = machine.processes.find(action.rank);
  if (known != machine.processes.end()) {  // started before: attach
    return Do(machine, worker::AttachRank{action.rank});
  }
  if (Disturbed() && rng_.Chance(0.02)) {
    Count("start refused");
    Answer(machine, absl::Milliseconds(1 + rng_.Below(20)),
           worker::RankNotStarted{action.rank, absl::UnavailableError("no process can be made"),
                                  v1::CAUSE_LAUNCH});
    return;
  }
  Process& process = machine.processes[action.rank];
  process.key = action.rank;
  process.assignment = process.written = action.assignment;
  process.worker = machine.name;
  process.device = action.assignment.device();
  process.share = spec::ShareOf(action.assignment.spec());
  process.pid = static_cast<int64_t>(1000 + next_id_++);
  process.generation = next_id_++;
  Trace(absl::StrCat(machine.name, " starts ", ToString(action.rank), " on ", process.device,
                     " pid ", process.pid));
  Launch(machine, process);
  Answer(machine, absl::Milliseconds(1 + rng_.Below(30)),
         worker::RankStarted{action.rank, process.pid});
}

void World::Do(Machine& machine, const worker::AttachRank& action) {
  auto known = machine.processes.find(action.rank);
  const absl::Duration delay = absl::Milliseconds(1 + rng_.Below(20));
  if (known == machine.processes.end()) {
    Answer(machine, delay, worker::RankNotStarted{action.rank, absl::OkStatus()});
    return;
  }
  const Process& process = known->second;
  if (process.alive) {
    Count("re-attached");
    Answer(machine, delay, worker::RankStarted{action.rank, process.pid, process.commits});
  } else {
    Answer(machine, delay,
           worker::RankExited{action.rank, process.pid, process.exit, process.progress,
                              process.commits});
  }
}

void World::Do(Machine& machine, const worker::ReassignRank& action) {
  auto found = machine.processes.find(action.rank);
  if (found != machine.processes.end()) found->second.written = action.assignment;
  Answer(machine, absl::Milliseconds(1 + rng_.Below(20)),
         worker::RankReassigned{action.rank, action.assignment.membership(), absl::OkStatus()});
}

void World::Do(Machine& machine, const worker::SignalRank& action) {
  auto found = machine.processes.find(action.rank);
  if (found == machine.processes.end() || !found->second.alive) return;
  Process& process = found->second;
  if (action.kill) {
    End(process, v1::CAUSE_CRASH, -1, 9, "killed by signal 9");
    return;
  }
  // Most ranks heed the signal; some ignore it and must be killed.
  if (rng_.Chance(0.2)) return;
  queue_.After(absl::Milliseconds(rng_.Below(200)),
               [this, key = action.rank, generation = process.generation] {
                 Process* p = Find(key, generation);
                 if (p != nullptr) AskToStop(*p);
               });
}

void World::Do(Machine& machine, const worker::VerifyRelease& action) {
  auto found = machine.processes.find(action.rank);
  if (found != machine.processes.end()) {
    Process& process = found->second;
    if (process.alive) {
      End(process, v1::CAUSE_CRASH, -1, 9, "killed by signal 9");
    }
    if (process.stray) {  // its child takes a while to end
      queue_.After(absl::Milliseconds(200 + rng_.Below(1500)),
                   [this, name = machine.name, key = action.rank] {
                     auto it = machines_[name].processes.find(key);
                     if (it != machines_[name].processes.end()) it->second.stray = false;
                   });
      Answer(machine, absl::Milliseconds(1700), worker::ReleaseProven{action.rank});
      return;
    }
  }
  Answer(machine, absl::Milliseconds(1 + rng_.Below(50)), worker::ReleaseProven{action.rank});
}

void World::Do(Machine& machine, const worker::AttemptForgotten& action) {
  Trace(absl::StrCat(machine.name, " forgets ", ToString(action.attempt)));
  for (const auto& [key, process] : machine.processes) {
    if (key.attempt == action.attempt && (process.alive || process.stray)) {
      Violate(absl::StrCat(machine.name, " forgot ", ToString(key), " while it runs"));
    }
  }
}

void World::Do(Machine& machine, const worker::SendToCoordinator& action) {
  if (action.message.has_observed()) machine.observed = action;
  auto found = connections_.find(action.session.value());
  if (found == connections_.end()) return;
  ToCoordinator(found->second, action.message);
}

void World::Do(Machine& machine, const worker::ReplyToRank& action) {
  auto call = machine.calls.find(action.call.value());
  if (call == machine.calls.end()) return;
  auto pending = std::move(call->second);
  machine.calls.erase(call);
  queue_.After(absl::Microseconds(rng_.Below(2000)),
               [this, pending = std::move(pending), response = action.response] {
                 Answered(pending.key, pending.generation, pending.request, response);
               });
}

void World::Do(Machine& machine, const worker::Reconnect& action) {
  Trace(absl::StrCat(machine.name, " drops session ", action.session.value(), ": ", action.reason));
  CloseWorkerSide(action.session.value());
}

void World::Do(Machine& machine, const worker::ArmTimer& action) {
  machine.timer = action.at;
  if (action.at == absl::InfiniteFuture()) return;
  const uint64_t generation = machine.generation;
  queue_.At(action.at - machine.skew, [this, name = machine.name, generation, at = action.at] {
    Machine& m = machines_[name];
    if (m.generation != generation || m.timer != at || m.paused) return;
    m.timer = absl::InfiniteFuture();
    Feed(m, worker::TimerFired{});
  });
}

}  // namespace muster::sim
