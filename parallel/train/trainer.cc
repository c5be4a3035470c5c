#include "parallel/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/ops.h"
#include "parallel/train/failure.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

Tensor Floats(kernels::Buffer& buffer, int64_t first, int64_t count) {
  return Tensor(static_cast<float*>(buffer.data()) + first, DType::kF32, {count});
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Losses are added in the order of the micro-batches, in double, so that every rank and every
// number of ranks gets the same bits.
double Total(const float* values, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += values[i];
  return total;
}

}  // namespace

Trainer::Trainer(const TrainerOptions& options, const Model& model, kernels::Device& device,
                 Communicator& communicator, const Sampler& training, const Sampler* validation,
                 FileSystem& files, TrainerHooks& hooks)
    : options_(options),
      model_(model),
      device_(device),
      communicator_(communicator),
      training_(training),
      validation_(validation),
      files_(files),
      hooks_(hooks),
      layout_(model.parameters(), options.bucket_bytes, communicator.size()) {}

Trainer::~Trainer() {
  // Work under way still refers to what is destroyed next. Its errors have been seen by Run().
  if (communication_ != nullptr) communication_->Synchronize().IgnoreError();
  if (compute_ != nullptr) compute_->Synchronize().IgnoreError();
}

int64_t Trainer::global_micro_batches() const {
  return options_.global_batch / options_.micro_batch;
}
int64_t Trainer::micro_batches() const { return global_micro_batches() / communicator_.size(); }

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(const TrainerOptions& options,
                                                       const Model& model, kernels::Device& device,
                                                       Communicator& communicator,
                                                       const Sampler& training,
                                                       const Sampler* validation, FileSystem& files,
                                                       TrainerHooks& hooks) {
  if (options.steps <= 0 || options.micro_batch <= 0 || options.global_batch <= 0 ||
      options.global_batch % (options.micro_batch * communicator.size()) != 0) {
    return Mark(absl::InvalidArgumentError(absl::StrFormat(
                    "global_batch %d must be a positive multiple of micro_batch (%d) x "
                    "data-parallel ranks (%d), and steps (%d) positive",
                    options.global_batch, options.micro_batch, communicator.size(), options.steps)),
                FailureDomain::kConfiguration);
  }
  if (training.sequence_length() > model.shape().sequence_max) {
    return Mark(absl::InvalidArgumentError(
                    absl::StrFormat("samples of %d tokens are longer than the model's context %d",
                                    training.sequence_length(), model.shape().sequence_max)),
                FailureDomain::kConfiguration);
  }
  if (!options.checkpoint_root.empty() &&
      (options.checkpoint_every <= 0 || options.checkpoint_keep <= 0)) {
    return Mark(absl::InvalidArgumentError("checkpoint every_steps and keep must be positive"),
                FailureDomain::kConfiguration);
  }
  std::unique_ptr<Trainer> trainer(
      new Trainer(options, model, device, communicator, training, validation, files, hooks));
  absl::Status status = trainer->Allocate();
  if (!status.ok()) {
    return Mark(std::move(status), status.code() == absl::StatusCode::kResourceExhausted
                                       ? FailureDomain::kMemory
                                       : FailureDomain::kUnknown);
  }
  return trainer;
}

absl::Status Trainer::Allocate() {
  ASSIGN_OR_RETURN(compute_, device_.MakeStream());
  ASSIGN_OR_RETURN(communication_, device_.MakeStream({.threaded = true, .high_priority = true}));
  ASSIGN_OR_RETURN(values_ready_, device_.MakeEvent());
  ASSIGN_OR_RETURN(values_reduced_, device_.MakeEvent());
  ASSIGN_OR_RETURN(flat_,
                   FlatBuffers::Make(device_, *compute_, model_.parameters(), layout_,
                                     GradientReducer::Levels(micro_batches()), options_.seed));
  ASSIGN_OR_RETURN(optimizer_, Optimizer::Make(*flat_, device_, options_.optimizer));
  ASSIGN_OR_RETURN(reducer_, GradientReducer::Make(*flat_, communicator_, *compute_,
                                                   *communication_, options_.overlap));
  const BatchShape shape = {options_.micro_batch, training_.sequence_length()};
  workspace_ = model_.TakeWorkspace(arena_, shape);
  RETURN_IF_ERROR(Annotate(
      arena_.Commit(device_),
      absl::StrFormat("activations of micro_batch %d x %d tokens take %.1f MB", shape.batch,
                      shape.sequence, static_cast<double>(arena_.peak_bytes()) * 1e-6)));
  workspace_ = model_.TakeWorkspace(arena_, shape);

  // Loss and token count of every micro-batch, and the stop vote of a step.
  int64_t slots = 2 * global_micro_batches() + 1;
  if (validation_ != nullptr) {
    const int64_t samples = validation_->samples_per_epoch();
    slots = std::max(slots, 2 * (samples / options_.micro_batch + 1));
  }
  ASSIGN_OR_RETURN(values_, device_.Allocate(slots * static_cast<int64_t>(sizeof(float))));
  ASSIGN_OR_RETURN(host_values_, device_.AllocateHost(slots * static_cast<int64_t>(sizeof(float))));
  return absl::OkStatus();
}

absl::StatusOr<bool> Trainer::Agree(bool ok) {
  auto* value = static_cast<float*>(host_values_->data());
  *value = ok ? 1.0f : 0.0f;
  kernels::Copy(*compute_, Floats(*host_values_, 0, 1), Floats(*values_, 0, 1));
  if (communicator_.size() > 1) {
    communicator_.AllReduce(*compute_, Floats(*values_, 0, 1), ReduceOp::kMin);
  }
  kernels::Copy(*compute_, Floats(*values_, 0, 1), Floats(*host_values_, 0, 1));
  RETURN_IF_ERROR(Mark(compute_->Synchronize(), FailureDomain::kCommunication));
  return *value != 0.0f;
}

absl::Status Trainer::CopyToDevice(const MicroBatch& batch) {
  const int64_t tokens = workspace_.flow.shape.tokens();
  CHECK_EQ(static_cast<int64_t>(batch.tokens.size()), tokens);
  kernels::Copy(*compute_, Tensor(const_cast<int32_t*>(batch.tokens.data()), DType::kI32, {tokens}),
                workspace_.flow.tokens);
  kernels::Copy(*compute_,
                Tensor(const_cast<int32_t*>(batch.targets.data()), DType::kI32, {tokens}),
                workspace_.flow.targets);
  // The batch is the caller's and may go away.
  return compute_->Synchronize();
}

absl::Status Trainer::RunMicroBatches(double* exposed_seconds) {
  const int64_t count = micro_batches();
  const int64_t first = communicator_.rank() * count;
  auto* host_values = static_cast<float*>(host_values_->data());
  const auto nominal_tokens =
      static_cast<float>(options_.global_batch * training_.sequence_length());
  reducer_->BeginStep(count);
  for (int64_t i = 0; i < count; ++i) {
    absl::StatusOr<MicroBatch> batch = loader_->Next();
    if (!batch.ok()) return Mark(batch.status(), FailureDomain::kData);
    RETURN_IF_ERROR(CopyToDevice(*batch));
    const int64_t count_slot = global_micro_batches() + first + i;
    host_values[count_slot] = static_cast<float>(batch->unmasked);
    kernels::Copy(*compute_, Floats(*host_values_, count_slot, 1), Floats(*values_, count_slot, 1));

    Pass pass = {*compute_, flat_->parameter_views()};
    // The real number of unmasked tokens is known only after the exchange; see Step().
    pass.loss_scale = 1.0f / nominal_tokens;
    pass.gradients = &reducer_->BeginMicroBatch();
    pass.listener = reducer_.get();
    model_.Forward(pass, workspace_);
    kernels::Sum(*compute_, workspace_.flow.losses, Floats(*values_, first + i, 1),
                 /*accumulate=*/false);
    model_.Backward(pass, workspace_);
    const Stopwatch waiting;
    reducer_->EndMicroBatch();
    // Without overlap the reduction has run inside the call.
    if (!options_.overlap && i + 1 == count) *exposed_seconds += waiting.seconds();
  }
  reducer_->Finish();
  return absl::OkStatus();
}

absl::Status Trainer::ExchangeStepValues() {
  const int64_t slots = 2 * global_micro_batches() + 1;
  auto* host_values = static_cast<float*>(host_values_->data());
  host_values[slots - 1] = hooks_.StopRequested() ? 1.0f : 0.0f;
  kernels::Copy(*compute_, Floats(*host_values_, slots - 1, 1), Floats(*values_, slots - 1, 1));
  if (communicator_.size() > 1) {
    // On the stream of the bucket reductions: one order of collectives on all ranks.
    compute_->Record(*values_ready_);
    communication_->Wait(*values_ready_);
    communicator_.AllReduce(*communication_, Floats(*values_, 0, slots), ReduceOp::kSum);
    communication_->Record(*values_reduced_);
    compute_->Wait(*values_reduced_);
    RETURN_IF_ERROR(Mark(communication_->Synchronize(), FailureDomain::kCommunication));
  }
  kernels::Copy(*compute_, Floats(*values_, 0, slots), Floats(*host_values_, 0, slots));
  return Mark(compute_->Synchronize(), FailureDomain::kCommunication);
}

absl::StatusOr<bool> Trainer::Step() {
  const Stopwatch watch;
  const int64_t step = step_ + 1;
  const int64_t slots = global_micro_batches();
  double exposed_seconds = 0;
  kernels::Zero(*compute_, Floats(*values_, 0, 2 * slots + 1));
  RETURN_IF_ERROR(RunMicroBatches(&exposed_seconds));
  const Stopwatch waiting;
  RETURN_IF_ERROR(ExchangeStepValues());
  exposed_seconds += communicator_.size() > 1 ? waiting.seconds() : 0;

  const auto* values = static_cast<const float*>(host_values_->data());
  const bool stop = values[2 * slots] != 0;
  const double tokens = Total(values + slots, slots);
  if (tokens == 0) {
    return Mark(absl::DataLossError(absl::StrFormat(
                    "step %d (samples from %d): every token of the global batch is masked", step,
                    consumed_samples_)),
                FailureDomain::kData);
  }
  const double loss = Total(values, slots) / tokens;
  const double nominal_tokens =
      static_cast<double>(options_.global_batch * training_.sequence_length());
  if (tokens != nominal_tokens) {
    kernels::Scale(*compute_, static_cast<float>(nominal_tokens / tokens),
                   flat_->gradient(0, {0, layout_.elements()}));
  }
  optimizer_->ComputeNorm(*compute_);
  RETURN_IF_ERROR(compute_->Synchronize());
  if (!std::isfinite(loss) || !std::isfinite(optimizer_->norm())) {
    return Mark(absl::OutOfRangeError(absl::StrFormat(
                    "step %d (samples %d to %d): loss %g, gradient norm %g; the update was not "
                    "applied. Look at the learning rate, or at the data of these samples",
                    step, consumed_samples_, consumed_samples_ + options_.global_batch - 1, loss,
                    optimizer_->norm())),
                FailureDomain::kNumeric);
  }
  const double learning_rate = LearningRate(options_.schedule, step);
  optimizer_->Update(*compute_, step, learning_rate);
  RETURN_IF_ERROR(compute_->Synchronize());
  step_ = step;
  consumed_samples_ += options_.global_batch;

  StepReport report;
  report.step = step;
  report.loss = loss;
  report.gradient_norm = optimizer_->norm();
  report.learning_rate = learning_rate;
  report.seconds = watch.seconds();
  report.exposed_communication_seconds = exposed_seconds;
  report.tokens = static_cast<int64_t>(tokens);
  report.consumed_samples = consumed_samples_;
  hooks_.OnStep(report);
  return !stop;
}

absl::StatusOr<double> Trainer::EvaluationLoss(int64_t samples, int64_t* tokens) {
  const int64_t sequence = validation_->sequence_length();
  const int64_t batches = (samples + options_.micro_batch - 1) / options_.micro_batch;
  auto* host_values = static_cast<float*>(host_values_->data());
  kernels::Zero(*compute_, Floats(*values_, 0, 2 * batches));
  for (int64_t j = communicator_.rank(); j < batches; j += communicator_.size()) {
    std::vector<int64_t> indices;
    const int64_t end = std::min(samples, (j + 1) * options_.micro_batch);
    for (int64_t i = j * options_.micro_batch; i < end; ++i) indices.push_back(i);
    // The last micro-batch is filled up with masked samples.
    const int64_t real = static_cast<int64_t>(indices.size()) * sequence;
    MicroBatch batch;
    batch.tokens.resize(workspace_.flow.shape.tokens(), 0);
    batch.targets.resize(workspace_.flow.shape.tokens(), -1);
    RETURN_IF_ERROR(Mark(validation_->Fill(indices, absl::MakeSpan(batch.tokens.data(), real),
                                           absl::MakeSpan(batch.targets.data(), real)),
                         FailureDomain::kData));
    RETURN_IF_ERROR(CopyToDevice(batch));
    Pass pass = {*compute_, flat_->parameter_views(), HeadMode::kLoss};
    model_.Forward(pass, workspace_);
    kernels::Sum(*compute_, workspace_.flow.losses, Floats(*values_, j, 1),
                 /*accumulate=*/false);
    host_values[batches + j] = static_cast<float>(std::count_if(
        batch.targets.begin(), batch.targets.end(), [](int32_t t) { return t >= 0; }));
    kernels::Copy(*compute_, Floats(*host_values_, batches + j, 1),
                  Floats(*values_, batches + j, 1));
  }
  if (communicator_.size() > 1) {
    communicator_.AllReduce(*compute_, Floats(*values_, 0, 2 * batches), ReduceOp::kSum);
  }
  kernels::Copy(*compute_, Floats(*values_, 0, 2 * batches), Floats(*host_values_, 0, 2 * batches));
  RETURN_IF_ERROR(Mark(compute_->Synchronize(), FailureDomain::kCommunication));
  const double counted = Total(host_values + batches, batches);
  *tokens = static_cast<int64_t>(counted);
  return Total(host_values, batches) / std::max(1.0, counted);
}

absl::Status Trainer::Evaluate() {
  if (validation_ == nullptr || evaluated_step_ == step_) return absl::OkStatus();
  hooks_.OnPhase("evaluating");
  const Stopwatch watch;
  int64_t samples = validation_->samples_per_epoch();
  if (options_.evaluate_samples > 0) samples = std::min(samples, options_.evaluate_samples);
  EvaluationReport report;
  report.step = step_;
  ASSIGN_OR_RETURN(report.loss, EvaluationLoss(samples, &report.tokens));
  report.seconds = watch.seconds();
  evaluated_step_ = step_;
  hooks_.OnEvaluation(report);
  return absl::OkStatus();
}

absl::StatusOr<Trainer::Outcome> Trainer::Run() {
  BatchLoaderOptions loading;
  loading.global_batch = options_.global_batch;
  loading.micro_batch = options_.micro_batch;
  loading.rank = communicator_.rank();
  loading.ranks = communicator_.size();
  loading.first_sample = consumed_samples_;
  loader_ = std::make_unique<BatchLoader>(training_, loading);
  hooks_.OnPhase("training");
  while (step_ < options_.steps) {
    ASSIGN_OR_RETURN(const bool go_on, Step());
    const bool last = step_ == options_.steps;
    const bool evaluate =
        last || (options_.evaluate_every > 0 && step_ % options_.evaluate_every == 0);
    const bool stop = !go_on && !last;
    const bool save =
        !options_.checkpoint_root.empty() &&
        (last || step_ % options_.checkpoint_every == 0 || (stop && options_.checkpoint_on_stop));
    // Saving first: an evaluation may be long, and the steps should count by then.
    if (save) RETURN_IF_ERROR(Save());
    if (stop) return Outcome::kStopped;
    if (evaluate) RETURN_IF_ERROR(Evaluate());
    Prune();
    if ((save || evaluate) && !last) hooks_.OnPhase("training");
  }
  // A job that was restored at its last step still owes the evaluation.
  RETURN_IF_ERROR(Evaluate());
  hooks_.OnPhase("finished");
  return Outcome::kFinished;
}

}  // namespace muster::parallel
