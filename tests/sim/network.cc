#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/world.h"

namespace muster::sim {

namespace {

// What a daemon of an older version says.
void ForgetNewer(v1::FromWorker& message) {
  if (message.has_put()) message.mutable_put()->clear_membership();
  if (message.has_get()) message.mutable_get()->clear_membership();
  if (message.has_hello()) {
    message.mutable_hello()->set_protocol_version(0);
    message.mutable_hello()->clear_history_id();
  }
  v1::Observed* observed = message.has_hello()      ? message.mutable_hello()->mutable_observed()
                           : message.has_observed() ? message.mutable_observed()
                                                    : nullptr;
  if (observed == nullptr) return;
  for (v1::ObservedAttempt& attempt : *observed->mutable_attempts()) {
    attempt.clear_membership();
    attempt.clear_history_id();
    attempt.clear_has_spec();
  }
}

// What it understands.
void ForgetNewer(v1::FromCoordinator& message) {
  message.clear_history_id();
  if (!message.has_desired()) return;
  for (v1::DesiredAttempt& attempt : *message.mutable_desired()->mutable_attempts()) {
    attempt.clear_membership();
    attempt.clear_history_id();
    for (v1::RankAssignment& rank : *attempt.mutable_ranks()) rank.clear_membership();
  }
}

}  // namespace

absl::Duration World::Delay() {
  if (Disturbed() && rng_.Chance(0.02)) {
    return absl::Milliseconds(rng_.Below(3000));
  }
  return absl::Microseconds(50 + rng_.Below(2000));
}

void World::Dial(Machine& machine) {
  if (machine.daemon == nullptr || machine.connection.has_value()) return;
  const uint64_t generation = machine.generation;
  const auto again = [this, name = machine.name, generation] {
    Machine& m = machines_[name];
    if (m.generation == generation) Dial(m);
  };
  if (core_ == nullptr || machine.partitioned || machine.paused) {
    queue_.After(absl::Milliseconds(100 + rng_.Below(400)), again);
    return;
  }
  const uint64_t id = next_id_++;
  Connection& connection = connections_[id];
  connection.id = id;
  connection.worker = machine.name;
  connection.daemon_generation = machine.generation;
  connection.coordinator_generation = coordinator_generation_;
  machine.connection = id;
  Trace(absl::StrCat(machine.name, " opens session ", id));
  Feed(machine, worker::SessionUp{worker::SessionId(id)});
}

void World::ToCoordinator(Connection& connection, v1::FromWorker message) {
  if (!connection.worker_open) return;
  const Machine& machine = machines_[connection.worker];
  if (machine.mute) return;  // the message is lost
  if (machine.older) ForgetNewer(message);
  absl::Time at = queue_.now() + Delay();
  const bool odd = Disturbed() && !message.has_hello();
  if (odd && rng_.Chance(0.02)) {
    Count("reordered");
  } else {
    at = std::max(at, connection.to_coordinator);
    connection.to_coordinator = at;
  }
  const auto deliver = [this, id = connection.id](v1::FromWorker arrived) {
    auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& link = found->second;
    if (link.coordinator_generation != coordinator_generation_ || !link.coordinator_open ||
        core_ == nullptr || machines_[link.worker].mute) {
      return;
    }
    const coordinator::SessionId session(id);
    if (arrived.has_hello()) {
      Feed(
          coordinator::SessionOpened{session, Incarnation(arrived.incarnation()), arrived.hello()});
    } else {
      Feed(coordinator::SessionMessage{session, std::move(arrived)});
    }
  };
  if (odd && rng_.Chance(0.02)) {
    Count("duplicated");
    queue_.At(at + absl::Milliseconds(5),
              [deliver, message]() mutable { deliver(std::move(message)); });
  }
  queue_.At(at, [deliver, message = std::move(message)]() mutable { deliver(std::move(message)); });
}

void World::ToWorker(Connection& connection, v1::FromCoordinator message) {
  if (machines_[connection.worker].deaf) return;
  if (machines_[connection.worker].older) ForgetNewer(message);
  absl::Time at = queue_.now() + Delay();
  const bool odd = Disturbed() && !message.has_welcome();
  if (odd && rng_.Chance(0.02)) {
    Count("reordered");
  } else {
    at = std::max(at, connection.to_worker);
    connection.to_worker = at;
  }
  const int copies = odd && rng_.Chance(0.02) ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    queue_.At(at + absl::Milliseconds(copy * 5), [this, id = connection.id, message]() mutable {
      auto found = connections_.find(id);
      if (found == connections_.end() || !found->second.worker_open) return;
      Machine& machine = machines_[found->second.worker];
      if (machine.generation != found->second.daemon_generation || machine.deaf) return;
      Feed(machine, worker::CoordinatorMessage{worker::SessionId(id), std::move(message)});
    });
  }
}

// Each side notices later, at a time of its own.
void World::Break(uint64_t connection) {
  Count("broken session");
  const auto later = [this] {
    return absl::Milliseconds(rng_.Chance(0.5) ? rng_.Below(20) : rng_.Below(6000));
  };
  queue_.After(later(), [this, connection] { CloseWorkerSide(connection); });
  queue_.After(later(), [this, connection] { CloseCoordinatorSide(connection); });
}

void World::CloseWorkerSide(uint64_t id) {
  auto found = connections_.find(id);
  if (found == connections_.end() || !found->second.worker_open) return;
  Connection& connection = found->second;
  connection.worker_open = false;
  Machine& machine = machines_[connection.worker];
  if (machine.generation != connection.daemon_generation || machine.connection != id) return;
  machine.connection.reset();
  Feed(machine, worker::SessionDown{worker::SessionId(id)});
  const uint64_t generation = machine.generation;
  queue_.After(absl::Milliseconds(50 + rng_.Below(500)), [this, name = machine.name, generation] {
    Machine& m = machines_[name];
    if (m.generation == generation) Dial(m);
  });
  if (connection.coordinator_open) {
    queue_.After(Delay(), [this, id] { CloseCoordinatorSide(id); });
  }
}

void World::CloseCoordinatorSide(uint64_t id) {
  auto found = connections_.find(id);
  if (found == connections_.end() || !found->second.coordinator_open) return;
  Connection& connection = found->second;
  connection.coordinator_open = false;
  if (connection.coordinator_generation == coordinator_generation_) {
    Feed(coordinator::SessionClosed{coordinator::SessionId(id)});
  }
  if (connection.worker_open) {
    queue_.After(Delay(), [this, id] { CloseWorkerSide(id); });
  }
}

}  // namespace muster::sim
