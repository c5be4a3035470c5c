#include "coordinator/rpc/external_scaler.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/pull_stream.h"
#include "coordinator/rpc/status.h"
#include "coordinator/shell.h"
#include "coordinator/wanted_workers.h"
#include "externalscaler/external_scaler.grpc.pb.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

namespace keda = ::externalscaler;

constexpr char kMetric[] = "workers";
// How often a stream looks again: workers come and go without an event.
constexpr absl::Duration kLookAgain = absl::Seconds(5);

absl::StatusOr<int> Wanted(Shell& shell, const keda::ScaledObjectRef& object) {
  const std::map<std::string, std::string> metadata(object.scalermetadata().begin(),
                                                    object.scalermetadata().end());
  absl::StatusOr<WorkerGroup> group = ParseWorkerGroup(metadata);
  if (!group.ok()) {
    return Annotate(group.status(),
                    absl::StrCat("trigger of ScaledObject ", spec::Quoted(object.name())));
  }
  return WantedWorkers(*group, shell.published().UnfinishedJobs(), *shell.published().workers());
}

class ActiveStream : public PullStream<keda::IsActiveResponse> {
 public:
  ActiveStream(Shell& shell, keda::ScaledObjectRef object, absl::StatusOr<Permit> permit)
      : PullStream(shell, "StreamIsActive", std::move(permit)), object_(std::move(object)) {}

 private:
  bool WatchesEvents() const override { return true; }
  absl::Status OnOpen(const std::shared_ptr<const v1::Job>&) override {
    return Wanted(shell(), object_).status();
  }
  Step Next(keda::IsActiveResponse* message, absl::Status* status) override {
    const absl::StatusOr<int> wanted = Wanted(shell(), object_);
    if (!wanted.ok()) {
      *status = wanted.status();
      return Step::kEnd;
    }
    const bool active = *wanted > 0;
    if (sent_ == active) {
      LookAgain();
      return Step::kWait;
    }
    sent_ = active;
    message->set_result(active);
    return Step::kSend;
  }

  void LookAgain() {
    if (looks_again_) return;
    looks_again_ = true;
    shell().watch_loop().PostAfter(kLookAgain, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      static_cast<ActiveStream&>(*self).looks_again_ = false;
      self->Wake();
    });
  }

  const keda::ScaledObjectRef object_;
  std::optional<bool> sent_;
  bool looks_again_ = false;  // a timer is set
};

class Service : public keda::ExternalScaler::CallbackService {
 public:
  Service(Shell& shell, Gate& gate) : shell_(shell), gate_(gate) {}

  grpc::ServerUnaryReactor* IsActive(grpc::CallbackServerContext* context,
                                     const keda::ScaledObjectRef* request,
                                     keda::IsActiveResponse* response) override {
    return Answer(context, "ExternalScaler.IsActive", *request,
                  [response](int wanted) { response->set_result(wanted > 0); });
  }
  grpc::ServerWriteReactor<keda::IsActiveResponse>* StreamIsActive(
      grpc::CallbackServerContext* context, const keda::ScaledObjectRef* request) override {
    const auto stream = std::make_shared<ActiveStream>(
        shell_, *request,
        gate_.Open(*context, "ExternalScaler.StreamIsActive", SlotKind::kWatcher));
    stream->Begin("");
    return stream.get();
  }
  grpc::ServerUnaryReactor* GetMetricSpec(grpc::CallbackServerContext* context,
                                          const keda::ScaledObjectRef* request,
                                          keda::GetMetricSpecResponse* response) override {
    return Answer(context, "ExternalScaler.GetMetricSpec", *request, [response](int) {
      keda::MetricSpec& metric = *response->add_metricspecs();
      metric.set_metricname(kMetric);
      metric.set_targetsize(1);
      metric.set_targetsizefloat(1);
    });
  }
  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext* context,
                                       const keda::GetMetricsRequest* request,
                                       keda::GetMetricsResponse* response) override {
    return Answer(context, "ExternalScaler.GetMetrics", request->scaledobjectref(),
                  [response](int wanted) {
                    keda::MetricValue& metric = *response->add_metricvalues();
                    metric.set_metricname(kMetric);
                    metric.set_metricvalue(wanted);
                    metric.set_metricvaluefloat(wanted);
                  });
  }

 private:
  template <typename Fill>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const char* method,
                                   const keda::ScaledObjectRef& object, Fill fill) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, method);
    if (!caller.ok()) {
      reactor->Finish(ToGrpc(caller.status()));
      return reactor;
    }
    const absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) {
      reactor->Finish(ToGrpc(slot.status()));
      return reactor;
    }
    const absl::StatusOr<int> wanted = Wanted(shell_, object);
    if (wanted.ok()) fill(*wanted);
    reactor->Finish(ToGrpc(wanted.status()));
    return reactor;
  }

  Shell& shell_;
  Gate& gate_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeExternalScaler(Shell& shell, Gate& gate) {
  return std::make_unique<Service>(shell, gate);
}

}  // namespace muster::coordinator
