#include "parallel/data/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <queue>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

constexpr int kRounds = 6;
constexpr int kShareBits = 62;

// Mixes two words with the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t z = a + 0x9E3779B97F4A7C15ull * (b + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

SeededPermutation::SeededPermutation(uint64_t seed, int64_t size)
    : seed_(seed),
      size_(size),
      half_bits_(std::max(
          1, (static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1))) + 1) / 2)) {
  CHECK_GE(size, 1);
}

uint64_t SeededPermutation::Encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t next = left ^ (Mix(Mix(seed_, round), right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t SeededPermutation::operator()(int64_t i) const {
  CHECK(i >= 0 && i < size_) << i << " of " << size_;
  // The network permutes [0, P) for the next power of four P. Following its cycle until the value
  // is in [0, size) gives a permutation of [0, size), in fewer than four steps on average.
  uint64_t value = static_cast<uint64_t>(i);
  do {
    value = Encrypt(value);
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

// Huffman's tree, which joins the two lightest nodes first, keeps the deviation small: each level
// adds at most 1/2 and scales the deviation of the level above by the child's share.
BlendOrder::BlendOrder(const std::vector<double>& weights) {
  CHECK(!weights.empty());
  // (weight, node). Equal weights are ordered by node, so that every rank makes the same tree.
  std::priority_queue<std::pair<double, int>, std::vector<std::pair<double, int>>, std::greater<>>
      lightest;
  for (size_t source = 0; source < weights.size(); ++source) {
    CHECK(weights[source] > 0 && std::isfinite(weights[source])) << "weight " << weights[source];
    nodes_.push_back({.source = static_cast<int>(source)});
    lightest.push({weights[source], static_cast<int>(source)});
  }
  while (lightest.size() > 1) {
    const auto [left_weight, left] = lightest.top();
    lightest.pop();
    const auto [right_weight, right] = lightest.top();
    lightest.pop();
    const double share = left_weight / (left_weight + right_weight);
    nodes_.push_back({.left = left,
                      .right = right,
                      .share = static_cast<uint64_t>(std::ldexp(share, kShareBits))});
    lightest.push({left_weight + right_weight, static_cast<int>(nodes_.size()) - 1});
  }
  root_ = lightest.top().second;
}

BlendOrder::Pick BlendOrder::operator()(int64_t i) const {
  CHECK_GE(i, 0);
  // How many of the node's first `j` samples go left; grows by 0 or 1 with j.
  const auto left_of = [](const Node& node, int64_t j) {
    const unsigned __int128 product = static_cast<unsigned __int128>(node.share) *
                                      static_cast<unsigned __int128>(static_cast<uint64_t>(j));
    return static_cast<int64_t>((product + (uint64_t{1} << (kShareBits - 1))) >> kShareBits);
  };
  int at = root_;
  int64_t j = i;
  while (nodes_[static_cast<size_t>(at)].source < 0) {
    const Node& node = nodes_[static_cast<size_t>(at)];
    const int64_t before = left_of(node, j);
    const bool goes_left = left_of(node, j + 1) > before;
    at = goes_left ? node.left : node.right;
    j = goes_left ? before : j - before;
  }
  return {nodes_[static_cast<size_t>(at)].source, j};
}

namespace {

std::vector<double> Weights(const std::vector<SampleSource>& sources) {
  std::vector<double> weights;
  for (const SampleSource& source : sources) weights.push_back(source.weight);
  return weights;
}

absl::Status Check(const std::vector<SampleSource>& sources, const SamplerOptions& options) {
  if (sources.empty()) return absl::InvalidArgumentError("no dataset to take samples from");
  if (options.sequence_length < 1 || options.sequence_length > int64_t{1} << 30) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sequence length of ", options.sequence_length));
  }
  if (options.vocab < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a vocabulary of ", options.vocab));
  }
  for (const SampleSource& source : sources) {
    CHECK(source.dataset != nullptr);
    if (!(source.weight > 0) || !std::isfinite(source.weight)) {
      return absl::InvalidArgumentError(absl::StrCat(source.dataset->prefix(), " has weight ",
                                                     source.weight, ", must be above 0"));
    }
    if (source.dataset->tokens() < options.sequence_length + 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(source.dataset->prefix(), " has ", source.dataset->tokens(),
                       " tokens, a sample of sequence_length ", options.sequence_length, " takes ",
                       options.sequence_length + 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace

Sampler::Sampler(std::vector<SampleSource> sources, const SamplerOptions& options, bool training)
    : sources_(std::move(sources)),
      options_(options),
      training_(training),
      blend_(Weights(sources_)) {
  for (const SampleSource& source : sources_) {
    counts_.push_back((source.dataset->tokens() - 1) / options_.sequence_length);
  }
}

absl::StatusOr<Sampler> Sampler::Training(std::vector<SampleSource> sources,
                                          const SamplerOptions& options) {
  RETURN_IF_ERROR(Check(sources, options));
  return Sampler(std::move(sources), options, true);
}

absl::StatusOr<Sampler> Sampler::Evaluation(std::vector<SampleSource> sources,
                                            const SamplerOptions& options) {
  for (SampleSource& source : sources) source.weight = 1;
  RETURN_IF_ERROR(Check(sources, options));
  return Sampler(std::move(sources), options, false);
}

int64_t Sampler::samples_per_epoch() const {
  int64_t sum = 0;
  for (int64_t count : counts_) sum += count;
  return sum;
}

uint64_t Sampler::fingerprint() const {
  uint64_t value = Mix(options_.seed, static_cast<uint64_t>(options_.sequence_length));
  for (const SampleSource& source : sources_) {
    value = Mix(value, std::bit_cast<uint64_t>(source.weight));
    value = Mix(value, static_cast<uint64_t>(source.dataset->tokens()));
  }
  return Mix(value, training_ ? 1 : 0);
}

SampleLocation Sampler::Locate(int64_t sample) const {
  CHECK_GE(sample, 0);
  SampleLocation location;
  if (!training_) {
    while (sample >= counts_[static_cast<size_t>(location.source)]) {
      sample -= counts_[static_cast<size_t>(location.source)];
      ++location.source;
      CHECK_LT(location.source, static_cast<int>(sources_.size())) << "past the evaluation set";
    }
    location.begin = sample * options_.sequence_length;
    return location;
  }
  const BlendOrder::Pick pick = blend_(sample);
  const size_t source = static_cast<size_t>(pick.source);
  location.source = pick.source;
  location.epoch = pick.count / counts_[source];
  const uint64_t key = Mix(Mix(options_.seed, static_cast<uint64_t>(pick.source)),
                           static_cast<uint64_t>(location.epoch));
  const int64_t spare =
      sources_[source].dataset->tokens() - 1 - counts_[source] * options_.sequence_length;
  const int64_t shift = static_cast<int64_t>(Mix(key, 0) % static_cast<uint64_t>(spare + 1));
  const int64_t k = SeededPermutation(Mix(key, 1), counts_[source])(pick.count % counts_[source]);
  location.begin = k * options_.sequence_length + shift;
  return location;
}

absl::Status Sampler::Fill(absl::Span<const int64_t> samples, absl::Span<int32_t> tokens,
                           absl::Span<int32_t> targets) const {
  const size_t length = static_cast<size_t>(options_.sequence_length);
  CHECK_EQ(tokens.size(), samples.size() * length);
  CHECK_EQ(targets.size(), samples.size() * length);
  std::vector<int32_t> row(length + 1);
  for (size_t r = 0; r < samples.size(); ++r) {
    const SampleLocation location = Locate(samples[r]);
    const IndexedDataset& dataset = *sources_[static_cast<size_t>(location.source)].dataset;
    RETURN_IF_ERROR(dataset.Read(location.begin, options_.vocab, absl::MakeSpan(row)));
    std::copy(row.begin(), row.end() - 1, tokens.begin() + static_cast<ptrdiff_t>(r * length));
    std::copy(row.begin() + 1, row.end(), targets.begin() + static_cast<ptrdiff_t>(r * length));
  }
  return absl::OkStatus();
}

void Sampler::Documents(absl::Span<const int64_t> samples, absl::Span<int32_t> begins) const {
  const int64_t length = options_.sequence_length;
  CHECK_EQ(begins.size(), samples.size() * static_cast<size_t>(length));
  int32_t* out = begins.data();
  for (const int64_t sample : samples) {
    const SampleLocation location = Locate(sample);
    const IndexedDataset& dataset = *sources_[static_cast<size_t>(location.source)].dataset;
    // Finds the last document that begins at or before the first token.
    int64_t document = 0;
    for (int64_t low = 0, high = dataset.documents(); high - low > 1;) {
      const int64_t middle = low + (high - low) / 2;
      (dataset.DocumentBegin(middle) <= location.begin ? low : high) = middle;
      document = low;
    }
    for (int64_t i = 0; i < length; ++i) {
      while (document + 1 < dataset.documents() &&
             dataset.DocumentBegin(document + 1) <= location.begin + i) {
        ++document;
      }
      *out++ = static_cast<int32_t>(
          std::max<int64_t>(0, dataset.DocumentBegin(document) - location.begin));
    }
  }
}

}  // namespace muster::parallel
