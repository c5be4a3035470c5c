#include "parallel/train/gather.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/status_macros.h"
#include "kernels/ops.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

absl::StatusOr<std::vector<std::string>> GatherText(Communicator& communicator,
                                                    kernels::Device& device,
                                                    kernels::Stream& stream,
                                                    const std::string& text) {
  const int64_t size = communicator.size();
  const int64_t rank = communicator.rank();
  if (size == 1) return std::vector<std::string>{text};

  ASSIGN_OR_RETURN(auto host_lengths, device.AllocateHost(size * sizeof(int64_t)));
  ASSIGN_OR_RETURN(auto lengths, device.Allocate(size * sizeof(int64_t)));
  auto* length = static_cast<int64_t*>(host_lengths->data());
  std::fill(length, length + size, 0);
  length[rank] = static_cast<int64_t>(text.size());
  const Tensor host_view(host_lengths->data(), DType::kI64, {size});
  const Tensor view(lengths->data(), DType::kI64, {size});
  kernels::Copy(stream, host_view, view);
  communicator.AllGather(stream, view);
  kernels::Copy(stream, view, host_view);
  RETURN_IF_ERROR(stream.Synchronize());

  const int64_t longest = std::max<int64_t>(1, *std::max_element(length, length + size));
  ASSIGN_OR_RETURN(auto host_bytes, device.AllocateHost(size * longest));
  ASSIGN_OR_RETURN(auto bytes, device.Allocate(size * longest));
  char* data = static_cast<char*>(host_bytes->data());
  std::memset(data, 0, size * longest);
  std::memcpy(data + rank * longest, text.data(), text.size());
  const Tensor host_texts(host_bytes->data(), DType::kU8, {size * longest});
  const Tensor texts(bytes->data(), DType::kU8, {size * longest});
  kernels::Copy(stream, host_texts, texts);
  communicator.AllGather(stream, texts);
  kernels::Copy(stream, texts, host_texts);
  RETURN_IF_ERROR(stream.Synchronize());

  std::vector<std::string> result;
  for (int64_t i = 0; i < size; ++i) result.emplace_back(data + i * longest, length[i]);
  return result;
}

}  // namespace muster::parallel
