// The place of every parameter in flat storage: the one layout of data parallelism, ZeRO 1-3 and
// checkpoints. Pure.
//
// Parameters are walked in backward order (the last registered first), each starting at a multiple
// of 64 elements. A bucket closes once it holds bucket_bytes of fp32 and is padded so that it has
// `shards` equal parts; rank r's part of *every* bucket is fixed (the layout of Megatron-LM's
// distributed optimizer). Where buckets end does not depend on the number of ranks.
//
// With `by_block` (ZeRO 2 and 3) the parameters of a block that are not resident are one bucket of
// any size, so that they can be gathered and freed together. The embedding and the head are blocks
// too. Resident parameters, and those too small to be worth sharding, fill buckets as above.
// Parameters whose gradients are partial over the tensor group (TensorSharing::kPartial) or some of
// its ranks (kShared) have buckets of their own, never by block. So have parameters that 16-bit
// models read in fp32. So has each parameter that another pipeline stage holds too: all ranks that
// hold it own the same parts.
#ifndef MUSTER_PARALLEL_OPTIM_FLAT_LAYOUT_H_
#define MUSTER_PARALLEL_OPTIM_FLAT_LAYOUT_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "parallel/model/parameters.h"

namespace muster::parallel {

// Elements [begin, end) of flat storage.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Elements [first, first + count) of a parameter's box (row-major, without padding), which begin at
// `flat` in flat storage.
struct FlatSlice {
  ParameterId parameter = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t flat = 0;
};

struct FlatLayoutOptions {
  int64_t bucket_bytes = 4 << 20;
  int shards = 1;    // ranks that share one copy of the optimizer's state
  int replicas = 1;  // parts are also a multiple of this number of elements
  bool by_block = false;
  // by_block: parameters with fewer elements than this are resident.
  int64_t resident_elements = 0;
  // First blocks of the groups (GradientGroups) of a pipeline stage: no bucket holds parameters of
  // two groups, which are reduced at different times.
  std::vector<int> part_begins = {};
  // Says which parameters' gradients are compressed; these have buckets of their own. Null: none.
  // Excludes by_block.
  std::function<bool(const Parameter&)> compressed = nullptr;
};

class FlatLayout {
 public:
  struct Bucket {
    FlatRange range;
    std::vector<ParameterId> parameters;  // in storage order
    int block = -1;                       // by_block: the block of its parameters; -1 = resident
    int lowest_block = 0;                 // the first block of any of its parameters
    bool partial = false;                 // kPartial
    bool shared = false;                  // kShared
    bool compressed = false;
    bool full_precision = false;  // Parameter::full_precision
    int64_t local = 0;            // begin of the own part in storage that holds own parts only
  };

  // Requires: all numbers positive.
  FlatLayout(const ParameterRegistry& parameters, const FlatLayoutOptions& options);
  // The layout of data parallelism, without `by_block`.
  FlatLayout(const ParameterRegistry& parameters, int64_t bucket_bytes, int shards)
      : FlatLayout(parameters, {.bucket_bytes = bucket_bytes, .shards = shards}) {}

  const std::vector<Bucket>& buckets() const { return buckets_; }
  int shards() const { return shards_; }
  int64_t elements() const { return elements_; }  // with all padding
  int64_t local_elements() const { return elements_ / shards_; }
  int64_t offset(ParameterId id) const { return offsets_[id]; }
  int bucket_of(ParameterId id) const { return bucket_of_[id]; }
  // The part of one bucket that a rank owns.
  FlatRange Part(int bucket, int rank) const;
  // The real elements inside a range, in storage order.
  std::vector<FlatSlice> Slices(const FlatRange& range) const;

 private:
  const ParameterRegistry& parameters_;
  int shards_;
  int64_t elements_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<int> bucket_of_;
  std::vector<Bucket> buckets_;
};

// Buffers at fixed addresses that the buckets of blocks use in turn. Bucket b is at elements
// [begin[slot[b]], begin[slot[b]] + its size).
struct RotatingSlots {
  std::vector<int> slot;       // per bucket; -1: not the bucket of a block
  std::vector<int64_t> begin;  // per slot
  int64_t elements = 0;        // of all slots
  int size() const { return static_cast<int>(begin.size()); }
};

// Neighbouring blocks get different slots, so that one can be filled while the other is in use. Of
// two ways, takes the one with fewer elements: blocks take two slots by turns; or the first and the
// last block share a slot, and those between them take two others by turns. The second is for an
// embedding and a head whose tables are larger than two blocks. `one_each`: every bucket has a slot
// of its own.
RotatingSlots AssignSlots(const FlatLayout& layout, bool one_each = false);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_FLAT_LAYOUT_H_
