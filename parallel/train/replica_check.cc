#include "parallel/train/replica_check.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr int kNamedMax = 3;  // tensors that a message names

// Checksums slices of flat storage, as lines "kind of name[box],...=checksum".
class Checksums {
 public:
  Checksums(kernels::Device& device, kernels::Stream& stream) : device_(device), stream_(stream) {}

  // `read` enqueues a copy of the flat storage of `range`, of type `dtype`, to host memory.
  absl::Status Add(const std::string& kind, DType dtype, const FlatRange& range,
                   absl::FunctionRef<void(const Tensor& to)> read,
                   const std::vector<FlatSlice>& slices, const ParameterRegistry& parameters) {
    const int64_t size = SizeOf(dtype);
    if (memory_ == nullptr || memory_->bytes() < range.size() * size) {
      memory_.reset();
      ASSIGN_OR_RETURN(memory_, device_.AllocateHost(range.size() * size));
    }
    read(Tensor(memory_->data(), dtype, {range.size()}));
    RETURN_IF_ERROR(stream_.Synchronize());
    for (const FlatSlice& slice : slices) {
      const Parameter& parameter = parameters.at(slice.parameter);
      const char* data =
          static_cast<const char*>(memory_->data()) + (slice.flat - range.begin) * size;
      const std::vector<Box> boxes = parameter.Boxes(slice.first, slice.first + slice.count);
      absl::StrAppend(&text_, kind, " of ", parameter.name,
                      absl::StrJoin(boxes, ",",
                                    [](std::string* out, const Box& box) {
                                      absl::StrAppend(out, box.ToString());
                                    }),
                      "=", CrcText(Crc32c(absl::string_view(data, slice.count * size))), "\n");
    }
    return absl::OkStatus();
  }
  const std::string& text() const { return text_; }

 private:
  kernels::Device& device_;
  kernels::Stream& stream_;
  std::unique_ptr<kernels::Buffer> memory_;
  std::string text_;
};

// One text for every name that has several checksums. `texts` by rank; `compared` counts the names
// that several ranks have.
std::vector<std::string> Differences(const std::vector<std::string>& texts, int64_t* compared) {
  std::map<std::string, std::map<std::string, std::vector<int>>> holders;  // by name, checksum
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    for (const absl::string_view line : absl::StrSplit(texts[rank], '\n', absl::SkipEmpty())) {
      const std::pair<std::string, std::string> entry = absl::StrSplit(line, '=');
      holders[entry.first][entry.second].push_back(static_cast<int>(rank));
    }
  }
  std::vector<std::string> differences;
  *compared = 0;
  for (const auto& [name, checksums] : holders) {
    size_t ranks = 0;
    for (const auto& [checksum, of] : checksums) ranks += of.size();
    *compared += ranks > 1 ? 1 : 0;
    if (checksums.size() == 1) continue;
    differences.push_back(absl::StrCat(
        name, " is ", absl::StrJoin(checksums, ", ", [](std::string* out, const auto& entry) {
          absl::StrAppend(out, entry.first, " on rank ", absl::StrJoin(entry.second, " "));
        })));
  }
  return differences;
}

}  // namespace

absl::Status CheckReplicas(const TrainerInputs& inputs, RankMemory& memory, ModelRunner& runner,
                           int64_t step) {
  kernels::Stream& compute = memory.compute();
  const FlatLayout& layout = memory.layout();
  FlatBuffers& flat = memory.flat();
  Checksums checksums(inputs.device, compute);
  const ParameterRegistry& parameters = inputs.model.parameters();
  const auto add = [&](const char* kind, DType dtype, const FlatRange& range,
                       absl::FunctionRef<void(const Tensor&)> read) {
    return Mark(checksums.Add(kind, dtype, range, read, layout.Slices(range), parameters),
                FailureDomain::kMemory);
  };
  const auto add_tensor = [&](const char* kind, const Tensor& from, const FlatRange& range) {
    return add(kind, from.dtype(), range,
               [&](const Tensor& to) { kernels::Copy(compute, from, to); });
  };
  for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
    const FlatRange own = layout.Part(i, inputs.groups.shard().rank());
    if (!flat.parameters_rotate(i)) {
      // Gathers that are under way write what the model computes with.
      runner.gatherer().Await(i);
      RETURN_IF_ERROR(add_tensor("parameter", flat.whole_parameters(i), layout.buckets()[i].range));
    }
    const bool apart =
        flat.parameters_rotate(i) || flat.offloaded(i) || flat.options().compute != DType::kF32;
    if (apart) {
      RETURN_IF_ERROR(add("master weight", DType::kF32, own,
                          [&](const Tensor& to) { flat.ReadMaster(compute, i, 0, to); }));
    }
    RETURN_IF_ERROR(add_tensor("first moment", flat.m(i), own));
    RETURN_IF_ERROR(add_tensor("second moment", flat.v(i), own));
  }
  absl::StatusOr<std::vector<std::string>> texts =
      GatherTexts(inputs.world(), compute, checksums.text());
  if (!texts.ok()) return Mark(texts.status(), FailureDomain::kCommunication);
  int64_t compared = 0;
  std::vector<std::string> differences = Differences(*texts, &compared);
  if (differences.empty()) return absl::OkStatus();
  const size_t found = differences.size();
  if (found > kNamedMax) differences.resize(kNamedMax);
  return Mark(absl::DataLossError(absl::StrCat(
                  "step ", step, ": ", found, " of ", compared,
                  " tensors that several ranks hold differ between them: ",
                  absl::StrJoin(differences, "; "), found > kNamedMax ? "; ..." : "",
                  ". A rank that differs alone has a faulty device or link, or our code a bug; "
                  "earlier checkpoints may be sound")),
              FailureDomain::kDevice);
}

}  // namespace muster::parallel
