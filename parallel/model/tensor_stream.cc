#include "parallel/model/tensor_stream.h"

#include <algorithm>

#include "base/check.h"
#include "base/status_macros.h"

namespace muster::parallel {

absl::StatusOr<std::unique_ptr<TensorStream>> TensorStream::Make(kernels::Device& device,
                                                                 int ranks) {
  auto made = std::make_unique<TensorStream>();
  // With priority, its few thread blocks are scheduled before those of a GEMM that is running.
  ASSIGN_OR_RETURN(made->stream_, device.MakeStream({.threaded = true, .high_priority = true}));
  ASSIGN_OR_RETURN(made->ready_, device.MakeEvent());
  made->calls_.resize(ranks + kUnderWay);
  for (Call& call : made->calls_) {
    ASSIGN_OR_RETURN(call.done, device.MakeEvent());
  }
  return made;
}

kernels::Event* TensorStream::Start(kernels::Stream& compute, Collective collective,
                                    absl::FunctionRef<void(kernels::Stream& stream)> work) {
  Follow(compute);
  work(*stream_);
  return Mark(collective);
}

void TensorStream::Follow(kernels::Stream& compute) {
  compute.Record(*ready_);
  stream_->Wait(*ready_);
}

kernels::Event* TensorStream::Mark(Collective collective) {
  Call& call = calls_[next_];
  call.collective = collective;
  next_ = (next_ + 1) % calls_.size();
  stream_->Record(*call.done);
  return call.done.get();
}

void TensorStream::Await(kernels::Stream& compute, kernels::Event& done) {
  if (meter_ != nullptr) {
    const auto call = std::find_if(calls_.begin(), calls_.end(),
                                   [&](const Call& of) { return of.done.get() == &done; });
    CHECK(call != calls_.end()) << "an event of another stream";
    meter_->Begin(Exposure::kTensor, call->collective, compute);
  }
  compute.Wait(done);
  if (meter_ != nullptr) meter_->End(compute);
}

}  // namespace muster::parallel
