#include "parallel/comm/flight_recorder.h"

#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/comm/arguments.h"

namespace muster::parallel {

using kernels::Stream;
using kernels::Tensor;

class RecordedCommunicator : public Communicator {
 public:
  RecordedCommunicator(std::unique_ptr<Communicator> inner, std::string path,
                       std::shared_ptr<FlightRecorder> recorder)
      : inner_(std::move(inner)), path_(std::move(path)), recorder_(std::move(recorder)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  int64_t bytes_sent() const override { return inner_->bytes_sent(); }

  void AllReduce(Stream& stream, Tensor data, ReduceOp op) override {
    Recorded(stream, "all-reduce", data, [&] { inner_->AllReduce(stream, data, op); });
  }
  void ReduceScatter(Stream& stream, Tensor data, ReduceOp op) override {
    Recorded(stream, "reduce-scatter", data, [&] { inner_->ReduceScatter(stream, data, op); });
  }
  void ReduceScatterTo(Stream& stream, Tensor data, Tensor sum, ReduceOp op) override {
    Recorded(stream, "reduce-scatter", data,
             [&] { inner_->ReduceScatterTo(stream, data, sum, op); });
  }
  void ReduceScatterBeforeGather(Stream& stream, Tensor data, ReduceOp op) override {
    Recorded(stream, "reduce-scatter", data,
             [&] { inner_->ReduceScatterBeforeGather(stream, data, op); });
  }
  void AllGatherFrom(Stream& stream, Tensor in, Tensor out) override {
    Recorded(stream, "all-gather", out, [&] { inner_->AllGatherFrom(stream, in, out); });
  }
  void AllGather(Stream& stream, Tensor data) override {
    Recorded(stream, "all-gather", data, [&] { inner_->AllGather(stream, data); });
  }
  void Broadcast(Stream& stream, Tensor data, int root) override {
    Recorded(
        stream, "broadcast", data, [&] { inner_->Broadcast(stream, data, root); }, root);
  }
  void AllToAll(Stream& stream, Tensor in, Tensor out) override {
    Recorded(stream, "all-to-all", in, [&] { inner_->AllToAll(stream, in, out); });
  }
  void AllToAllBatch(Stream& stream, const std::vector<AllToAllItem>& items) override {
    const int64_t elements = CheckAllToAllBatch(items, size());
    const Tensor& first = items[0].in;
    Recorded(stream, "batch of all-to-alls", Tensor(first.data(), first.dtype(), {elements}),
             [&] { inner_->AllToAllBatch(stream, items); });
  }
  void AllGatherInSteps(Stream& stream, Tensor in, Tensor out,
                        absl::FunctionRef<void(int from)> arrived) override {
    Recorded(stream, "all-gather in steps", out,
             [&] { inner_->AllGatherInSteps(stream, in, out, arrived); });
  }
  void AllToAllInSteps(Stream& stream, Tensor in, Tensor out,
                       absl::FunctionRef<void(int to)> before) override {
    Recorded(stream, "all-to-all in steps", in,
             [&] { inner_->AllToAllInSteps(stream, in, out, before); });
  }
  void Send(Stream& stream, Tensor data, int to) override {
    Transfer(stream, recorder_->Begin(name(), path_, "send", data, to),
             [&] { inner_->Send(stream, data, to); });
  }
  void Receive(Stream& stream, Tensor data, int from) override {
    Transfer(stream, recorder_->Begin(name(), path_, "receive", data, from),
             [&] { inner_->Receive(stream, data, from); });
  }
  void GroupBegin() override {
    grouping_ = true;
    inner_->GroupBegin();
  }
  void GroupEnd(Stream& stream) override {
    inner_->GroupEnd(stream);
    grouping_ = false;
    for (const uint64_t id : std::exchange(grouped_, {})) {
      FlightRecorder::Follow(recorder_, id, stream);
    }
  }
  void Rotate(Stream& stream, Tensor in, Tensor out, int by) override {
    Recorded(stream, "rotation", in, [&] { inner_->Rotate(stream, in, out, by); });
  }
  PeerMemory* peer_memory() override { return inner_->peer_memory(); }
  absl::Status Barrier() override {
    const uint64_t id = recorder_->Begin(name(), path_, "barrier", Tensor(), -1);
    absl::Status status = inner_->Barrier();
    recorder_->Finish(
        id, status.ok() ? FlightRecorder::State::kFinished : FlightRecorder::State::kFailed);
    return status;
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override {
    ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, inner_->Split(color, key, name));
    return std::make_unique<RecordedCommunicator>(
        std::move(group), absl::StrCat(path_, "/", name, ":", color), recorder_);
  }
  void Abort(absl::Status why) override {
    recorder_->Freeze();
    inner_->Abort(std::move(why));
  }

 private:
  template <typename Call>
  void Recorded(Stream& stream, const char* operation, const Tensor& data, const Call& call,
                int peer = -1) {
    const uint64_t id = recorder_->Begin(name(), path_, operation, data, peer);
    call();
    FlightRecorder::Follow(recorder_, id, stream);
  }
  template <typename Call>
  void Transfer(Stream& stream, uint64_t id, const Call& call) {
    call();
    if (grouping_) {
      grouped_.push_back(id);
    } else {
      FlightRecorder::Follow(recorder_, id, stream);
    }
  }

  const std::unique_ptr<Communicator> inner_;
  const std::string path_;
  const std::shared_ptr<FlightRecorder> recorder_;
  bool grouping_ = false;
  std::vector<uint64_t> grouped_;
};

FlightRecorder::FlightRecorder(size_t calls_max) : calls_max_(calls_max) { CHECK(calls_max > 0); }

std::unique_ptr<Communicator> FlightRecorder::Record(std::unique_ptr<Communicator> communicator,
                                                     std::shared_ptr<FlightRecorder> recorder) {
  std::string path = communicator->name();
  return std::make_unique<RecordedCommunicator>(std::move(communicator), std::move(path),
                                                std::move(recorder));
}

uint64_t FlightRecorder::Begin(const std::string& group, const std::string& path,
                               const char* operation, const Tensor& data, int peer) {
  MutexLock lock(&mutex_);
  Entry entry;
  if (entries_.size() == calls_max_) {
    entry.done = std::move(entries_.front().done);  // an event is reused
    entries_.pop_front();
  }
  entry.number = calls_[path]++;
  entry.group = group;
  entry.path = path;
  entry.operation = operation;
  entry.dtype = data.dtype();
  entry.elements = data.empty() ? 0 : data.elements();
  entry.peer = peer;
  entry.enqueued = absl::Now();
  entries_.push_back(std::move(entry));
  return next_id_++;
}

FlightRecorder::Entry* FlightRecorder::Find(uint64_t id) {
  const uint64_t first = next_id_ - entries_.size();
  return id < first ? nullptr : &entries_[id - first];
}

void FlightRecorder::Follow(const std::shared_ptr<FlightRecorder>& recorder, uint64_t id,
                            Stream& stream) {
  if (stream.device().kind() == kernels::DeviceKind::kCpu) {
    stream.Enqueue([recorder, id, &stream] {
      recorder->Finish(id, stream.status().ok() ? State::kFinished : State::kFailed);
    });
    return;
  }
  MutexLock lock(&recorder->mutex_);
  Entry* entry = recorder->Find(id);
  if (entry == nullptr) return;
  if (!stream.status().ok()) {
    entry->state = State::kFailed;
    return;
  }
  if (entry->done == nullptr) {
    auto event = stream.device().MakeEvent();
    if (!event.ok()) {
      stream.Fail(event.status());
      return;
    }
    entry->done = *std::move(event);
  }
  stream.Record(*entry->done);
  entry->followed = true;
}

void FlightRecorder::Finish(uint64_t id, State state) {
  MutexLock lock(&mutex_);
  Entry* entry = Find(id);
  if (entry == nullptr || frozen_) return;
  entry->state = state;
  if (trace_ == nullptr || state != State::kFinished) return;
  trace_->AddQueued(
      absl::StrCat("collectives of ", entry->group),
      absl::StrFormat("%s %s[%d]", entry->operation, kernels::Name(entry->dtype), entry->elements),
      absl::ToUnixNanos(entry->enqueued), absl::GetCurrentTimeNanos());
}

void FlightRecorder::SetTrace(std::shared_ptr<kernels::Trace> trace) {
  MutexLock lock(&mutex_);
  trace_ = std::move(trace);
}

FlightRecorder::State FlightRecorder::StateOf(const Entry& entry, bool frozen) {
  if (entry.state != State::kUnfinished || frozen || !entry.followed) return entry.state;
  return entry.done->finished() ? State::kFinished : State::kUnfinished;
}

void FlightRecorder::Freeze() {
  MutexLock lock(&mutex_);
  if (frozen_) return;
  for (Entry& entry : entries_) entry.state = StateOf(entry, /*frozen=*/false);
  frozen_ = true;
}

std::string FlightRecorder::Line(const Call& call, State state) {
  const char* const states[] = {"unfinished", "finished", "failed"};
  return absl::StrFormat(
      "%s call %d: %s %s[%d] %d bytes%s, enqueued %s, %s", call.group, call.number, call.operation,
      kernels::Name(call.dtype), call.elements, call.bytes(),
      call.peer < 0 ? "" : absl::StrCat(", peer ", call.peer),
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", call.enqueued, absl::UTCTimeZone()),
      states[static_cast<int>(state)]);
}

std::vector<FlightRecorder::Call> FlightRecorder::Calls() const {
  MutexLock lock(&mutex_);
  std::vector<Call> calls;
  calls.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    calls.push_back(entry);
    calls.back().state = StateOf(entry, frozen_);
  }
  return calls;
}

std::string FlightRecorder::Dump() const {
  MutexLock lock(&mutex_);
  std::string text;
  for (const Entry& entry : entries_) {
    absl::StrAppend(&text, Line(entry, StateOf(entry, frozen_)), "\n");
  }
  return text;
}

std::map<std::string, FlightRecorder::Position> FlightRecorder::Positions() const {
  MutexLock lock(&mutex_);
  std::map<std::string, Position> positions;
  for (const Entry& entry : entries_) {
    Position& position = positions[entry.path];
    position.group = entry.group;
    const State state = StateOf(entry, frozen_);
    if (position.unfinished.has_value() || state == State::kFinished) continue;
    position.unfinished = entry;
    position.unfinished->state = state;
  }
  for (auto& [path, position] : positions) position.calls = calls_.find(path)->second;
  return positions;
}

std::string FlightRecorder::Unfinished() const {
  MutexLock lock(&mutex_);
  std::set<std::string> seen;
  std::vector<std::string> lines;
  for (const Entry& entry : entries_) {
    const State state = StateOf(entry, frozen_);
    if (state == State::kFinished || !seen.insert(entry.group).second) continue;
    lines.push_back(Line(entry, state));
  }
  return absl::StrJoin(lines, "; ");
}

}  // namespace muster::parallel
