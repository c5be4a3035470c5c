#include "parallel/data/pre_token_cache.h"

#include <algorithm>
#include <cstring>

namespace muster::parallel {
namespace {

uint64_t Hash(absl::string_view text) {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ text.size();
  const char* at = text.data();
  size_t left = text.size();
  const auto mix = [&hash](uint64_t word) {
    const auto product = static_cast<unsigned __int128>(hash ^ word) * 0xd6e8feb86659fd93u;
    hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    mix(word);
  }
  uint64_t word = 0;
  std::memcpy(&word, at, left);
  mix(word);
  return hash == 0 ? 1 : hash;
}

}  // namespace

PreTokenCache::PreTokenCache() : slots_(kSlots) {}

void PreTokenCache::Clear() {
  std::fill(slots_.begin(), slots_.end(), Slot());
  used_ = 0;
  keys_.clear();
  tokens_.clear();
}

void PreTokenCache::Encode(const SubwordEncoder& encoder, absl::string_view pre_token,
                           std::vector<int32_t>& out) {
  if (pre_token.size() > kPreTokenMax) return encoder.Encode(pre_token, out);
  const uint64_t hash = Hash(pre_token);
  size_t at = hash & (kSlots - 1);
  for (; slots_[at].hash != 0; at = (at + 1) & (kSlots - 1)) {
    const Slot& slot = slots_[at];
    if (slot.hash == hash && slot.key_bytes == pre_token.size() &&
        std::memcmp(keys_.data() + slot.key, pre_token.data(), pre_token.size()) == 0) {
      out.insert(out.end(), tokens_.begin() + slot.tokens,
                 tokens_.begin() + slot.tokens + slot.count);
      return;
    }
  }
  const size_t begin = out.size();
  encoder.Encode(pre_token, out);
  if (used_ >= kSlots / 2 || tokens_.size() > kTokensMax) {
    Clear();
    at = hash & (kSlots - 1);
  }
  slots_[at] = {hash, static_cast<uint32_t>(keys_.size()), static_cast<uint32_t>(tokens_.size()),
                static_cast<uint16_t>(pre_token.size()), static_cast<uint16_t>(out.size() - begin)};
  ++used_;
  keys_.append(pre_token.data(), pre_token.size());
  tokens_.insert(tokens_.end(), out.begin() + static_cast<ptrdiff_t>(begin), out.end());
}

}  // namespace muster::parallel
