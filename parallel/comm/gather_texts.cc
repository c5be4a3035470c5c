#include "parallel/comm/gather_texts.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::parallel {
namespace {

// All-gathers host memory; on a GPU's stream it is copied to the device and back.
absl::Status Gather(Communicator& communicator, kernels::Stream& stream,
                    const kernels::Tensor& host) {
  if (stream.device().kind() == kernels::DeviceKind::kCpu) {
    communicator.AllGather(stream, host);
    return stream.Synchronize();
  }
  ASSIGN_OR_RETURN(auto buffer, stream.device().Allocate(host.bytes()));
  const kernels::Tensor there(buffer->data(), host.dtype(), {host.elements()});
  kernels::Copy(stream, host, there);
  communicator.AllGather(stream, there);
  kernels::Copy(stream, there, host);
  return stream.Synchronize();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& communicator,
                                                     kernels::Stream& stream,
                                                     const std::string& text) {
  const int64_t size = communicator.size();
  std::vector<int64_t> lengths(static_cast<size_t>(size));
  lengths[static_cast<size_t>(communicator.rank())] = static_cast<int64_t>(text.size());
  RETURN_IF_ERROR(
      Gather(communicator, stream, kernels::Tensor(lengths.data(), kernels::DType::kI64, {size})));

  const int64_t longest = std::max<int64_t>(1, *std::max_element(lengths.begin(), lengths.end()));
  std::string all(static_cast<size_t>(size * longest), '\0');
  all.replace(static_cast<size_t>(communicator.rank() * longest), text.size(), text);
  RETURN_IF_ERROR(Gather(communicator, stream,
                         kernels::Tensor(all.data(), kernels::DType::kU8, {size * longest})));

  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < size; ++rank) {
    texts.push_back(all.substr(static_cast<size_t>(rank * longest),
                               static_cast<size_t>(lengths[static_cast<size_t>(rank)])));
  }
  return texts;
}

absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& communicator,
                                                     const std::string& text) {
  const std::unique_ptr<kernels::Device> host = kernels::MakeCpuDevice(1);
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, host->MakeStream());
  return GatherTexts(communicator, *stream, text);
}

absl::Status AgreeOnStatus(Communicator& communicator, const absl::Status& mine) {
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   GatherTexts(communicator, mine.ok() ? "" : std::string(mine.message())));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    return absl::UnavailableError(
        absl::StrCat("rank ", rank, " of ", communicator.name(), ": ", texts[rank]));
  }
  return absl::OkStatus();
}

}  // namespace muster::parallel
