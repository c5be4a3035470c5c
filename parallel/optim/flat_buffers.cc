#include "parallel/optim/flat_buffers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

// Elements [begin, begin + count) of a buffer.
Tensor Slice(kernels::Buffer& buffer, DType dtype, int64_t begin, int64_t count) {
  return Tensor(static_cast<char*>(buffer.data()) + begin * SizeOf(dtype), dtype, {count});
}

// A parameter as stored, somewhere inside its bucket.
Tensor ViewIn(const Tensor& bucket, int64_t begin, const Parameter& parameter) {
  return parameter.StorageIn(static_cast<char*>(bucket.data()) + begin * SizeOf(bucket.dtype()),
                             bucket.dtype());
}

}  // namespace

FlatBuffers::Plan FlatBuffers::MakePlan(const FlatLayout& layout,
                                        const FlatBuffersOptions& options) {
  Plan plan;
  const bool sixteen_bit = options.compute != DType::kF32;
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    CHECK(bucket.block < 0 || options.zero >= 2) << "a layout by block without ZeRO 2 or 3";
    plan.whole.push_back(bucket.range.begin);
    plan.resident.push_back(plan.resident_elements);
    plan.block_local.push_back(plan.block_local_elements);
    plan.full.push_back(plan.full_parameters);
    if (sixteen_bit && bucket.full_precision) plan.full_parameters += bucket.range.size();
    if (bucket.block >= 0) {
      plan.block_local_elements += bucket.range.size() / layout.shards();
    } else {
      plan.resident_elements += bucket.range.size();
    }
  }
  plan.gradient_slots = AssignSlots(layout);
  plan.parameter_slots = AssignSlots(layout, /*one_each=*/!options.reshard_after_forward);
  const bool all_on_host = options.host_buckets == static_cast<int>(layout.buckets().size());
  if (options.host_buckets > 0) {
    plan.host =
        all_on_host ? layout.local_elements() : layout.buckets()[options.host_buckets].local;
    plan.host_block_local =
        all_on_host ? plan.block_local_elements : plan.block_local[options.host_buckets];
  }
  plan.moments = layout.local_elements() - plan.host;
  plan.master = sixteen_bit ? plan.moments : 0;
  if (options.zero >= 3) {
    plan.whole_parameters = plan.resident_elements;
    plan.parameter_slot_storage = plan.parameter_slots.elements;
    plan.copy = sixteen_bit ? plan.block_local_elements : plan.host_block_local;
    if (!sixteen_bit) plan.master = plan.block_local_elements - plan.host_block_local;
  } else {
    plan.whole_parameters = layout.elements();
  }
  const bool sharded = options.zero >= 2;
  if (sharded) {
    plan.whole_gradients = plan.resident_elements;
    plan.gradient_slot_storage = plan.gradient_slots.elements;
  }
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    const bool shares = options.share_gradients && InOrder(bucket, options);
    int64_t& elements = shares ? plan.overlay : sharded ? plan.own_gradients : plan.whole_gradients;
    plan.gradient.push_back(elements);
    elements += bucket.range.size() / (sharded ? layout.shards() : 1);
  }
  return plan;
}

std::vector<FlatBuffers::Part> FlatBuffers::Parts(const Plan& plan,
                                                  const FlatBuffersOptions& options) {
  using Bytes = FlatBuffersBytes;
  const DType compute = options.compute;
  const bool splits = options.split_master && compute == DType::kBF16;
  const bool sharded = options.zero >= 2;
  return {
      {&Bytes::parameters, compute, plan.whole_parameters, &FlatBuffers::whole_parameters_},
      {&Bytes::parameters, DType::kF32, plan.full_parameters, &FlatBuffers::full_parameters_},
      {&Bytes::gathered, compute, plan.parameter_slot_storage,
       &FlatBuffers::parameter_slot_storage_},
      {&Bytes::master, splits ? DType::kU16 : DType::kF32, plan.master, &FlatBuffers::master_},
      {&Bytes::parameters, compute, plan.copy, &FlatBuffers::copy_},
      {&Bytes::moments, DType::kF32, plan.moments, &FlatBuffers::m_},
      {&Bytes::moments, DType::kF32, plan.moments, &FlatBuffers::v_},
      {&Bytes::gradients, DType::kF32, plan.gradient_slot_storage,
       &FlatBuffers::gradient_slot_storage_},
      {&Bytes::gradients, DType::kF32, plan.whole_gradients, nullptr,
       &FlatBuffers::whole_gradients_, sharded ? 1 : options.gradient_levels},
      {&Bytes::gradients, DType::kF32, plan.own_gradients, nullptr, &FlatBuffers::own_gradients_,
       sharded ? options.gradient_levels : 0},
  };
}

FlatBuffersBytes FlatBuffers::Sizes(const FlatLayout& layout, const FlatBuffersOptions& options) {
  FlatBuffersBytes bytes;
  for (const Part& part : Parts(MakePlan(layout, options), options)) {
    bytes.*part.category += part.level_count * part.elements * SizeOf(part.dtype);
  }
  return bytes;
}

int64_t FlatBuffers::HostBytes(const FlatLayout& layout, const FlatBuffersOptions& options) {
  return 3 * SizeOf(DType::kF32) * MakePlan(layout, options).host;
}

GradientOverlay FlatBuffers::OverlayOf(const FlatLayout& layout, const ParameterRegistry& registry,
                                       const FlatBuffersOptions& options) {
  CHECK(options.share_gradients);
  const Plan plan = MakePlan(layout, options);
  GradientOverlay overlay;
  overlay.bytes = plan.overlay * SizeOf(DType::kF32);
  for (size_t i = 0; i < layout.buckets().size(); ++i) {
    const FlatLayout::Bucket& bucket = layout.buckets()[i];
    for (const ParameterId id : bucket.parameters) {
      const Parameter& parameter = registry.at(id);
      overlay.ends.resize(std::max<size_t>(overlay.ends.size(), parameter.block + 1), 0);
      if (!InOrder(bucket, options)) continue;
      // Reductions write the padding as well. From stage 2 on only reductions write, and whole
      // parts.
      int64_t end = bucket.range.size() / (options.zero >= 2 ? layout.shards() : 1);
      if (options.zero < 2 && id != bucket.parameters.back()) {
        end = layout.offset(id) + parameter.storage_elements() - bucket.range.begin;
      }
      int64_t& bytes = overlay.ends[parameter.block];
      bytes = std::max(bytes, (plan.gradient[i] + end) * SizeOf(DType::kF32));
    }
  }
  return overlay;
}

void FlatBuffers::SetGradientOverlay(const Tensor& overlay) {
  CHECK_EQ(overlay.bytes(), plan_.overlay * SizeOf(DType::kF32));
  gradient_overlay_ = Tensor(overlay.data(), DType::kF32, {plan_.overlay});
  MakeGradientViews();
}

void FlatBuffers::MakeGradientViews() {
  for (size_t level = 0; level < whole_gradients_.size(); ++level) {
    gradient_views_.push_back(GradientsAsViews(static_cast<int>(level)));
  }
}

absl::StatusOr<std::unique_ptr<FlatBuffers>> FlatBuffers::Make(kernels::Device& device,
                                                               kernels::Stream& stream,
                                                               const ParameterRegistry& registry,
                                                               const FlatLayout& layout,
                                                               const FlatBuffersOptions& options) {
  CHECK(options.shard >= 0 && options.shard < layout.shards());
  CHECK(!options.share_gradients || options.gradient_levels == 1);
  CHECK(options.host_buckets >= 0 &&
        options.host_buckets <= static_cast<int>(layout.buckets().size()));
  std::unique_ptr<FlatBuffers> flat(new FlatBuffers(registry, layout, options));
  flat->plan_ = MakePlan(layout, options);
  RETURN_IF_ERROR(flat->Allocate(device, stream));
  flat->parameter_views_ = flat->ParametersAsViews();
  if (!options.share_gradients) flat->MakeGradientViews();
  if (options.draw) RETURN_IF_ERROR(flat->Initialize(stream, options.seed));
  return flat;
}

absl::Status FlatBuffers::Allocate(kernels::Device& device, kernels::Stream& stream) {
  const auto allocate = [&](BufferPointer& buffer, const Part& part) -> absl::Status {
    auto made = device.Allocate(part.elements * SizeOf(part.dtype));
    if (!made.ok()) {
      return Annotate(made.status(),
                      absl::StrFormat("parameters, optimizer state and gradients take %.1f MB",
                                      static_cast<double>(Bytes(layout_, options_)) * 1e-6));
    }
    buffer = *std::move(made);
    if (part.elements > 0) {
      kernels::Zero(stream, Slice(*buffer, part.dtype, 0, part.elements));
    }
    return absl::OkStatus();
  };
  for (const Part& part : Parts(plan_, options_)) {
    if (part.levels == nullptr) {
      RETURN_IF_ERROR(allocate(this->*part.buffer, part));
      continue;
    }
    (this->*part.levels).resize(part.level_count);
    for (BufferPointer& level : this->*part.levels) RETURN_IF_ERROR(allocate(level, part));
  }
  for (auto* buffer : {&host_master_, &host_m_, &host_v_}) {
    if (plan_.host == 0) break;
    auto made = device.AllocateHost(plan_.host * SizeOf(DType::kF32));
    if (!made.ok()) {
      return Annotate(made.status(),
                      absl::StrFormat("offloaded optimizer state takes %.1f MB of host memory",
                                      static_cast<double>(HostBytes(layout_, options_)) * 1e-6));
    }
    *buffer = *std::move(made);
    // Host memory that no stream uses yet. Padding stays zero.
    std::memset((*buffer)->data(), 0, plan_.host * SizeOf(DType::kF32));
  }
  for (int slot = 0; slot < plan_.gradient_slots.size(); ++slot) {
    ASSIGN_OR_RETURN(auto empty, device.MakeEvent());
    gradient_slot_empty_.push_back(std::move(empty));
  }
  return absl::OkStatus();
}

Tensor FlatBuffers::Local(kernels::Buffer& buffer, int bucket) {
  return Slice(buffer, DType::kF32, layout_.buckets()[bucket].local, part(bucket));
}

Tensor FlatBuffers::State(std::unique_ptr<kernels::Buffer>& host,
                          std::unique_ptr<kernels::Buffer>& device, int bucket) {
  if (offloaded(bucket)) return Local(*host, bucket);
  return Slice(*device, DType::kF32, layout_.buckets()[bucket].local - plan_.host, part(bucket));
}

Tensor FlatBuffers::master(int bucket) {
  CHECK(!splits_master(bucket)) << "the master weights of bucket " << bucket << " are split";
  if (sixteen_bit(bucket) || offloaded(bucket)) return State(host_master_, master_, bucket);
  if (parameters_rotate(bucket)) {
    return Slice(*master_, DType::kF32, plan_.block_local[bucket] - plan_.host_block_local,
                 part(bucket));
  }
  return own_parameters(bucket);
}

Tensor FlatBuffers::lower(int bucket) {
  if (!splits_master(bucket)) return Tensor();
  return Slice(*master_, DType::kU16, layout_.buckets()[bucket].local - plan_.host, part(bucket));
}

kernels::AdamWArgs FlatBuffers::update(int bucket) {
  kernels::AdamWArgs args;
  if (!splits_master(bucket)) args.parameter = master(bucket);
  args.gradient = own_gradient(bucket);
  args.m = m(bucket);
  args.v = v(bucket);
  args.copy = copy(bucket);
  args.lower = lower(bucket);
  return args;
}

kernels::AdamWArgs Rows(const kernels::AdamWArgs& args, int64_t begin, int64_t count) {
  kernels::AdamWArgs rows = args;
  for (Tensor* tensor :
       {&rows.parameter, &rows.gradient, &rows.m, &rows.v, &rows.copy, &rows.lower}) {
    if (!tensor->empty()) *tensor = tensor->Rows(begin, count);
  }
  return rows;
}

void FlatBuffers::ReadMaster(kernels::Stream& stream, int bucket, int64_t first, const Tensor& to) {
  const int64_t count = to.elements();
  if (splits_master(bucket)) {
    kernels::JoinMaster(stream, copy(bucket).Rows(first, count), lower(bucket).Rows(first, count),
                        to);
  } else {
    kernels::Copy(stream, master(bucket).Rows(first, count), to);
  }
}

absl::Status FlatBuffers::WriteMaster(kernels::Stream& stream, int bucket, int64_t first,
                                      const float* values, int64_t count) {
  const Tensor from(const_cast<float*>(values), DType::kF32, {count});
  if (!splits_master(bucket)) {
    kernels::Copy(stream, from, master(bucket).Rows(first, count));
    return stream.Synchronize();
  }
  std::vector<uint16_t> upper_bits(count), lower_bits(count);
  const Tensor high(upper_bits.data(), DType::kBF16, {count});
  const Tensor low(lower_bits.data(), DType::kU16, {count});
  kernels::ChooseLoops().split_master(count, values, upper_bits.data(), lower_bits.data());
  kernels::Copy(stream, high, copy(bucket).Rows(first, count));
  kernels::Copy(stream, low, lower(bucket).Rows(first, count));
  return stream.Synchronize();
}

std::vector<Tensor> FlatBuffers::Exchanged() const {
  std::vector<Tensor> all;
  const auto add = [&](const BufferPointer& buffer) {
    all.push_back(buffer == nullptr ? Tensor()
                                    : Tensor(buffer->data(), DType::kU8, {buffer->bytes()}));
  };
  add(whole_parameters_);
  add(full_parameters_);
  add(parameter_slot_storage_);
  add(gradient_slot_storage_);
  for (const BufferPointer& level : whole_gradients_) add(level);
  for (const BufferPointer& level : own_gradients_) add(level);
  return all;
}

Tensor FlatBuffers::copy(int bucket) {
  if (!sixteen_bit(bucket) && !offloaded(bucket)) return Tensor();
  if (!parameters_rotate(bucket)) return own_parameters(bucket);
  return Slice(*copy_, options_.compute, plan_.block_local[bucket], part(bucket));
}

Tensor FlatBuffers::whole_parameters(int bucket) {
  const int64_t size = layout_.buckets()[bucket].range.size();
  if (parameters_rotate(bucket)) {
    return Slice(*parameter_slot_storage_, options_.compute,
                 plan_.parameter_slots.begin[parameter_slot(bucket)], size);
  }
  if (sixteen_bit() && !sixteen_bit(bucket)) {
    return Slice(*full_parameters_, DType::kF32, plan_.full[bucket], size);
  }
  return Slice(*whole_parameters_, options_.compute,
               options_.zero >= 3 ? plan_.resident[bucket] : plan_.whole[bucket], size);
}

Tensor FlatBuffers::own_parameters(int bucket) {
  return whole_parameters(bucket).Rows(options_.shard * part(bucket), part(bucket));
}

Tensor FlatBuffers::gather_source(int bucket) {
  if (!parameters_rotate(bucket)) return Tensor();
  return sixteen_bit(bucket) || offloaded(bucket) ? copy(bucket) : master(bucket);
}

Tensor FlatBuffers::whole_gradients(int bucket, int level) {
  const int64_t size = layout_.buckets()[bucket].range.size();
  if (gradients_rotate(bucket)) {
    return Slice(*gradient_slot_storage_, DType::kF32,
                 plan_.gradient_slots.begin[gradient_slot(bucket)], size);
  }
  if (options_.zero < 2 && shares_gradients(bucket)) return Shared(bucket, size);
  return Slice(*whole_gradients_[level], DType::kF32,
               options_.zero >= 2 ? plan_.resident[bucket] : plan_.gradient[bucket], size);
}

Tensor FlatBuffers::Shared(int bucket, int64_t elements) {
  CHECK(!gradient_overlay_.empty()) << "SetGradientOverlay() has not been called";
  return gradient_overlay_.Rows(plan_.gradient[bucket], elements);
}

Tensor FlatBuffers::own_gradient(int bucket, int level) {
  if (options_.zero >= 2) {
    if (shares_gradients(bucket)) return Shared(bucket, part(bucket));
    return Slice(*own_gradients_[level], DType::kF32, plan_.gradient[bucket], part(bucket));
  }
  return whole_gradients(bucket, level).Rows(options_.shard * part(bucket), part(bucket));
}

Tensor FlatBuffers::all_gradients(int level) {
  CHECK(options_.zero < 2 && !options_.share_gradients);
  return Slice(*whole_gradients_[level], DType::kF32, 0, plan_.whole_gradients);
}

Tensor FlatBuffers::all_masters() {
  CHECK(layout_.shards() == 1 && options_.host_buckets == 0 && !splits_masters());
  CHECK_EQ(plan_.full_parameters, 0);
  CHECK_LT(options_.zero, 2);
  return Slice(sixteen_bit() ? *master_ : *whole_parameters_, DType::kF32, 0, layout_.elements());
}

Tensor FlatBuffers::all_m() {
  CHECK(layout_.shards() == 1 && options_.host_buckets == 0);
  return Slice(*m_, DType::kF32, 0, layout_.elements());
}

Tensor FlatBuffers::all_v() {
  CHECK(layout_.shards() == 1 && options_.host_buckets == 0);
  return Slice(*v_, DType::kF32, 0, layout_.elements());
}

ParameterViews FlatBuffers::ParametersAsViews() {
  std::vector<Tensor> views;
  for (ParameterId id = 0; id < registry_.size(); ++id) {
    const int bucket = layout_.bucket_of(id);
    views.push_back(ViewIn(whole_parameters(bucket),
                           layout_.offset(id) - layout_.buckets()[bucket].range.begin,
                           registry_.at(id)));
  }
  return ParameterViews(std::move(views));
}

ParameterViews FlatBuffers::GradientsAsViews(int level) {
  std::vector<Tensor> views;
  for (ParameterId id = 0; id < registry_.size(); ++id) {
    const int bucket = layout_.bucket_of(id);
    views.push_back(ViewIn(whole_gradients(bucket, level),
                           layout_.offset(id) - layout_.buckets()[bucket].range.begin,
                           registry_.at(id)));
  }
  return ParameterViews(std::move(views));
}

void FlatBuffers::RefreshCopies(kernels::Stream& stream) {
  for (int bucket = 0; bucket < static_cast<int>(layout_.buckets().size()); ++bucket) {
    if (splits_master(bucket)) continue;
    if (compute(bucket) == DType::kBF16) {
      kernels::SplitMaster(stream, master(bucket), copy(bucket), Tensor());
    } else if (sixteen_bit(bucket)) {
      kernels::Cast(stream, master(bucket), copy(bucket));
    } else if (offloaded(bucket)) {
      kernels::Copy(stream, master(bucket), copy(bucket));
    }
  }
}

void FlatBuffers::ClearMoments(kernels::Stream& stream, int bucket) {
  for (const Tensor& moment : {m(bucket), v(bucket)}) {
    if (offloaded(bucket)) {
      std::memset(moment.data(), 0, moment.bytes());
    } else {
      kernels::Zero(stream, moment);
    }
  }
}

absl::Status FlatBuffers::Initialize(kernels::Stream& stream, uint64_t seed) {
  std::vector<float> values;
  for (int bucket = 0; bucket < static_cast<int>(layout_.buckets().size()); ++bucket) {
    const FlatRange own = layout_.Part(bucket, options_.shard);
    ClearMoments(stream, bucket);
    for (const FlatSlice& slice : layout_.Slices(own)) {
      const Parameter& parameter = registry_.at(slice.parameter);
      // Draws this rank's part alone, which with ZeRO is a fraction of the compute weights.
      values.resize(slice.count);
      parallel::Initialize(parameter, seed, slice.first, slice.count, values.data(),
                           options_.host_threads);
      RETURN_IF_ERROR(
          WriteMaster(stream, bucket, slice.flat - own.begin, values.data(), slice.count));
    }
  }
  RefreshCopies(stream);
  return absl::OkStatus();
}

}  // namespace muster::parallel
