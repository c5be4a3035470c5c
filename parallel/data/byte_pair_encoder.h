// Byte-pair encoding (Sennrich et al., arXiv 1508.07909) of pre-tokens of text: symbols are merged,
// the pair of the lowest rank first and of those the leftmost, until no pair has a rank.
#ifndef MUSTER_PARALLEL_DATA_BYTE_PAIR_ENCODER_H_
#define MUSTER_PARALLEL_DATA_BYTE_PAIR_ENCODER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

// Tables by id are as long as the largest one, so a larger one than any vocabulary needs is
// refused.
inline constexpr int32_t kIdMax = (1 << 22) - 1;

// Const after construction; thread-safe.
class BytePairEncoder {
 public:
  struct Options {
    // The symbols that a pre-token starts from: its bytes, or its code points.
    bool bytes = true;
    // Code points outside the vocabulary become the tokens of their bytes ("<0xE2>"), if all exist.
    bool byte_fallback = false;
    // Else they become this token; -1: kInvalidArgument from Make where a byte has no token.
    int32_t unknown = -1;
    bool fuse_unknown = false;  // neighbouring unknowns are one token
    // A pre-token that is a token as a whole is that token, whatever the merges would give.
    bool whole_pre_tokens_first = false;
  };
  // `vocabulary`: bytes and id of every token, each id once. `merges`: pairs in order
  // of their rank. kInvalidArgument names the token, byte or merge that is wrong.
  static absl::StatusOr<BytePairEncoder> Make(
      std::vector<std::pair<std::string, int32_t>> vocabulary,
      const std::vector<std::pair<std::string, std::string>>& merges, const Options& options);
  // tiktoken's form: the rank of a pair is the id of the token that both make together.
  static absl::StatusOr<BytePairEncoder> MakeRanked(
      std::vector<std::pair<std::string, int32_t>> vocabulary);

  // Appends the tokens of one pre-token, which is not empty.
  void Encode(absl::string_view pre_token, std::vector<int32_t>& out) const;

  // -1: there is none.
  int32_t IdOf(absl::string_view token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? -1 : found->second;
  }
  const absl::flat_hash_map<std::string, int32_t>& ids() const { return ids_; }
  const Options& options() const { return options_; }

 private:
  struct Merge {
    uint32_t rank;
    int32_t id;
  };
  struct Symbol {
    int32_t id;
    uint32_t begin, end;  // bytes of the pre-token
  };
  static constexpr uint32_t kNoRank = 0xffffffff;
  // Up to so many symbols a scan for the lowest rank beats a heap.
  static constexpr size_t kShortMax = 48;
  using Symbols = absl::InlinedVector<Symbol, kShortMax>;

  Merge MergeOf(absl::string_view pre_token, const Symbol& left, const Symbol& right) const;
  void Start(absl::string_view pre_token, Symbols& symbols) const;
  void MergeShort(absl::string_view pre_token, Symbols& symbols) const;
  void MergeLong(absl::string_view pre_token, Symbols& symbols) const;

  Options options_;
  bool ranked_ = false;
  absl::flat_hash_map<std::string, int32_t> ids_;
  absl::flat_hash_map<uint64_t, Merge> merges_;  // by the ids of both
  int32_t byte_ids_[256];                        // -1: none
  int32_t fallback_ids_[256];                    // of "<0xNN>"; -1: none
};

// Remembers the tokens of pre-tokens that come again, as words do. Bounded: it starts anew when it
// is full. Of one thread.
class PreTokenCache {
 public:
  PreTokenCache();
  // As encoder.Encode.
  void Encode(const BytePairEncoder& encoder, absl::string_view pre_token,
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

#endif  // MUSTER_PARALLEL_DATA_BYTE_PAIR_ENCODER_H_
