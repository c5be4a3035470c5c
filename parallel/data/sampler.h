// Says which tokens are sample i. That is a pure function of (seed, i): it does not depend on the
// layout, and training resumes from the number of consumed samples alone.
//
// Samples are cut from the stream of tokens of a dataset, across documents: sample k of a dataset
// is tokens [kS, kS + S] shifted by less than S, so neighbours share one token and every sample
// gives S (input, target) pairs.
//  - Training: each epoch visits every sample of a dataset once, in an order of its own: a Feistel
//    network with cycle walking (Black and Rogaway, CT-RSA 2002) keyed by (seed, dataset, epoch),
//    so no table is kept. The shift is drawn per epoch from the number of tokens that are left over
//    when S divides the stream, so that every token is in samples of some epoch.
//  - Several datasets are blended by weight through a binary tree of even splits (Bresenham's
//    line): after any i samples, dataset d has given w_d i to within about one.
//  - Evaluation visits the samples of the first dataset in order, then those of the next, each once
//    and without a shift.
#ifndef MUSTER_PARALLEL_DATA_SAMPLER_H_
#define MUSTER_PARALLEL_DATA_SAMPLER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "parallel/data/indexed_dataset.h"

namespace muster::parallel {

// A bijection of [0, size) that needs no memory. Value type.
class SeededPermutation {
 public:
  // Requires: size >= 1.
  SeededPermutation(uint64_t seed, int64_t size);
  // Requires: 0 <= i < size.
  int64_t operator()(int64_t i) const;

 private:
  uint64_t Encrypt(uint64_t value) const;

  uint64_t seed_;
  int64_t size_;
  int half_bits_;
};

// Maps sample i of a blend to (source, how many samples that source has given before). Value type.
class BlendOrder {
 public:
  struct Pick {
    int source = 0;
    int64_t count = 0;
  };
  // Requires: not empty, every weight > 0 and finite.
  explicit BlendOrder(const std::vector<double>& weights);
  // Requires: i >= 0.
  Pick operator()(int64_t i) const;

 private:
  // An inner node sends floor(j * share + 1/2) of its first j samples left, the others right.
  struct Node {
    int left = -1;
    int right = -1;
    uint64_t share = 0;  // of the left child, in units of 2^-62
    int source = -1;     // leaves
  };
  std::vector<Node> nodes_;
  int root_ = 0;
};

struct SampleSource {
  const IndexedDataset* dataset = nullptr;  // outlives the sampler
  double weight = 1;                        // training only
};

struct SamplerOptions {
  int64_t sequence_length = 0;  // S: tokens a sample feeds to the model
  int64_t vocab = 0;            // ids must be below
  uint64_t seed = 0;            // training only
};

// The S + 1 tokens of a sample.
struct SampleLocation {
  int source = 0;
  int64_t epoch = 0;
  int64_t begin = 0;  // first token in the stream of the dataset
  friend bool operator==(const SampleLocation&, const SampleLocation&) = default;
};

// Thread-safe, immutable.
class Sampler {
 public:
  // kInvalidArgument for options or weights out of range, no source, or a dataset with fewer than
  // S + 1 tokens (names it and both numbers).
  static absl::StatusOr<Sampler> Training(std::vector<SampleSource> sources,
                                          const SamplerOptions& options);
  static absl::StatusOr<Sampler> Evaluation(std::vector<SampleSource> sources,
                                            const SamplerOptions& options);

  int64_t sequence_length() const { return options_.sequence_length; }
  // Samples of all datasets, each counted once. Training goes on behind them with another epoch.
  int64_t samples_per_epoch() const;
  // A hash of everything that determines the stream of samples. A job that resumes with another
  // value would see other data.
  uint64_t fingerprint() const;

  // Requires: sample >= 0, and below samples_per_epoch() in evaluation.
  SampleLocation Locate(int64_t sample) const;

  // Row r of `tokens` and `targets` (both samples.size() x S, row-major) is sample samples[r];
  // targets are the tokens one later. kDataLoss names file, position and id of a token outside the
  // vocabulary. Requires: sizes agree.
  absl::Status Fill(absl::Span<const int64_t> samples, absl::Span<int32_t> tokens,
                    absl::Span<int32_t> targets) const;
  // Row r of `begins` (samples.size() x S): for every token of sample samples[r] the position in
  // the sample at which its document begins, 0 where it began earlier. Requires: the size agrees.
  void Documents(absl::Span<const int64_t> samples, absl::Span<int32_t> begins) const;

 private:
  Sampler(std::vector<SampleSource> sources, const SamplerOptions& options, bool training);

  std::vector<SampleSource> sources_;
  SamplerOptions options_;
  bool training_;
  BlendOrder blend_;
  std::vector<int64_t> counts_;  // samples per source in one epoch
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_SAMPLER_H_
