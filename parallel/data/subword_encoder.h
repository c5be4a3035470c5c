// What makes tokens of a pre-token: byte-pair encoding or a unigram model.
#ifndef MUSTER_PARALLEL_DATA_SUBWORD_ENCODER_H_
#define MUSTER_PARALLEL_DATA_SUBWORD_ENCODER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

// Tables by id are as long as the largest one, so a larger one than any vocabulary needs is
// refused.
inline constexpr int32_t kIdMax = (1 << 22) - 1;

// Stands for a space in tokens of SentencePiece and its relatives: U+2581.
inline constexpr absl::string_view kSpaceMark = "\xe2\x96\x81";
// Where the first run of space marks begins that has something in front of it, or npos.
inline size_t NextWord(absl::string_view text) {
  size_t at = 0;
  while (absl::StartsWith(text.substr(at), kSpaceMark)) at += kSpaceMark.size();
  return text.find(kSpaceMark, at);
}

// Const after construction; thread-safe.
class SubwordEncoder {
 public:
  virtual ~SubwordEncoder() = default;
  // Appends the tokens of one pre-token, which is not empty and valid UTF-8.
  virtual void Encode(absl::string_view pre_token, std::vector<int32_t>& out) const = 0;
  // -1: there is none.
  virtual int32_t IdOf(absl::string_view token) const = 0;
  virtual const absl::flat_hash_map<std::string, int32_t>& ids() const = 0;
  // No token reaches over the beginning of a word: space marks stand in tokens only in front of
  // everything else. Then the tokens of a pre-token are those of its words (NextWord).
  virtual bool EncodesWordByWord() const = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_SUBWORD_ENCODER_H_
