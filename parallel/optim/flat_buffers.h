// Flat storage of a model on one rank: master weights, AdamW's two moments, gradients, and the
// parameters that the model computes with.
#ifndef MUSTER_PARALLEL_OPTIM_FLAT_BUFFERS_H_
#define MUSTER_PARALLEL_OPTIM_FLAT_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_layout.h"

namespace muster::parallel {

struct FlatBuffersOptions {
  int gradient_levels = 1;  // see GradientReducer
  // Whether Make() draws the initial weights. If not, they are zero until Initialize() or
  // WriteMaster().
  bool draw = true;
  uint64_t seed = 0;  // of the initial weights
  // The most host threads that draw initial weights.
  int host_threads = 1;
  // The dtype of compute weights, except those of full precision, which are fp32. fp32 uses the
  // master weights themselves wherever they are whole; bf16 their upper 16 bits; fp16 a copy, which
  // AdamW writes.
  kernels::DType compute = kernels::DType::kF32;
  // bf16: stores only the lower 16 bits of master weights on the device beside the compute weights
  // (kernels::SplitMaster). False: stores fp32 master weights, as with fp16, with the same results.
  bool split_master = true;
  // The ZeRO stage. 0: everything whole. 1: optimizer state of the own parts only. 2: gradients of
  // the own parts too; those of a block are whole only while they are computed. 3: parameters
  // likewise.
  int zero = 0;
  int shard = 0;  // this rank's place among layout.shards()
  // ZeRO-3: false keeps gathered blocks until the next update, in memory for all of them.
  bool reshard_after_forward = true;
  // With one level: gradients (from stage 2 on, the reduced own ones) share memory with activations
  // (GradientOverlay), except those that backward does not write in block order. The model must
  // overwrite gradients.
  bool share_gradients = false;
  // Offload: the number of first buckets, those of the last layers, whose optimizer state and
  // master weights are in pinned host memory.
  int host_buckets = 0;
};

// Device memory in bytes.
struct FlatBuffersBytes {
  int64_t parameters = 0;  // compute weights, without gathered
  int64_t gathered = 0;    // ZeRO-3: the rotating buffers of whole blocks
  int64_t master = 0;      // fp32 master weights, or their lower 16 bits
  int64_t moments = 0;     // of AdamW
  int64_t gradients = 0;   // without those that share memory with activations
  int64_t total() const { return parameters + gathered + master + moments + gradients; }
};

// Owns the memory. Per element of a rank's own parts it takes 4 bytes each for m and v, and for the
// master weight none where the model computes with it in place, 2 where it computes with its upper
// 16 bits, else 4. Single-threaded. The registry and the layout must outlive it.
//
// ZeRO 2 and 3 need a layout made by_block. Views of a block's parameters or gradients are then in
// one of a few rotating buffers (RotatingSlots), which ParameterGatherer and GradientReducer fill.
class FlatBuffers {
 public:
  // kResourceExhausted with the sizes. m, v and gradients are zero. With FlatBuffersOptions::draw,
  // master weights and the own parts of compute weights have their initial values;
  // ParameterGatherer fills the other parts.
  static absl::StatusOr<std::unique_ptr<FlatBuffers>> Make(kernels::Device& device,
                                                           kernels::Stream& stream,
                                                           const ParameterRegistry& registry,
                                                           const FlatLayout& layout,
                                                           const FlatBuffersOptions& options);
  // Sets weights to the initial values of the seed, and moments to zero.
  absl::Status Initialize(kernels::Stream& stream, uint64_t seed);
  // To be called after the master weights were written directly: refreshes compute weights that are
  // copies.
  void RefreshCopies(kernels::Stream& stream);
  // Device and host memory that Make() allocates.
  static FlatBuffersBytes Sizes(const FlatLayout& layout, const FlatBuffersOptions& options);
  static int64_t Bytes(const FlatLayout& layout, const FlatBuffersOptions& options) {
    return Sizes(layout, options).total();
  }
  static int64_t HostBytes(const FlatLayout& layout, const FlatBuffersOptions& options);
  // With share_gradients: the gradients that share memory with activations.
  static GradientOverlay OverlayOf(const FlatLayout& layout, const ParameterRegistry& registry,
                                   const FlatBuffersOptions& options);
  // Sets the shared memory, before any view of gradients is used. It must outlive the buffers.
  void SetGradientOverlay(const kernels::Tensor& overlay);

  const FlatLayout& layout() const { return layout_; }
  const ParameterRegistry& registry() const { return registry_; }
  const FlatBuffersOptions& options() const { return options_; }
  int gradient_levels() const { return options_.gradient_levels; }
  bool parameters_rotate(int bucket) const {
    return options_.zero >= 3 && layout_.buckets()[bucket].block >= 0;
  }
  bool offloaded(int bucket) const { return bucket < options_.host_buckets; }
  // The dtype of the bucket's compute weights.
  kernels::DType compute(int bucket) const {
    return layout_.buckets()[bucket].full_precision ? kernels::DType::kF32 : options_.compute;
  }
  // Whether its master weights are split: upper 16 bits in copy(bucket), lower ones in
  // lower(bucket).
  bool splits_master(int bucket) const {
    return splits_masters() && sixteen_bit(bucket) && !offloaded(bucket);
  }
  // Whether its gradients share memory with activations. Padding then has arbitrary values.
  bool shares_gradients(int bucket) const {
    return options_.share_gradients && InOrder(layout_.buckets()[bucket], options_);
  }
  bool gradients_rotate(int bucket) const { return layout_.buckets()[bucket].block >= 0; }
  // The rotating buffer that a bucket uses.
  int parameter_slot(int bucket) const { return plan_.parameter_slots.slot[bucket]; }
  int gradient_slot(int bucket) const { return plan_.gradient_slots.slot[bucket]; }
  int parameter_slots() const { return plan_.parameter_slots.size(); }
  // The event after which a rotating gradient buffer may be reused. All reducers of these buffers
  // record it after a reduction and wait for it before they use the buffer.
  kernels::Event& gradient_slot_empty(int slot) { return *gradient_slot_empty_[slot]; }

  // The own part of a bucket, fp32; in host memory when it is offloaded. master() requires:
  // !splits_master(bucket).
  kernels::Tensor master(int bucket);
  kernels::Tensor m(int bucket) { return State(host_m_, m_, bucket); }
  kernels::Tensor v(int bucket) { return State(host_v_, v_, bucket); }
  // The lower 16 bits of the own part's master weights, u16; empty unless splits_master(bucket).
  kernels::Tensor lower(int bucket);
  // The tensors of AdamW's update of the own part, without hyperparameters and scalars.
  kernels::AdamWArgs update(int bucket);
  // Enqueues a copy of elements [first, first + n) of the own part's master weights, as fp32, to
  // to[n] in device memory or memory of Device::AllocateHost.
  void ReadMaster(kernels::Stream& stream, int bucket, int64_t first, const kernels::Tensor& to);
  // Writes them from host memory, and blocks. Compute weights that are copies are not refreshed.
  absl::Status WriteMaster(kernels::Stream& stream, int bucket, int64_t first, const float* values,
                           int64_t count);
  // The reduced gradient of the own part. With ZeRO 2 and 3 `level` is the index of a partial sum.
  kernels::Tensor own_gradient(int bucket, int level = 0);
  // The own part of compute weights where these are not the master weights themselves: 16 bits
  // (with bf16 the upper ones), or fp32 when the master weights are on the host. Otherwise empty.
  kernels::Tensor copy(int bucket);

  // A whole bucket of compute weights, and the own part of it.
  kernels::Tensor whole_parameters(int bucket);
  kernels::Tensor own_parameters(int bucket);
  // The source of own_parameters() before a gather; empty when these are filled already.
  kernels::Tensor gather_source(int bucket);
  // A whole bucket of gradients, of which ZeRO 2 and 3 have one level.
  kernels::Tensor whole_gradients(int bucket, int level = 0);
  // All buckets as one tensor. Requires: ZeRO 0 or 1, not share_gradients.
  kernels::Tensor all_gradients(int level);
  // The same for the state. Requires: one shard, nothing offloaded; for masters, not split, and no
  // bucket of full precision beside 16-bit ones.
  kernels::Tensor all_masters();
  kernels::Tensor all_m();
  kernels::Tensor all_v();

  // All memory that collectives use: the same list on every rank, possibly with empty tensors.
  std::vector<kernels::Tensor> Exchanged() const;
  // Views of compute weights and of gradients.
  const ParameterViews& parameter_views() const { return parameter_views_; }
  const ParameterViews& gradient_views(int level) const { return gradient_views_[level]; }

 private:
  // Elements of every buffer.
  struct Plan {
    std::vector<int64_t> whole, resident;  // per bucket: begin among all, and among resident ones
    std::vector<int64_t> block_local;      // per bucket: begin among own parts of blocks
    std::vector<int64_t> full;             // per bucket: begin among those of full precision
    std::vector<int64_t> gradient;         // per bucket: begin of whole gradients, or of own ones
    int64_t overlay = 0;                   // gradients that share memory with activations
    RotatingSlots parameter_slots, gradient_slots;
    int64_t resident_elements = 0, block_local_elements = 0;
    int64_t host = 0, host_block_local = 0;  // own parts: offloaded, and of these those of blocks
    int64_t whole_parameters = 0, parameter_slot_storage = 0, master = 0, copy = 0, moments = 0,
            whole_gradients = 0, gradient_slot_storage = 0, own_gradients = 0, full_parameters = 0;
  };

  FlatBuffers(const ParameterRegistry& registry, const FlatLayout& layout,
              const FlatBuffersOptions& options)
      : registry_(registry), layout_(layout), options_(options) {}
  // Whether gradients of the bucket are written in the order of the buckets: by backward, or from
  // stage 2 on by reductions. They are not for the embedding's bucket, which may have a table that
  // the head uses too, unless it rotates; for sums over tensor groups, whose buckets span the
  // model; and for resident parameters of ZeRO 2 and 3.
  static bool InOrder(const FlatLayout::Bucket& bucket, const FlatBuffersOptions& options) {
    return !bucket.partial && !bucket.shared &&
           (options.zero < 2 ? bucket.lowest_block > 0 : bucket.block >= 0);
  }
  static Plan MakePlan(const FlatLayout& layout, const FlatBuffersOptions& options);
  using BufferPointer = std::unique_ptr<kernels::Buffer>;
  // One buffer, or one for each of several gradient levels.
  struct Part {
    int64_t FlatBuffersBytes::*category;
    kernels::DType dtype;
    int64_t elements;
    BufferPointer FlatBuffers::*buffer = nullptr;
    std::vector<BufferPointer> FlatBuffers::*levels = nullptr;
    int level_count = 1;
  };
  // The one list of allocations, for Make() and for the prediction.
  static std::vector<Part> Parts(const Plan& plan, const FlatBuffersOptions& options);
  absl::Status Allocate(kernels::Device& device, kernels::Stream& stream);
  bool sixteen_bit() const { return options_.compute != kernels::DType::kF32; }
  bool sixteen_bit(int bucket) const { return compute(bucket) != kernels::DType::kF32; }
  bool splits_masters() const {
    return options_.split_master && options_.compute == kernels::DType::kBF16;
  }
  int64_t part(int bucket) const {
    return layout_.buckets()[bucket].range.size() / layout_.shards();
  }
  kernels::Tensor Local(kernels::Buffer& buffer, int bucket);
  // For arrays that are split into offloaded buckets and the others.
  kernels::Tensor State(std::unique_ptr<kernels::Buffer>& host,
                        std::unique_ptr<kernels::Buffer>& device, int bucket);
  void ClearMoments(kernels::Stream& stream, int bucket);
  ParameterViews ParametersAsViews();
  kernels::Tensor Shared(int bucket, int64_t elements);
  ParameterViews GradientsAsViews(int level);
  void MakeGradientViews();

  const ParameterRegistry& registry_;
  const FlatLayout& layout_;
  const FlatBuffersOptions options_;
  Plan plan_;
  BufferPointer whole_parameters_, full_parameters_, parameter_slot_storage_, master_, copy_, m_,
      v_, gradient_slot_storage_, host_master_, host_m_, host_v_;
  std::vector<BufferPointer> whole_gradients_, own_gradients_;  // per level
  kernels::Tensor gradient_overlay_;                            // fp32; empty until it is set
  std::vector<std::unique_ptr<kernels::Event>> gradient_slot_empty_;
  ParameterViews parameter_views_;
  std::vector<ParameterViews> gradient_views_;
};

// Elements [begin, begin + count) of an update's tensors.
kernels::AdamWArgs Rows(const kernels::AdamWArgs& args, int64_t begin, int64_t count);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_FLAT_BUFFERS_H_
