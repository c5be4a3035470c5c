#include "parallel/train/training_step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/device/range.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/train/failure.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

// Micro-batches from the loader; losses and token counts to the numbers of the step; gradients to
// the reduction.
class TrainingStep::Client : public MicroBatchClient, public GradientListener {
 public:
  Client(TrainingStep& step, Flight& flight)
      : step_(step), inputs_(step.inputs_), memory_(step.memory_), flight_(flight) {}

  absl::Status Load(int micro_batch, const ModelBatch& to) override {
    kernels::Stream& compute = memory_.compute();
    const kernels::Range waiting(compute, "wait for data", step_.trace_);
    absl::StatusOr<MicroBatch> batch = step_.loader_->Next();
    if (!batch.ok()) return Mark(batch.status(), FailureDomain::kData);
    step_.runner_.CopyTokens(batch->tokens, to.tokens);
    step_.runner_.CopyTokens(batch->targets, to.targets);
    if (!to.documents.empty()) kernels::Copy(compute, batch->documents, to.documents);
    if (!to.sample.empty()) kernels::Copy(compute, batch->sample, to.sample);
    // The ranks of a context group have losses of their own, but count the same tokens.
    if (inputs_.reports_loss() && inputs_.context_rank() == 0) {
      kernels::Copy(compute, batch->unmasked,
                    memory_.values(inputs_.global_micro_batches() + Slot(micro_batch), 1));
    }
    step_.loader_->Release(*batch, compute);
    return absl::OkStatus();
  }
  void OnLosses(int micro_batch, const kernels::Tensor& losses) override {
    if (!inputs_.reports_loss()) return;
    kernels::Sum(memory_.compute(), losses, memory_.values(Slot(micro_batch), 1),
                 /*accumulate=*/false);
  }
  const ParameterViews& BeginGradients(int group, int) override {
    return step_.gradients_.BeginMicroBatch(group);
  }
  void EndGradients(int group, int micro_batch) override {
    // Before the call: without overlap the reduction runs inside it.
    if (micro_batch + 1 == inputs_.micro_batches()) memory_.compute().Record(*flight_.reducing);
    step_.gradients_.EndMicroBatch(group);
  }
  void GradientReady(ParameterId parameter) override { step_.gradients_.GradientReady(parameter); }

 private:
  // Of the micro-batch among those of the global batch.
  int64_t Slot(int micro_batch) const {
    return GradientReducer::MicroBatchOf(micro_batch, inputs_.micro_batches(), inputs_.data_rank(),
                                         inputs_.ranks_summed_first());
  }

  TrainingStep& step_;
  const TrainerInputs& inputs_;
  RankMemory& memory_;
  Flight& flight_;
};

bool TrainingStep::Records(const TrainerInputs& inputs, RankMemory& memory) {
  // On one rank a step is the same kernels on the same memory every time, but for these options:
  // the buffers of ZeRO 2 and 3 rotate, a pass waits for offloaded buckets, and how much of a
  // compressed gradient is sent differs by step.
  return inputs.options.record && inputs.device.kind() == kernels::DeviceKind::kCuda &&
         inputs.world().size() == 1 && inputs.options.zero < 2 &&
         memory.flat().options().host_buckets == 0 &&
         inputs.options.compression.method == CompressionMethod::kNone;
}

absl::StatusOr<std::unique_ptr<TrainingStep>> TrainingStep::Make(const TrainerInputs& inputs,
                                                                 RankMemory& memory,
                                                                 MeteredGroups& groups,
                                                                 GradientReduction& gradients,
                                                                 ModelRunner& runner) {
  std::unique_ptr<TrainingStep> step(new TrainingStep(inputs, memory, groups, gradients, runner));
  RETURN_IF_ERROR(step->Allocate());
  return step;
}

absl::Status TrainingStep::Allocate() {
  const TrainerOptions& options = inputs_.options;
  kernels::Device& device = inputs_.device;
  OptimizerOptions optimizing;
  optimizing.adamw = options.optimizer;
  optimizing.schedule = options.schedule;
  if (options.precision == Precision::kFp16) optimizing.loss_scaling = options.loss_scaling;
  optimizing.norm.counted = [this](const Parameter& parameter) { return inputs_.Owns(parameter); };
  optimizing.norm.with_gemms = SumsInGemms(inputs_.place(), device.kind());
  ASSIGN_OR_RETURN(optimizer_,
                   Optimizer::Make(memory_.flat(), device, memory_.compute(), optimizing));
  if (memory_.flat().options().host_buckets > 0) {
    ASSIGN_OR_RETURN(offload_, OptimizerOffload::Make(memory_.flat(), *optimizer_, device,
                                                      std::max(1, options.host_threads)));
  }
  if (Records(inputs_, memory_)) replay_ = std::make_unique<kernels::Replay>(memory_.compute());

  const int64_t stride = StepOutcomeBytes();
  ASSIGN_OR_RETURN(flight_memory_, device.AllocateHost(stride * steps_under_way()));
  char* memory = static_cast<char*>(flight_memory_->data());
  for (Flight& flight : flights_) {
    flight.outcome = reinterpret_cast<kernels::StepOutcome*>(memory);
    flight.stop = reinterpret_cast<float*>(memory + sizeof(kernels::StepOutcome));
    flight.residual_square = flight.stop + 1;
    memory += stride;
    ASSIGN_OR_RETURN(flight.done, device.MakeEvent());
    for (auto* event : {&flight.reducing, &flight.reduced}) {
      ASSIGN_OR_RETURN(*event, device.MakeEvent(/*timing=*/true));
    }
  }
  return absl::OkStatus();
}

void TrainingStep::SetPosition(const TrainingPosition& position) {
  position_ = position;
  enqueued_ = position.step;
}

absl::Status TrainingStep::Start() {
  BatchLoaderOptions loading;
  loading.global_batch = inputs_.options.global_batch;
  loading.micro_batch = inputs_.options.micro_batch;
  loading.rank = inputs_.data_rank();
  loading.ranks = inputs_.data_size();
  loading.ranks_summed_first = inputs_.ranks_summed_first();
  loading.documents = inputs_.model.shape().documents;
  loading.first_sample = position_.consumed_samples;
  auto loader = BatchLoader::Start(inputs_.training, inputs_.device, loading);
  if (!loader.ok()) return Mark(loader.status(), FailureDomain::kMemory);
  loader_ = *std::move(loader);
  gradient_bytes_ = gradients_.bytes_sent();
  return absl::OkStatus();
}

absl::Status TrainingStep::Enqueue() {
  trace_ = inputs_.hooks.BeginStep(enqueued_ + 1);
  kernels::Stream& compute = memory_.compute();
  const kernels::Range range(compute, absl::StrCat("step ", enqueued_ + 1), trace_);
  if (enqueued_ == position_.step) collected_at_ = std::chrono::steady_clock::now();
  const auto slot = static_cast<int>(enqueued_ % steps_under_way());
  Flight& flight = flights_[slot];
  flight.outcome->tokens = -1;  // until the device has written it
  groups_.meter.BeginStep(slot);
  kernels::Zero(compute, memory_.values(0, StepValues(inputs_.place())));
  RETURN_IF_ERROR(RunMicroBatches(flight));
  const bool carries = gradients_.carries();
  gradients_.AddCarried();
  if (offload_ != nullptr) {
    offload_->FetchGradients(
        compute, [&](int bucket) { return carries ? nullptr : gradients_.reduced(bucket); });
  }
  ExchangeNumbers(flight);
  groups_.meter.EndStep();
  optimizer_->Prepare(
      compute, memory_.values(0, StepValues(inputs_.place())), inputs_.global_micro_batches(),
      inputs_.world().size(),
      static_cast<double>(inputs_.options.global_batch * inputs_.training.sequence_length()));
  optimizer_->CopyOutcome(compute, flight.outcome);
  compute.Record(*flight.done);
  Update();
  ++enqueued_;
  trace_ = nullptr;  // the trace ends with this step; an evaluation is not part of it
  return absl::OkStatus();
}

absl::Status TrainingStep::RunMicroBatches(Flight& flight) {
  gradients_.BeginStep(enqueued_ + 1);
  Client client(*this, flight);
  Pass pass = runner_.MakePass(trace_);
  // The real number of unmasked tokens is known only after the exchange; see PrepareStep.
  pass.loss_scale =
      1.0f / static_cast<float>(inputs_.options.global_batch * inputs_.training.sequence_length());
  pass.dynamic_loss_scale = optimizer_->loss_scale();
  pass.overwrite_gradients = gradients_.overwrites();
  pass.squares = optimizer_->squares();
  pass.dropout_seed = inputs_.options.seed;
  pass.listener = &client;
  // The loader's errors are marked already; the others come from exchanges between stages.
  RETURN_IF_ERROR(Mark(runner_.executor().RunStep(pass, client), FailureDomain::kCommunication));
  const kernels::Range reducing(memory_.compute(), "finish the gradients", trace_);
  gradients_.Finish();
  memory_.compute().Record(*flight.reduced);
  flight.density = gradients_.density();
  return absl::OkStatus();
}

// Losses are in their slots already, behind them the counts of tokens; then come the stop vote and
// a square sum of every rank.
void TrainingStep::ExchangeNumbers(Flight& flight) {
  kernels::Stream& compute = memory_.compute();
  Communicator& world = inputs_.world();
  const int64_t losses_and_counts = 2 * inputs_.global_micro_batches();
  if (gradients_.compressor() != nullptr) gradients_.CopyResidualSquare(flight.residual_square);
  *flight.stop = inputs_.hooks.StopRequested() ? 1.0f : 0.0f;
  kernels::Copy(compute, Tensor(flight.stop, DType::kF32, {1}),
                memory_.values(losses_and_counts, 1));
  // Replicas have the same gradients, so one of them counts.
  if (inputs_.groups.replicate().rank() == 0) {
    optimizer_->SumSquares(compute, memory_.values(losses_and_counts + 1 + 2 * world.rank(), 2));
  }
  if (world.size() > 1) {
    groups_.world->AllReduce(compute, memory_.values(0, StepValues(inputs_.place())),
                             ReduceOp::kSum);
  }
}

void TrainingStep::Update() {
  kernels::Stream& compute = memory_.compute();
  const kernels::Range update(compute, "update", trace_);
  ParameterGatherer& gatherer = runner_.gatherer();
  if (offload_ != nullptr) offload_->Update(compute);
  if (replay_ == nullptr) {
    optimizer_->Update(compute, [&](int bucket) { gatherer.Updated(bucket); });
  } else {
    replay_->Run({}, [this, &compute] { optimizer_->Update(compute, [](int) {}); });
    gatherer.AllUpdated();
  }
  for (int bucket = memory_.flat().options().host_buckets - 1; bucket >= 0; --bucket) {
    gatherer.UpdatedBy(offload_->written(bucket), bucket);
  }
}

void TrainingStep::JoinOffload() {
  if (offload_ != nullptr) offload_->Join(memory_.compute());
}

absl::Status TrainingStep::CheckStreams() const {
  RETURN_IF_ERROR(Mark(runner_.executor().status(), FailureDomain::kCommunication));
  if (offload_ != nullptr) RETURN_IF_ERROR(Mark(offload_->status(), FailureDomain::kDevice));
  for (kernels::Stream* stream : runner_.streams()) {
    // Behind a failed collective there is nothing to be read.
    if (!stream->status().ok()) {
      return Mark(stream->Synchronize(), FailureDomain::kCommunication);
    }
  }
  return absl::OkStatus();
}

absl::Status TrainingStep::CheckOutcome(const kernels::StepOutcome& outcome) const {
  const TrainerOptions& options = inputs_.options;
  const int64_t step = position_.step + 1, first = position_.consumed_samples;
  if (outcome.tokens < 0) {
    absl::Status status = memory_.compute().Synchronize();
    if (status.ok()) status = absl::InternalError("the device has not run the step");
    return Mark(std::move(status), FailureDomain::kDevice);
  }
  if (outcome.tokens == 0) {
    return Mark(
        absl::DataLossError(absl::StrFormat(
            "step %d (samples from %d): every token of the global batch is masked", step, first)),
        FailureDomain::kData);
  }
  const bool scaling = options.precision == Precision::kFp16 && options.loss_scaling.dynamic;
  if (outcome.skipped != 0 && !(scaling && outcome.loss_scale > options.loss_scaling.minimum)) {
    return Mark(
        absl::OutOfRangeError(absl::StrFormat(
            "step %d (samples %d to %d) on %s: loss %g, gradient norm %g%s; the update was not "
            "applied. Look at the learning rate, at the initial weights, or at the data of these "
            "samples",
            step, first, first + options.global_batch - 1, inputs_.device.name(), outcome.loss,
            outcome.gradient_norm, scaling ? " at the smallest loss scale" : "")),
        FailureDomain::kNumeric);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> TrainingStep::Collect() {
  const Flight& flight = flights_[position_.step % steps_under_way()];
  flight.done->Synchronize();
  RETURN_IF_ERROR(CheckStreams());
  const kernels::StepOutcome outcome = *flight.outcome;
  RETURN_IF_ERROR(CheckOutcome(outcome));
  ++position_.step;
  position_.consumed_samples += inputs_.options.global_batch;
  gradients_.ReleaseCarried();
  inputs_.hooks.OnStep(MakeReport(flight, outcome));
  return outcome.stop == 0;
}

StepReport TrainingStep::MakeReport(const Flight& flight, const kernels::StepOutcome& outcome) {
  StepReport report;
  report.step = position_.step;
  report.loss = outcome.loss;
  report.gradient_norm = outcome.gradient_norm;
  report.learning_rate = outcome.learning_rate;
  const auto now = std::chrono::steady_clock::now();
  report.seconds = std::chrono::duration<double>(now - collected_at_).count();
  collected_at_ = now;
  if (inputs_.world().size() > 1) {
    const auto slot = static_cast<int>((position_.step - 1) % steps_under_way());
    report.exposed = groups_.meter.Seconds(slot);
    report.exposed.at(Exposure::kGradients, gradients_.front().collective()) +=
        flight.reduced->SecondsSince(*flight.reducing);
    report.exposed_communication_seconds = report.exposed.total();
  }
  report.tokens = static_cast<int64_t>(outcome.tokens);
  report.consumed_samples = position_.consumed_samples;
  report.skipped = outcome.skipped != 0;
  report.loss_scale = outcome.loss_scale;
  const int64_t gradient_bytes = gradients_.bytes_sent();
  report.gradient_bytes = gradient_bytes - std::exchange(gradient_bytes_, gradient_bytes);
  if (gradients_.compressor() != nullptr) {
    report.gradient_density = flight.density;
    report.residual_norm = std::sqrt(static_cast<double>(*flight.residual_square));
  }
  return report;
}

}  // namespace muster::parallel
