#include "parallel/model/activation_offload.h"

#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

absl::StatusOr<std::unique_ptr<ActivationStreams>> ActivationStreams::Make(
    kernels::Device& device) {
  auto streams = std::make_unique<ActivationStreams>();
  ASSIGN_OR_RETURN(streams->out, device.MakeStream({.threaded = true}));
  ASSIGN_OR_RETURN(streams->in, device.MakeStream({.threaded = true}));
  return streams;
}

absl::StatusOr<std::unique_ptr<ActivationOffload>> ActivationOffload::Make(
    kernels::Device& device, ActivationStreams& streams, const ActivationSlots& slots) {
  std::unique_ptr<ActivationOffload> offload(new ActivationOffload(streams, slots));
  ASSIGN_OR_RETURN(offload->memory_, device.AllocateHost(std::max<int64_t>(1, slots.host_bytes())));
  ASSIGN_OR_RETURN(offload->computed_, device.MakeEvent());
  for (auto* events : {&offload->stored_, &offload->fetched_}) {
    for (std::unique_ptr<kernels::Event>& event : *events) {
      ASSIGN_OR_RETURN(event, device.MakeEvent());
    }
  }
  return offload;
}

Tensor ActivationOffload::Slot(int index) const {
  return slots_.slots.Rows(slots_.slot_offset(index % ActivationSlots::kSlots),
                           slots_.bytes[index]);
}

Tensor ActivationOffload::Home(int index) const {
  return Tensor(static_cast<char*>(memory_->data()) + slots_.host_offset(index), DType::kU8,
                {slots_.bytes[index]});
}

void ActivationOffload::BeforeForward(kernels::Stream& compute, int block) {
  const int index = block - slots_.first;
  if (index >= ActivationSlots::kSlots) compute.Wait(*stored_[index % ActivationSlots::kSlots]);
}

void ActivationOffload::AfterForward(kernels::Stream& compute, int block) {
  const int index = block - slots_.first;
  if (index >= slots_.copied()) return;
  compute.Record(*computed_);
  streams_.out->Wait(*computed_);
  kernels::Copy(*streams_.out, Slot(index), Home(index));
  streams_.out->Record(*stored_[index % ActivationSlots::kSlots]);
}

void ActivationOffload::BeforeBackward(kernels::Stream& compute, int block) {
  const int index = block - slots_.first;
  if (index < slots_.copied()) compute.Wait(*fetched_[index % ActivationSlots::kSlots]);
}

void ActivationOffload::AfterBackward(kernels::Stream& compute, int block) {
  // The copy to the host is complete: a later block's forward has waited for it.
  const int next = block - slots_.first - ActivationSlots::kSlots;
  if (next < 0) return;
  compute.Record(*computed_);
  streams_.in->Wait(*computed_);
  kernels::Copy(*streams_.in, Home(next), Slot(next));
  streams_.in->Record(*fetched_[next % ActivationSlots::kSlots]);
}

}  // namespace muster::parallel
