// Memory of a step, planned once: nothing is allocated while training.
#ifndef MUSTER_KERNELS_ARENA_H_
#define MUSTER_KERNELS_ARENA_H_

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// The same code runs twice. While planning, Take() hands out addresses in an imaginary buffer and
// adds up their sizes; after Commit() the same sequence of Take() calls gives views of one real
// buffer. Marks make a stack of it, so that the scratch memory of backward reuses what forward has
// released. `muster plan` shows the sizes per category. Views taken while planning must not be read
// or written, so no op runs then. Single-threaded.
class Arena {
 public:
  // 256-byte aligned. `category` e.g. "activations", "scratch", "logits".
  Tensor Take(absl::string_view category, DType dtype, std::initializer_list<int64_t> shape);

  int64_t Mark() const { return offset_; }
  // Everything taken since `mark` may be handed out again.
  void ReleaseTo(int64_t mark);

  // Bytes of every allocation (the result of one Take()) while planning, in order.
  const std::vector<int64_t>& allocations() const { return allocations_; }
  // Restarts planning: the n-th allocation from here on has at least `bytes[n]`. Given the maximum
  // over the arenas of several ranks, all of them hand out the same offsets. The sequence is then
  // taken once after Commit(). Requires: planning.
  void PadTo(std::vector<int64_t> bytes);

  // Allocates the peak; restarts the sequence. kResourceExhausted from the device.
  absl::Status Commit(Device& device);
  bool planning() const { return buffer_ == nullptr; }
  // The whole buffer, as bytes; empty while planning.
  Tensor memory() const;
  // A hash of the offset, size, dtype and category of every allocation since Commit(): arenas with
  // equal hashes hand out the same offsets.
  uint64_t layout() const { return layout_; }
  int64_t peak_bytes() const { return peak_; }
  // The largest number of bytes live at once, per category. Their sum is at least peak_bytes().
  const std::map<std::string, int64_t>& bytes_by_category() const { return by_category_; }
  // The bytes live when the peak was reached, per category. Their sum is peak_bytes().
  const std::map<std::string, int64_t>& peak_by_category() const { return peak_by_category_; }

 private:
  struct Taken {
    int64_t begin;
    int64_t bytes;
    std::string category;
  };

  int64_t offset_ = 0;
  size_t taking_ = 0;  // number of the next allocation
  std::vector<int64_t> allocations_, at_least_;
  uint64_t layout_ = 0;
  int64_t peak_ = 0;
  std::map<std::string, int64_t> by_category_, peak_by_category_;
  std::vector<Taken> taken_;  // planning only, a stack
  std::map<std::string, int64_t> live_by_category_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ARENA_H_
