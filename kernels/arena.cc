#include "kernels/arena.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace muster::kernels {
namespace {

constexpr int64_t kAlignment = 256;
// Views handed out while planning point here: they are not null, so that they are not "empty".
constexpr uintptr_t kPlanningBase = 4096;

// The same result in every process.
uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
  return hash ^ hash >> 29;
}

}  // namespace

Tensor Arena::Take(absl::string_view category, DType dtype, std::initializer_list<int64_t> shape) {
  const int64_t begin = offset_;
  int64_t bytes = (Tensor(nullptr, dtype, shape).elements() * SizeOf(dtype) + kAlignment - 1) /
                  kAlignment * kAlignment;
  if (taking_ < at_least_.size()) bytes = std::max(bytes, at_least_[taking_]);
  ++taking_;
  offset_ += bytes;
  if (planning()) {
    allocations_.push_back(bytes);
    const std::string name(category);
    taken_.push_back({begin, bytes, name});
    int64_t& live = live_by_category_[name];
    live += bytes;
    int64_t& most = by_category_[name];
    most = std::max(most, live);
    if (offset_ > peak_) {
      peak_ = offset_;
      peak_by_category_ = live_by_category_;
    }
    return Tensor(reinterpret_cast<void*>(kPlanningBase + begin), dtype, shape);
  }
  layout_ = Mix(Mix(layout_, static_cast<uint64_t>(begin)), static_cast<uint64_t>(bytes));
  layout_ = Mix(layout_, static_cast<uint64_t>(dtype));
  for (const char c : category) layout_ = Mix(layout_, static_cast<uint64_t>(c));
  CHECK_LE(offset_, peak_) << "the arena was planned for less: " << std::string(category) << " "
                           << Tensor(nullptr, dtype, shape).ToString()
                           << "; planning and running must take the same sequence";
  return Tensor(static_cast<char*>(buffer_->data()) + begin, dtype, shape);
}

void Arena::ReleaseTo(int64_t mark) {
  CHECK(mark >= 0 && mark <= offset_) << "mark " << mark << " of an arena at " << offset_;
  offset_ = mark;
  while (!taken_.empty() && taken_.back().begin >= mark) {
    live_by_category_[taken_.back().category] -= taken_.back().bytes;
    taken_.pop_back();
  }
}

void Arena::PadTo(std::vector<int64_t> bytes) {
  CHECK(planning()) << "the arena is committed already";
  *this = Arena();
  at_least_ = std::move(bytes);
}

absl::Status Arena::Commit(Device& device) {
  CHECK(planning()) << "the arena is committed already";
  absl::StatusOr<std::unique_ptr<Buffer>> buffer = device.Allocate(std::max(peak_, kAlignment));
  if (!buffer.ok()) {
    std::string what = absl::StrCat("the memory of a step (", peak_, " bytes:");
    for (const auto& [category, bytes] : by_category_)
      absl::StrAppend(&what, " ", category, " ", bytes);
    return Annotate(buffer.status(), what + ")");
  }
  buffer_ = *std::move(buffer);
  offset_ = 0;
  taking_ = 0;
  taken_.clear();
  allocations_.clear();
  live_by_category_.clear();
  return absl::OkStatus();
}

Tensor Arena::memory() const {
  return planning() ? Tensor() : Tensor(buffer_->data(), DType::kU8, {buffer_->bytes()});
}

}  // namespace muster::kernels
