#include "parallel/comm/exposure.h"

#include <string>
#include <utility>

#include "base/check.h"

namespace muster::parallel {
namespace {

using kernels::Stream;
using kernels::Tensor;

class MeteredCommunicator : public Communicator {
 public:
  MeteredCommunicator(Communicator& inner, ExposureMeter& meter, Exposure kind)
      : inner_(inner), meter_(meter), kind_(kind) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const std::string& name() const override { return inner_.name(); }
  void AllReduce(Stream& stream, Tensor data, ReduceOp op) override {
    Metered(Collective::kAllReduce, stream, [&] { inner_.AllReduce(stream, data, op); });
  }
  void ReduceScatter(Stream& stream, Tensor data, ReduceOp op) override {
    Metered(Collective::kReduceScatter, stream, [&] { inner_.ReduceScatter(stream, data, op); });
  }
  void ReduceScatterTo(Stream& stream, Tensor data, Tensor sum, ReduceOp op) override {
    Metered(Collective::kReduceScatter, stream,
            [&] { inner_.ReduceScatterTo(stream, data, sum, op); });
  }
  void ReduceScatterBeforeGather(Stream& stream, Tensor data, ReduceOp op) override {
    Metered(Collective::kReduceScatter, stream,
            [&] { inner_.ReduceScatterBeforeGather(stream, data, op); });
  }
  void AllGatherFrom(Stream& stream, Tensor in, Tensor out) override {
    Metered(Collective::kAllGather, stream, [&] { inner_.AllGatherFrom(stream, in, out); });
  }
  void AllGather(Stream& stream, Tensor data) override {
    Metered(Collective::kAllGather, stream, [&] { inner_.AllGather(stream, data); });
  }
  void Broadcast(Stream& stream, Tensor data, int root) override {
    Metered(Collective::kBroadcast, stream, [&] { inner_.Broadcast(stream, data, root); });
  }
  void AllToAll(Stream& stream, Tensor in, Tensor out) override {
    Metered(Collective::kAllToAll, stream, [&] { inner_.AllToAll(stream, in, out); });
  }
  void AllToAllBatch(Stream& stream, const std::vector<AllToAllItem>& items) override {
    Metered(Collective::kAllToAll, stream, [&] { inner_.AllToAllBatch(stream, items); });
  }
  // On the computing stream each step is counted alone: the caller's work in between is no wait.
  void AllGatherInSteps(Stream& stream, Tensor in, Tensor out,
                        absl::FunctionRef<void(int from)> arrived) override {
    if (&stream == &meter_.compute()) {
      return Communicator::AllGatherInSteps(stream, in, out, arrived);
    }
    inner_.AllGatherInSteps(stream, in, out, arrived);
  }
  void AllToAllInSteps(Stream& stream, Tensor in, Tensor out,
                       absl::FunctionRef<void(int to)> before) override {
    if (&stream == &meter_.compute()) {
      return Communicator::AllToAllInSteps(stream, in, out, before);
    }
    inner_.AllToAllInSteps(stream, in, out, before);
  }
  // Sends and receives of a group are waited for at its end.
  void Send(Stream& stream, Tensor data, int to) override {
    if (grouped_) return inner_.Send(stream, data, to);
    Metered(Collective::kSendReceive, stream, [&] { inner_.Send(stream, data, to); });
  }
  void Receive(Stream& stream, Tensor data, int from) override {
    if (grouped_) return inner_.Receive(stream, data, from);
    Metered(Collective::kSendReceive, stream, [&] { inner_.Receive(stream, data, from); });
  }
  void GroupBegin() override {
    grouped_ = true;
    inner_.GroupBegin();
  }
  void GroupEnd(Stream& stream) override {
    grouped_ = false;
    Metered(Collective::kSendReceive, stream, [&] { inner_.GroupEnd(stream); });
  }
  void Rotate(Stream& stream, Tensor in, Tensor out, int by) override {
    Metered(Collective::kSendReceive, stream, [&] { inner_.Rotate(stream, in, out, by); });
  }
  PeerMemory* peer_memory() override { return inner_.peer_memory(); }
  absl::Status Barrier() override { return inner_.Barrier(); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override {
    return inner_.Split(color, key, name);
  }
  void Abort(absl::Status why) override { inner_.Abort(std::move(why)); }
  int64_t bytes_sent() const override { return inner_.bytes_sent(); }

 private:
  template <typename Call>
  void Metered(Collective collective, Stream& stream, Call call) {
    // A group of one has nobody to wait for.
    const bool counts = size() > 1;
    if (counts) meter_.Begin(kind_, collective, stream);
    call();
    if (counts) meter_.End(stream);
  }

  Communicator& inner_;
  ExposureMeter& meter_;
  const Exposure kind_;
  bool grouped_ = false;
};

}  // namespace

absl::string_view Name(Exposure kind) {
  switch (kind) {
    case Exposure::kGradients:
      return "gradients";
    case Exposure::kParameters:
      return "parameters";
    case Exposure::kTensor:
      return "tensor";
    case Exposure::kContext:
      return "context";
    case Exposure::kPipeline:
      return "pipeline";
    case Exposure::kSlowest:
      return "slowest";
  }
  return "unknown";
}

absl::string_view Name(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kSendReceive:
      return "send_receive";
  }
  return "unknown";
}

double ExposedSeconds::of(Exposure kind) const {
  double sum = 0;
  for (const double seconds : seconds_[static_cast<size_t>(kind)]) sum += seconds;
  return sum;
}

double ExposedSeconds::of(Collective collective) const {
  double sum = 0;
  for (const auto& of_kind : seconds_) sum += of_kind[static_cast<size_t>(collective)];
  return sum;
}

double ExposedSeconds::total() const {
  double sum = 0;
  for (int kind = 0; kind < kExposures; ++kind) sum += of(static_cast<Exposure>(kind));
  return sum;
}

void ExposureMeter::BeginStep(int step) {
  current_ = step;
  steps_[step].used = 0;
}

void ExposureMeter::Begin(Exposure kind, Collective collective, const Stream& stream) {
  if (current_ < 0 || &stream != &compute_) return;
  CHECK(!open_) << "a wait inside a wait";
  Step& step = steps_[current_];
  if (step.used == step.waits.size()) {
    auto begin = device_.MakeEvent(/*timing=*/true);
    auto end = device_.MakeEvent(/*timing=*/true);
    if (!begin.ok() || !end.ok()) return;
    step.waits.push_back({kind, collective, *std::move(begin), *std::move(end)});
  }
  step.waits[step.used].kind = kind;
  step.waits[step.used].collective = collective;
  compute_.Record(*step.waits[step.used].begin);
  open_ = true;
}

void ExposureMeter::End(const Stream& stream) {
  if (!open_ || &stream != &compute_) return;
  Step& step = steps_[current_];
  compute_.Record(*step.waits[step.used].end);
  ++step.used;
  open_ = false;
}

ExposedSeconds ExposureMeter::Seconds(int step) const {
  ExposedSeconds seconds;
  for (size_t i = 0; i < steps_[step].used; ++i) {
    const Wait& wait = steps_[step].waits[i];
    seconds.at(wait.kind, wait.collective) += wait.end->SecondsSince(*wait.begin);
  }
  return seconds;
}

std::unique_ptr<Communicator> ExposureMeter::Around(Communicator& inner, Exposure kind) {
  return std::make_unique<MeteredCommunicator>(inner, *this, kind);
}

}  // namespace muster::parallel
