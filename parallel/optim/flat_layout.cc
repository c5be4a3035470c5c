#include "parallel/optim/flat_layout.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace muster::parallel {
namespace {

constexpr int64_t kParameterAlignment = 64;
constexpr int64_t kBucketAlignment = 128;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

FlatLayout::FlatLayout(const ParameterRegistry& parameters, int64_t bucket_bytes, int data_parallel)
    : parameters_(parameters),
      data_parallel_(data_parallel),
      offsets_(parameters.size()),
      bucket_of_(parameters.size()) {
  CHECK_GT(bucket_bytes, 0);
  CHECK_GT(data_parallel, 0);
  const int64_t bucket_elements = bucket_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t alignment = std::lcm<int64_t>(data_parallel, kBucketAlignment);
  Bucket bucket;
  int64_t end = 0;
  const auto close = [&] {
    end = RoundUp(end - bucket.range.begin, alignment) + bucket.range.begin;
    bucket.range.end = end;
    buckets_.push_back(std::move(bucket));
    bucket = Bucket();
    bucket.range.begin = end;
  };
  for (ParameterId id = parameters.size() - 1; id >= 0; --id) {
    // Relative to the bucket: its start need not be a multiple of 64 for odd dp.
    offsets_[id] = bucket.range.begin + RoundUp(end - bucket.range.begin, kParameterAlignment);
    bucket_of_[id] = static_cast<int>(buckets_.size());
    bucket.parameters.push_back(id);
    end = offsets_[id] + parameters.at(id).storage_elements();
    if (end - bucket.range.begin >= bucket_elements) close();
  }
  if (!bucket.parameters.empty()) close();
  elements_ = end;
}

FlatRange FlatLayout::Part(int bucket, int rank) const {
  CHECK(rank >= 0 && rank < data_parallel_);
  const FlatRange& range = buckets_[bucket].range;
  const int64_t part = range.size() / data_parallel_;
  return {range.begin + rank * part, range.begin + (rank + 1) * part};
}

std::vector<FlatPiece> FlatLayout::Pieces(const FlatRange& range) const {
  std::vector<FlatPiece> pieces;
  for (const Bucket& bucket : buckets_) {
    if (bucket.range.end <= range.begin || bucket.range.begin >= range.end) continue;
    for (const ParameterId id : bucket.parameters) {
      const int64_t begin = std::max(range.begin, offsets_[id]);
      const int64_t end = std::min(range.end, offsets_[id] + parameters_.at(id).elements());
      if (begin < end) pieces.push_back({id, begin - offsets_[id], end - begin, begin});
    }
  }
  return pieces;
}

}  // namespace muster::parallel
