// How fuzzed bytes are cut into what happens to a core.
#ifndef MUSTER_TESTS_FUZZ_TARGETS_FRAMES_H_
#define MUSTER_TESTS_FUZZ_TARGETS_FRAMES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::fuzz {

// One after another: a byte that says what happens, two bytes of length (the lower first), and so
// many bytes. The last frame may be shorter than its length.
class Frames {
 public:
  explicit Frames(absl::string_view bytes) : bytes_(bytes) {}

  // False at the end.
  bool Next(uint8_t* what, std::string* frame) {
    if (bytes_.size() < 3) return false;
    *what = static_cast<uint8_t>(bytes_[0]);
    const size_t length =
        static_cast<uint8_t>(bytes_[1]) + 256 * size_t{static_cast<uint8_t>(bytes_[2])};
    bytes_.remove_prefix(3);
    const size_t taken = std::min(length, bytes_.size());
    frame->assign(bytes_.data(), taken);
    bytes_.remove_prefix(taken);
    return true;
  }

 private:
  absl::string_view bytes_;
};

// No input makes more of them happen: a run stays short.
constexpr int kFramesMax = 200;

}  // namespace muster::fuzz

#endif  // MUSTER_TESTS_FUZZ_TARGETS_FRAMES_H_
