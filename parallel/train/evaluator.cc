#include "parallel/train/evaluator.h"

#include <algorithm>
#include <chrono>

#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/train/failure.h"

namespace muster::parallel {
namespace {

constexpr std::chrono::seconds kReportInterval(1);

using kernels::DType;
using kernels::Tensor;

// One micro-batch in host memory, i32 [micro_batch x sequence_length] each.
struct Batch {
  explicit Batch(int64_t size) : tokens(size, 0), targets(size, -1), documents(size, 0) {}

  static Tensor AsTensor(std::vector<int32_t>& values) {
    return Tensor(values.data(), DType::kI32, {static_cast<int64_t>(values.size())});
  }

  std::vector<int32_t> tokens, targets, documents;
};

// Adds in the order of the micro-batches, in double, so that every rank and every number of ranks
// gets the same bits.
double Total(const float* values, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += values[i];
  return total;
}

}  // namespace

// Feeds one batch to the executor, without gradients.
class Evaluator::Client : public MicroBatchClient {
 public:
  // `loss`: where the sum of the losses goes; empty: another rank reports it.
  Client(Evaluator& evaluator, Batch& batch, const Tensor& loss)
      : evaluator_(evaluator), batch_(batch), loss_(loss) {}

  absl::Status Load(int, const ModelBatch& batch) override {
    evaluator_.runner_.CopyTokens(Batch::AsTensor(batch_.tokens), batch.tokens);
    evaluator_.runner_.CopyTokens(Batch::AsTensor(batch_.targets), batch.targets);
    if (!batch.documents.empty()) {
      kernels::Copy(evaluator_.memory_.compute(), Batch::AsTensor(batch_.documents),
                    batch.documents);
    }
    return absl::OkStatus();
  }
  void OnLosses(int, const kernels::Tensor& losses) override {
    if (loss_.empty()) return;
    kernels::Sum(evaluator_.memory_.compute(), losses, loss_, /*accumulate=*/false);
  }
  const ParameterViews& BeginGradients(int, int) override {
    CHECK(false) << "an evaluation has no gradients";
    return evaluator_.memory_.flat().gradient_views(0);
  }
  void EndGradients(int, int) override {}

 private:
  Evaluator& evaluator_;
  Batch& batch_;
  const Tensor loss_;
};

absl::Status Evaluator::Evaluate(int64_t step) {
  if (inputs_.validation == nullptr || evaluated_step_ == step) return absl::OkStatus();
  inputs_.hooks.OnPhase("evaluating");
  const auto start = std::chrono::steady_clock::now();
  int64_t samples = inputs_.validation->samples_per_epoch();
  if (const int64_t limit = inputs_.options.evaluate_samples; limit > 0) {
    samples = std::min(samples, limit);
  }
  EvaluationReport report;
  report.step = step;
  ASSIGN_OR_RETURN(report.loss, Loss(samples, &report.tokens));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  evaluated_step_ = step;
  inputs_.hooks.OnEvaluation(report);
  return absl::OkStatus();
}

absl::StatusOr<double> Evaluator::Loss(int64_t samples, int64_t* tokens) {
  const int64_t micro_batch = inputs_.options.micro_batch;
  const int64_t slots = (samples + micro_batch - 1) / micro_batch;
  kernels::Stream& compute = memory_.compute();
  // Losses by slot, behind them counts of tokens.
  kernels::Zero(compute, memory_.values(0, 2 * slots));
  const int64_t ranks = inputs_.data_size();
  const int64_t rounds = (slots + ranks - 1) / ranks;
  auto reported = std::chrono::steady_clock::now();
  for (int64_t round = 0; round < rounds; ++round) {
    // An evaluation may take longer than the time without progress after which a rank hangs.
    if (const auto now = std::chrono::steady_clock::now(); now - reported > kReportInterval) {
      reported = now;
      inputs_.hooks.OnProgress("evaluating",
                               static_cast<double>(round) / static_cast<double>(rounds));
    }
    const int64_t slot = round * ranks + inputs_.data_rank();
    // With ZeRO-3 forward is a collective: ranks without a batch of their own run an empty one.
    if (slot >= slots && inputs_.options.zero < 3) continue;
    std::vector<int64_t> indices;
    const int64_t end = std::min(samples, (slot + 1) * micro_batch);
    for (int64_t i = slot * micro_batch; i < end; ++i) indices.push_back(i);
    RETURN_IF_ERROR(RunBatch(indices, slot, slots));
  }
  if (inputs_.world().size() > 1) {
    inputs_.world().AllReduce(compute, memory_.values(0, 2 * slots), ReduceOp::kSum);
  }
  kernels::Copy(compute, memory_.values(0, 2 * slots), memory_.host_values(0, 2 * slots));
  for (kernels::Stream* stream : runner_.streams()) {
    RETURN_IF_ERROR(Mark(stream->Synchronize(), FailureDomain::kCommunication));
  }
  const double counted = Total(memory_.host_values() + slots, slots);
  *tokens = static_cast<int64_t>(counted);
  return Total(memory_.host_values(), slots) / std::max(1.0, counted);
}

absl::Status Evaluator::RunBatch(const std::vector<int64_t>& samples, int64_t slot, int64_t slots) {
  const int64_t sequence = inputs_.validation->sequence_length();
  // The last micro-batch is filled up with masked samples.
  Batch batch(inputs_.options.micro_batch * sequence);
  if (const int64_t real = static_cast<int64_t>(samples.size()) * sequence; real > 0) {
    RETURN_IF_ERROR(
        Mark(inputs_.validation->Fill(samples, absl::MakeSpan(batch.tokens.data(), real),
                                      absl::MakeSpan(batch.targets.data(), real)),
             FailureDomain::kData));
    inputs_.validation->Documents(samples, absl::MakeSpan(batch.documents.data(), real));
  }
  kernels::Stream& compute = memory_.compute();
  const bool reports = slot < slots && inputs_.reports_loss();
  Client client(*this, batch, reports ? memory_.values(slot, 1) : Tensor());
  Pass pass = runner_.MakePass(/*trace=*/nullptr);
  pass.head = HeadMode::kLoss;
  RETURN_IF_ERROR(runner_.executor().RunForward(pass, 1, client));
  if (reports && inputs_.context_rank() == 0) {
    memory_.host_values()[slots + slot] = static_cast<float>(std::count_if(
        batch.targets.begin(), batch.targets.end(), [](int32_t target) { return target >= 0; }));
    kernels::Copy(compute, memory_.host_values(slots + slot, 1), memory_.values(slots + slot, 1));
  }
  // The batch is destroyed with this function.
  return compute.Synchronize();
}

}  // namespace muster::parallel
