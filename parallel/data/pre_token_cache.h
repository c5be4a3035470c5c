// Remembers the tokens of pre-tokens that come again, as words do.
#ifndef MUSTER_PARALLEL_DATA_PRE_TOKEN_CACHE_H_
#define MUSTER_PARALLEL_DATA_PRE_TOKEN_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "parallel/data/subword_encoder.h"

namespace muster::parallel {

// Bounded: it starts anew when it is full. Of one thread.
class PreTokenCache {
 public:
  PreTokenCache();
  // As encoder.Encode; the encoder is the same in all calls.
  void Encode(const SubwordEncoder& encoder, absl::string_view pre_token,
              std::vector<int32_t>& out);

 private:
  static constexpr size_t kSlots = size_t{1} << 17;
  static constexpr size_t kPreTokenMax = 64;  // bytes; longer ones hardly come again
  static constexpr size_t kTokensMax = size_t{1} << 19;
  struct Slot {
    uint64_t hash = 0;  // 0: free
    uint32_t key = 0, tokens = 0;
    uint16_t key_bytes = 0, count = 0;
  };
  void Clear();

  std::vector<Slot> slots_;
  size_t used_ = 0;
  std::string keys_;
  std::vector<int32_t> tokens_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_PRE_TOKEN_CACHE_H_
