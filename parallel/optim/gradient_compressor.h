// Gradients that travel in part: what a rank does not send stays behind as its residual and joins
// the gradient of the next step (error feedback), so nothing is lost, only late.
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
  // kTopK: share of a parameter's elements that travels, above 0 and at most 1; at least one does.
  double density = 0.01;
  // kTopK: in the first steps the density falls from nearly 1, by the same factor every step.
  int64_t warmup_steps = 0;
  // kTopK: momentum correction. What a rank adds to its residual is the running sum of its
  // gradients with this decay, cleared where elements are sent; 0 = off.
  double momentum = 0;
  // Parameters whose gradients travel whole: of one dimension, with fewer elements than this (of
  // all tensor ranks together), or with a name that matches one of these, where * stands for any
  // text.
  int64_t min_elements = 1024;
  std::vector<std::string> exclude;
  // kTopK: buckets of which a larger share is sent travel densely, with zeros; the sums have the
  // same bits. 0 = where that is less to send.
  double dense_above = 0;
};

// Whether the gradient of `parameter` is compressed. Not where its gradient is partial over the
// tensor group, nor the second copy of a tied table.
bool Compresses(const CompressionOptions& options, const Parameter& parameter);
// kTopK: the share in step 1, 2, ...
double DensityAt(const CompressionOptions& options, int64_t step);

// Sums buckets whose parameters are all compressed (FlatLayout::Bucket::compressed) over the ranks
// of `group`: their contributions are all-gathered and added on every rank as one binary tree over
// the ranks in order, fp32, so all get the same bits.
//
// Selection is by parameter, so it does not depend on how buckets are cut; exact, with ties going
// to the lower index; and the same on all ranks that hold the same gradient, as the replicas of a
// parameter in a tensor group do.
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
  // What Make() will ask the device for that lasts: residual and momentum.
  static int64_t StateBytes(const CompressionOptions& options, const FlatLayout& layout);
  // And for the contributions of `ranks` ranks to one bucket.
  static int64_t ExchangeBytes(const CompressionOptions& options, const ParameterRegistry& registry,
                               const FlatLayout& layout, int ranks);

  // What each of `ranks` ranks gathers to the others of a compressed bucket in step 1, 2, ...; no
  // value where the bucket travels densely.
  static std::optional<int64_t> ContributionBytes(const CompressionOptions& options,
                                                  const ParameterRegistry& registry,
                                                  const FlatLayout& layout, int bucket, int ranks,
                                                  int64_t step);

  // Step 1, 2, ... of the run.
  void BeginStep(int64_t step);
  // Adds the bucket's gradient to the residual and takes out what is sent. True: the own part of
  // the bucket's gradient is the sum over the group. False: the whole gradient is what this rank
  // sends, zeros included, for the caller to reduce like any other. The same on all ranks.
  bool Exchange(kernels::Stream& stream, int bucket);

  // What has been taken so far in this step: elements sent, and elements of all compressed buckets.
  int64_t sent() const { return sent_; }
  int64_t elements() const { return elements_; }
  // out [1] = the sum of squares of this rank's residual.
  void ResidualSquare(kernels::Stream& stream, kernels::Tensor out);

  // The state of a whole compressed bucket: 0 the residual, 1 the momentum.
  int states() const { return momentum_ == nullptr ? 1 : 2; }
  kernels::Tensor state(int which, int bucket);
  // Back to nothing left over.
  void Reset(kernels::Stream& stream);

 private:
  // A parameter within its bucket.
  struct Piece {
    int64_t begin = 0;
    int64_t elements = 0;
    int64_t words = 0;  // kSign: where its packed signs begin in a rank's contribution
  };
  struct Bucket {
    int64_t begin = 0;  // in the residual
    int64_t elements = 0;
    int64_t words = 0;  // kSign: of a rank's contribution
    std::vector<Piece> pieces;
  };

  GradientCompressor(const CompressionOptions& options, FlatBuffers& flat, Communicator& group)
      : options_(options), flat_(flat), group_(group) {}
  absl::Status Allocate(kernels::Stream& stream);
  void Accumulate(kernels::Stream& stream, int bucket);
  // Elements of a bucket's contribution up to which pairs are less to send than a dense one.
  int64_t PairsMax(const Bucket& bucket) const;
  static int64_t PairsMax(const CompressionOptions& options, int64_t elements, int shards,
                          int ranks);
  bool ExchangeLargest(kernels::Stream& stream, int bucket);
  void ExchangeSigns(kernels::Stream& stream, int bucket);

  const CompressionOptions options_;
  FlatBuffers& flat_;
  Communicator& group_;
  std::vector<Bucket> buckets_;  // by bucket of the layout; without pieces where not compressed
  int64_t elements_ = 0;
  int64_t residual_elements_ = 0;
  std::unique_ptr<kernels::Buffer> residual_, momentum_;
  std::unique_ptr<kernels::Buffer> gathered_;  // contributions of all ranks
  double density_ = 1;
  int64_t sent_ = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_GRADIENT_COMPRESSOR_H_
