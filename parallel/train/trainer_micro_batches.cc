// The part of Trainer that runs the micro-batches of a step, and of an evaluation, through the
// stages of the model.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/device/range.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/train/failure.h"
#include "parallel/train/trainer.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

Tensor Floats(kernels::Buffer& buffer, int64_t first, int64_t count) {
  return Tensor(static_cast<float*>(buffer.data()) + first, DType::kF32, {count});
}

}  // namespace

// Micro-batches from the loader; losses and token counts to values_; gradients to the reducer of
// each group.
class Trainer::StepClient : public MicroBatchClient, public GradientListener {
 public:
  StepClient(Trainer& trainer, Flight& flight) : trainer_(trainer), flight_(flight) {}

  absl::Status Load(int micro_batch, Flow& flow) override {
    const kernels::Range waiting(*trainer_.compute_, "wait for data", trainer_.trace_);
    absl::StatusOr<MicroBatch> batch = trainer_.loader_->Next();
    if (!batch.ok()) return Mark(batch.status(), FailureDomain::kData);
    kernels::Stream& compute = *trainer_.compute_;
    trainer_.CopyTokens(batch->tokens, flow.tokens);
    trainer_.CopyTokens(batch->targets, flow.targets);
    if (!flow.documents.empty()) kernels::Copy(compute, batch->documents, flow.documents);
    if (!flow.sample.empty()) kernels::Copy(compute, batch->sample, flow.sample);
    // Every rank of a context group has losses of its own, and counts the same tokens.
    if (trainer_.reports_loss() && trainer_.groups_.coordinate()[Axis::kContext] == 0) {
      kernels::Copy(
          compute, batch->unmasked,
          Floats(*trainer_.values_, trainer_.global_micro_batches() + Slot(micro_batch), 1));
    }
    trainer_.loader_->Release(*batch, compute);
    return absl::OkStatus();
  }
  void OnLosses(int micro_batch, const Flow& flow) override {
    if (!trainer_.reports_loss()) return;
    kernels::Sum(*trainer_.compute_, flow.losses, Floats(*trainer_.values_, Slot(micro_batch), 1),
                 /*accumulate=*/false);
  }
  const ParameterViews& BeginGradients(int group, int) override {
    return trainer_.reducers_[group]->BeginMicroBatch();
  }
  void EndGradients(int group, int micro_batch) override {
    // Without overlap the reduction runs inside the call.
    if (micro_batch + 1 == trainer_.micro_batches()) {
      trainer_.compute_->Record(*flight_.reducing);
    }
    trainer_.reducers_[group]->EndMicroBatch();
  }
  void GradientReady(ParameterId parameter) override {
    const int block = trainer_.model_.parameters().at(parameter).block;
    const std::vector<BlockRange>& groups = trainer_.gradient_groups_;
    size_t group = 0;
    while (group + 1 < groups.size() && groups[group + 1].begin <= block) ++group;
    trainer_.reducers_[group]->GradientReady(parameter);
  }

 private:
  int64_t Slot(int micro_batch) const {
    return GradientReducer::MicroBatchOf(micro_batch, trainer_.micro_batches(),
                                         trainer_.data_rank(), trainer_.together());
  }

  Trainer& trainer_;
  Flight& flight_;
};

// One batch that is there already, without gradients.
class Trainer::EvaluationClient : public MicroBatchClient {
 public:
  EvaluationClient(Trainer& trainer, std::vector<int32_t>& tokens, std::vector<int32_t>& targets,
                   std::vector<int32_t>& documents, Tensor loss)
      : trainer_(trainer), tokens_(tokens), targets_(targets), documents_(documents), loss_(loss) {}

  absl::Status Load(int, Flow& flow) override {
    const auto size = static_cast<int64_t>(tokens_.size());
    trainer_.CopyTokens(Tensor(tokens_.data(), DType::kI32, {size}), flow.tokens);
    trainer_.CopyTokens(Tensor(targets_.data(), DType::kI32, {size}), flow.targets);
    if (!flow.documents.empty()) {
      kernels::Copy(*trainer_.compute_, Tensor(documents_.data(), DType::kI32, {size}),
                    flow.documents);
    }
    return absl::OkStatus();
  }
  void OnLosses(int, const Flow& flow) override {
    if (!loss_.empty()) {
      kernels::Sum(*trainer_.compute_, flow.losses, loss_, /*accumulate=*/false);
    }
  }
  const ParameterViews& BeginGradients(int, int) override {
    CHECK(false) << "an evaluation has no gradients";
    return trainer_.flat_->gradient_views(0);
  }
  void EndGradients(int, int) override {}

 private:
  Trainer& trainer_;
  std::vector<int32_t>& tokens_;
  std::vector<int32_t>& targets_;
  std::vector<int32_t>& documents_;
  const Tensor loss_;  // empty: nobody asks
};

absl::Status Trainer::MakeReducers() {
  const std::vector<FlatLayout::Bucket>& buckets = layout_.buckets();
  GradientReducerOptions reducing = {.overlap = options_.overlap,
                                     .wire = options_.gradient_wire,
                                     .overwritten = overwrites_gradients(),
                                     .chained = options_.chain_micro_batches,
                                     .sharers = sharers_.get(),
                                     .compressor = compressor_.get(),
                                     .meter = meter_.get()};
  reducers_.resize(gradient_groups_.size());
  // Buckets stand in backward order: the last group has the first ones.
  for (size_t group = reducers_.size(); group-- > 0;) {
    const auto of_earlier_group = [&](const FlatLayout::Bucket& bucket) {
      return model_.parameters().at(bucket.parameters.front()).block <
             gradient_groups_[group].begin;
    };
    reducing.last_bucket = static_cast<int>(
        std::find_if(buckets.begin(), buckets.end(), of_earlier_group) - buckets.begin());
    ASSIGN_OR_RETURN(reducers_[group],
                     GradientReducer::Make(*flat_, groups_, *compute_, *communication_, reducing));
    reducing.first_bucket = reducing.last_bucket;
  }
  return absl::OkStatus();
}

kernels::Event* Trainer::Reduced(int bucket) const {
  if (bucket == shared_bucket_) return nullptr;  // see SumShared
  for (const auto& reducer : reducers_) {
    if (kernels::Event* const reduced = reducer->reduced(bucket); reduced != nullptr) {
      return reduced;
    }
  }
  return nullptr;
}

absl::Status Trainer::AllocateShared() {
  const ParameterRegistry& parameters = model_.parameters();
  for (ParameterId id = 0; id < parameters.size(); ++id) {
    if (!parameters.at(id).on_two_stages) continue;
    CHECK_EQ(shared_bucket_, -1) << "one table is tied";
    shared_bucket_ = layout_.bucket_of(id);
    ASSIGN_OR_RETURN(shared_, device_.Allocate(flat_->own_gradient(shared_bucket_).bytes()));
  }
  return absl::OkStatus();
}

void Trainer::SumShared() {
  if (shared_ == nullptr) return;
  Communicator& pipeline = groups_.Along({Axis::kPipeline});
  const int other = executor_->first_stage() ? pipeline.size() - 1 : 0;
  const Tensor mine = flat_->own_gradient(shared_bucket_);
  const Tensor theirs = Floats(*shared_, 0, mine.elements());
  pipeline.GroupBegin();
  pipeline.Send(*compute_, mine, other);
  pipeline.Receive(*compute_, theirs, other);
  pipeline.GroupEnd(*compute_);
  // A sum of two has the same bits on both sides.
  kernels::Axpy(*compute_, 1.0f, theirs, mine);
}

absl::Status Trainer::AllocatePositions() {
  if (context_size() == 1) return absl::OkStatus();
  std::vector<int32_t> positions = ContextPositions(
      training_.sequence_length(), groups_.coordinate()[Axis::kContext], context_size());
  const auto size = static_cast<int64_t>(positions.size());
  ASSIGN_OR_RETURN(positions_, device_.Allocate(size * static_cast<int64_t>(sizeof(int32_t))));
  kernels::Copy(*compute_, Tensor(positions.data(), DType::kI32, {size}),
                Tensor(positions_->data(), DType::kI32, {size}));
  executor_->SetPositions(Tensor(positions_->data(), DType::kI32, {size}));
  return compute_->Synchronize();
}

void Trainer::CopyTokens(const Tensor& whole, const Tensor& local) {
  if (context_size() == 1) {
    kernels::Copy(*compute_, whole, local);
    return;
  }
  const int64_t ranks = context_size(), rank = groups_.coordinate()[Axis::kContext];
  const int64_t chunk = training_.sequence_length() / (2 * ranks);
  for (int64_t sample = 0; sample < options_.micro_batch; ++sample) {
    for (const int64_t half : {0, 1}) {
      const int64_t index = half == 0 ? rank : 2 * ranks - 1 - rank;
      kernels::Copy(*compute_, whole.Rows((sample * 2 * ranks + index) * chunk, chunk),
                    local.Rows((sample * 2 + half) * chunk, chunk));
    }
  }
}

Pass Trainer::MakePass() {
  Pass pass = {*compute_, flat_->parameter_views()};
  pass.gate = gatherer_.get();
  pass.tensor = metered_tensor_.get();
  pass.tensor_stream = tensor_stream_.get();
  pass.context = metered_context_.get();
  pass.context_overlap = exchange_.get();
  pass.trace = trace_;
  return pass;
}

absl::Status Trainer::RunMicroBatches(Flight& flight) {
  if (compressor_ != nullptr) compressor_->BeginStep(enqueued_ + 1);
  for (const auto& reducer : reducers_) reducer->BeginStep(micro_batches());
  StepClient client(*this, flight);
  Pass pass = MakePass();
  // The real number of unmasked tokens is known only after the exchange; see PrepareStep.
  pass.loss_scale = 1.0f / static_cast<float>(options_.global_batch * training_.sequence_length());
  pass.dynamic_loss_scale = optimizer_->loss_scale();
  pass.overwrite_gradients = overwrites_gradients();
  pass.squares = optimizer_->squares();
  pass.dropout_seed = options_.seed;
  pass.listener = &client;
  absl::Status status = executor_->RunStep(pass, client);
  if (!status.ok()) {
    return DomainOf(status) == FailureDomain::kUnknown
               ? Mark(std::move(status), FailureDomain::kCommunication)
               : status;
  }
  const kernels::Range reducing(*compute_, "finish the gradients", trace_);
  for (const auto& reducer : reducers_) reducer->Finish();
  SumShared();
  compute_->Record(*flight.reduced);
  if (compressor_ != nullptr && compressor_->elements() > 0) {
    flight.density =
        static_cast<double>(compressor_->sent()) / static_cast<double>(compressor_->elements());
  }
  return absl::OkStatus();
}

absl::Status Trainer::EvaluateBatch(const std::vector<int64_t>& samples, int64_t slot,
                                    int64_t batches) {
  const int64_t size = options_.micro_batch * validation_->sequence_length();
  // The last micro-batch is filled up with masked samples.
  const int64_t real = static_cast<int64_t>(samples.size()) * validation_->sequence_length();
  std::vector<int32_t> tokens(size, 0), targets(size, -1), documents(size, 0);
  if (real > 0) {
    RETURN_IF_ERROR(Mark(validation_->Fill(samples, absl::MakeSpan(tokens.data(), real),
                                           absl::MakeSpan(targets.data(), real)),
                         FailureDomain::kData));
    validation_->Documents(samples, absl::MakeSpan(documents.data(), real));
  }
  const bool reports = slot < batches && reports_loss();
  const bool counts = reports && groups_.coordinate()[Axis::kContext] == 0;
  EvaluationClient client(*this, tokens, targets, documents,
                          reports ? Floats(*values_, slot, 1) : Tensor());
  Pass pass = MakePass();
  pass.head = HeadMode::kLoss;
  RETURN_IF_ERROR(executor_->RunForward(pass, 1, client));
  if (counts) {
    float& counted = static_cast<float*>(host_values_->data())[batches + slot];
    counted = static_cast<float>(
        std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; }));
    kernels::Copy(*compute_, Floats(*host_values_, batches + slot, 1),
                  Floats(*values_, batches + slot, 1));
  }
  // The vectors go away.
  return compute_->Synchronize();
}

}  // namespace muster::parallel
