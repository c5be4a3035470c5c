#include "parallel/model/tensor_stream.h"

#include "base/status_macros.h"

namespace muster::parallel {

absl::StatusOr<std::unique_ptr<TensorStream>> TensorStream::Make(kernels::Device& device,
                                                                 int ranks) {
  auto made = std::make_unique<TensorStream>();
  // With priority its few thread blocks find room beside those of a product under way.
  ASSIGN_OR_RETURN(made->stream_, device.MakeStream({.threaded = true, .high_priority = true}));
  ASSIGN_OR_RETURN(made->ready_, device.MakeEvent());
  made->done_.resize(ranks + kUnderWay);
  for (std::unique_ptr<kernels::Event>& event : made->done_) {
    ASSIGN_OR_RETURN(event, device.MakeEvent());
  }
  return made;
}

kernels::Event* TensorStream::Start(kernels::Stream& compute,
                                    absl::FunctionRef<void(kernels::Stream& stream)> work) {
  compute.Record(*ready_);
  stream_->Wait(*ready_);
  work(*stream_);
  kernels::Event* const done = done_[next_].get();
  next_ = (next_ + 1) % done_.size();
  stream_->Record(*done);
  return done;
}

void TensorStream::Await(kernels::Stream& compute, kernels::Event& done) {
  if (meter_ != nullptr) meter_->Begin(Exposure::kTensor, compute);
  compute.Wait(done);
  if (meter_ != nullptr) meter_->End(compute);
}

}  // namespace muster::parallel
