// Gradient compression with error feedback: a rank sends some of its gradient, keeps the rest as
// its residual and adds it to the gradient of the next step.
#ifndef MUSTER_PARALLEL_OPTIM_GRADIENT_COMPRESSOR_H_
#define MUSTER_PARALLEL_OPTIM_GRADIENT_COMPRESSOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_buffers.h"

namespace muster::parallel {

enum class CompressionMethod : uint8_t {
  kNone,
  // The elements of largest magnitude of every parameter, as (index, value) (Deep Gradient
  // Compression, Lin et al., arXiv 1712.01887).
  kTopK,
  // A bit per element and the mean magnitude of every parameter (EF-SignSGD, Karimireddy et al.,
  // arXiv 1901.09847).
  kSign,
};

struct CompressionOptions {
  CompressionMethod method = CompressionMethod::kNone;
  // kTopK: share of a parameter's elements that is sent, above 0 and at most 1; at least one is.
  double density = 0.01;
  // kTopK: the number of first steps in which the density falls from nearly 1 by a constant factor.
  int64_t warmup_steps = 0;
  // kTopK: momentum correction. A rank adds the running sum of its gradients with this decay to its
  // residual, and clears it where elements are sent; 0 = off.
  double momentum = 0;
  // Gradients are sent whole for parameters of one dimension, with fewer elements than this (over
  // all tensor ranks), or with a name that matches one of these patterns, where * matches any text.
  int64_t min_elements = 1024;
  std::vector<std::string> exclude;
  // kTopK: buckets of which a larger share is sent are sent densely, with zeros and the same sums.
  // 0 = where that sends fewer bytes.
  double dense_above = 0;
};

// Whether the gradient of `parameter` is compressed. Gradients that are partial over the tensor
// group, and the second copy of a tied table, are not.
bool Compresses(const CompressionOptions& options, const Parameter& parameter);
// kTopK: the share in step 1, 2, ...
double DensityAt(const CompressionOptions& options, int64_t step);

// Sums buckets whose parameters are all compressed (FlatLayout::Bucket::compressed) over the ranks
// of `group`: their contributions are all-gathered and added on every rank as one binary tree over
// the ranks in order, fp32, so all get the same bits.
//
// Selection is by parameter, so it does not depend on the buckets. It is exact, with ties going to
// the lower index, and the same on all ranks that hold the same gradient, such as the replicas of a
// parameter in a tensor group.
//
// Owns the residual (4 bytes per compressed element of the whole buckets, not of own parts), the
// momentum (as much again, where it is used) and buffers for one bucket. Needs ZeRO 0 or 1: the
// others never hold a whole gradient, which a residual belongs to. Single-threaded.
class GradientCompressor {
 public:
  // kResourceExhausted with the sizes. Everything passed in must outlive it.
  static absl::StatusOr<std::unique_ptr<GradientCompressor>> Make(const CompressionOptions& options,
                                                                  FlatBuffers& flat,
                                                                  Communicator& group,
                                                                  kernels::Stream& stream);
  // Device memory for residual and momentum.
  static int64_t StateBytes(const CompressionOptions& options, const FlatLayout& layout);
  // Device memory for the contributions of `ranks` ranks to one bucket.
  static int64_t ExchangeBytes(const CompressionOptions& options, const ParameterRegistry& registry,
                               const FlatLayout& layout, int ranks);

  // Bytes that each of `ranks` ranks all-gathers for a compressed bucket in step 1, 2, ...; no
  // value where the bucket is sent densely.
  static std::optional<int64_t> ContributionBytes(const CompressionOptions& options,
                                                  const ParameterRegistry& registry,
                                                  const FlatLayout& layout, int bucket, int ranks,
                                                  int64_t step);

  // Step 1, 2, ... of the run.
  void BeginStep(int64_t step);
  // Adds the bucket's gradient to the residual and takes out what is sent. True: the own part of
  // the bucket's gradient is the sum over the group. False: the whole gradient is what this rank
  // sends, including zeros, for the caller to reduce like any other. All ranks return the same.
  bool Exchange(kernels::Stream& stream, int bucket);

  // Elements sent so far in this step, and elements of all compressed buckets.
  int64_t sent() const { return sent_; }
  int64_t elements() const { return elements_; }
  // out [1] = the sum of squares of this rank's residual.
  void ResidualSquare(kernels::Stream& stream, kernels::Tensor out);

  // The state of a whole compressed bucket: 0 the residual, 1 the momentum.
  int states() const { return momentum_ == nullptr ? 1 : 2; }
  kernels::Tensor state(int which, int bucket);
  // Sets residual and momentum to zero.
  void Reset(kernels::Stream& stream);

 private:
  // A parameter within its bucket.
  struct Member {
    int64_t begin = 0;
    int64_t elements = 0;
    int64_t words = 0;  // kSign: where its packed signs begin in a rank's contribution
  };
  struct Bucket {
    int64_t begin = 0;  // in the residual
    int64_t elements = 0;
    int64_t words = 0;  // kSign: of a rank's contribution
    std::vector<Member> members;
  };

  GradientCompressor(const CompressionOptions& options, FlatBuffers& flat, Communicator& group)
      : options_(options), flat_(flat), group_(group) {}
  absl::Status Allocate(kernels::Stream& stream);
  void Accumulate(kernels::Stream& stream, int bucket);
  // Elements of a bucket's contribution up to which pairs take fewer bytes than a dense one.
  int64_t PairsMax(const Bucket& bucket) const;
  static int64_t PairsMax(const CompressionOptions& options, int64_t elements, int shards,
                          int ranks);
  bool ExchangeLargest(kernels::Stream& stream, int bucket);
  void ExchangeSigns(kernels::Stream& stream, int bucket);

  const CompressionOptions options_;
  FlatBuffers& flat_;
  Communicator& group_;
  std::vector<Bucket> buckets_;  // by bucket of the layout; empty where not compressed
  int64_t elements_ = 0;
  int64_t residual_elements_ = 0;
  std::unique_ptr<kernels::Buffer> residual_, momentum_;
  std::unique_ptr<kernels::Buffer> gathered_;  // contributions of all ranks
  double density_ = 1;
  int64_t sent_ = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_GRADIENT_COMPRESSOR_H_
