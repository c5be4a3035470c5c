// Where every parameter lives in flat storage: the one layout behind data parallelism, ZeRO 1-3 and
// checkpoints. Pure.
//
// Parameters are walked in backward order (the last registered first), each starting at a multiple
// of 64 elements. A bucket closes once it holds bucket_bytes of fp32 and is padded to a multiple of
// lcm(dp, 128), so that it has dp equal parts; rank r's part of *every* bucket is fixed (the layout
// of Megatron-LM's distributed optimizer). Where buckets end does not depend on dp.
#ifndef MUSTER_PARALLEL_OPTIM_FLAT_LAYOUT_H_
#define MUSTER_PARALLEL_OPTIM_FLAT_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "parallel/model/parameters.h"

namespace muster::parallel {

// Elements [begin, end) of flat storage.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Elements [first, first + count) of a parameter's box (row-major, without padding), which stand at
// `flat` in flat storage.
struct FlatPiece {
  ParameterId parameter = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t flat = 0;
};

class FlatLayout {
 public:
  struct Bucket {
    FlatRange range;
    std::vector<ParameterId> parameters;  // in storage order
  };

  // Requires: bucket_bytes > 0, data_parallel > 0.
  FlatLayout(const ParameterRegistry& parameters, int64_t bucket_bytes, int data_parallel);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  int64_t elements() const { return elements_; }  // with all padding
  int64_t offset(ParameterId id) const { return offsets_[id]; }
  int bucket_of(ParameterId id) const { return bucket_of_[id]; }
  // Rank's part of one bucket.
  FlatRange Part(int bucket, int rank) const;
  // The real elements inside a range, in storage order.
  std::vector<FlatPiece> Pieces(const FlatRange& range) const;

 private:
  const ParameterRegistry& parameters_;
  int data_parallel_;
  int64_t elements_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<int> bucket_of_;
  std::vector<Bucket> buckets_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_FLAT_LAYOUT_H_
