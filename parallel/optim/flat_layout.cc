#include "parallel/optim/flat_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace muster::parallel {
namespace {

constexpr int64_t kParameterAlignment = 64;
constexpr int64_t kBucketAlignment = 128;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

FlatLayout::FlatLayout(const ParameterRegistry& parameters, const FlatLayoutOptions& options)
    : parameters_(parameters),
      shards_(options.shards),
      offsets_(parameters.size()),
      bucket_of_(parameters.size()) {
  CHECK_GT(options.bucket_bytes, 0);
  CHECK_GT(options.shards, 0);
  CHECK_GT(options.replicas, 0);
  CHECK(options.compressed == nullptr || !options.by_block);
  const int64_t bucket_elements = options.bucket_bytes / static_cast<int64_t>(sizeof(float));
  const int64_t alignment =
      std::lcm<int64_t>(int64_t{options.shards} * options.replicas, kBucketAlignment);
  // Buckets that are being filled, by block (-1: resident), by the ranks that sum their gradients
  // (kReplicated stands for kSharded too), and by whether they are compressed or of full precision.
  // Several may be open, so offsets are relative to the bucket until it closes.
  using Key = std::tuple<int, TensorSharing, bool, bool>;
  std::map<Key, Bucket> open;
  const auto close = [&](Key key) {
    auto closed = open.extract(key);
    Bucket& bucket = closed.mapped();
    for (const ParameterId id : bucket.parameters) {
      offsets_[id] += elements_;
      bucket_of_[id] = static_cast<int>(buckets_.size());
    }
    bucket.range = {elements_, elements_ + RoundUp(bucket.range.end, alignment)};
    bucket.local = elements_ / shards_;
    elements_ = bucket.range.end;
    buckets_.push_back(std::move(bucket));
  };
  const auto part_of = [&](const Parameter& parameter) {
    return std::upper_bound(options.part_begins.begin(), options.part_begins.end(),
                            parameter.block) -
           options.part_begins.begin();
  };
  for (ParameterId id = parameters.size() - 1; id >= 0; --id) {
    const Parameter& parameter = parameters.at(id);
    if (id + 1 < parameters.size() && part_of(parameter) != part_of(parameters.at(id + 1))) {
      while (!open.empty()) close(open.rbegin()->first);
    }
    const TensorSharing summed = parameter.sharing == TensorSharing::kSharded
                                     ? TensorSharing::kReplicated
                                     : parameter.sharing;
    const bool sharded = options.by_block && !parameter.resident && !parameter.full_precision &&
                         summed == TensorSharing::kReplicated &&
                         parameter.elements() >= options.resident_elements;
    const bool compressed = options.compressed != nullptr && options.compressed(parameter);
    const Key key = {sharded ? parameter.block : -1, summed, compressed, parameter.full_precision};
    // Backward is past the blocks behind this one.
    while (!open.empty() && std::get<0>(open.rbegin()->first) > parameter.block) {
      close(open.rbegin()->first);
    }
    if (parameter.on_two_stages && open.count(key) != 0) close(key);
    Bucket& bucket = open[key];
    bucket.block = std::get<0>(key);
    bucket.lowest_block = parameter.block;
    bucket.partial = summed == TensorSharing::kPartial;
    bucket.shared = summed == TensorSharing::kShared;
    bucket.compressed = compressed;
    bucket.full_precision = parameter.full_precision;
    bucket.parameters.push_back(id);
    offsets_[id] = RoundUp(bucket.range.end, kParameterAlignment);
    bucket.range.end = offsets_[id] + parameter.storage_elements();
    if ((!sharded && bucket.range.end >= bucket_elements) || parameter.on_two_stages) close(key);
  }
  while (!open.empty()) close(open.rbegin()->first);
}

FlatRange FlatLayout::Part(int bucket, int rank) const {
  CHECK(rank >= 0 && rank < shards_);
  const FlatRange& range = buckets_[bucket].range;
  const int64_t part = range.size() / shards_;
  return {range.begin + rank * part, range.begin + (rank + 1) * part};
}

std::vector<FlatSlice> FlatLayout::Slices(const FlatRange& range) const {
  std::vector<FlatSlice> slices;
  for (const Bucket& bucket : buckets_) {
    if (bucket.range.end <= range.begin || bucket.range.begin >= range.end) continue;
    for (const ParameterId id : bucket.parameters) {
      const int64_t begin = std::max(range.begin, offsets_[id]);
      const int64_t end = std::min(range.end, offsets_[id] + parameters_.at(id).elements());
      if (begin < end) slices.push_back({id, begin - offsets_[id], end - begin, begin});
    }
  }
  return slices;
}

RotatingSlots AssignSlots(const FlatLayout& layout, bool one_each) {
  std::vector<int> rotating;  // buckets
  for (size_t i = 0; i < layout.buckets().size(); ++i) {
    if (layout.buckets()[i].block >= 0) rotating.push_back(static_cast<int>(i));
  }
  const int count = static_cast<int>(rotating.size());
  const auto assign = [&](const std::function<int(int ordinal)>& slot_of) {
    RotatingSlots slots;
    slots.slot.assign(layout.buckets().size(), -1);
    std::vector<int64_t> sizes;
    for (int i = 0; i < count; ++i) {
      const int slot = slot_of(i);
      slots.slot[rotating[i]] = slot;
      sizes.resize(std::max<size_t>(sizes.size(), slot + 1));
      sizes[slot] = std::max(sizes[slot], layout.buckets()[rotating[i]].range.size());
    }
    for (const int64_t size : sizes) {
      slots.begin.push_back(slots.elements);
      slots.elements += size;
    }
    return slots;
  };
  if (one_each) return assign([](int i) { return i; });
  RotatingSlots by_turns = assign([](int i) { return i % 2; });
  if (count < 3) return by_turns;
  RotatingSlots ends_apart =
      assign([&](int i) { return i == 0 || i + 1 == count ? 0 : 1 + i % 2; });
  return ends_apart.elements < by_turns.elements ? ends_apart : by_turns;
}

}  // namespace muster::parallel
