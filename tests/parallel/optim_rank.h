// Flat storage of a few small parameters on one rank, for tests of what is done with it.
#ifndef MUSTER_TESTS_PARALLEL_OPTIM_RANK_H_
#define MUSTER_TESTS_PARALLEL_OPTIM_RANK_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/optim/parameter_gatherer.h"

namespace muster::parallel {

inline Parameter Matrix(const std::string& name, int64_t rows, int64_t columns) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {rows, columns};
  parameter.weight_decay = true;
  parameter.initializer = Initializer::kNormal;
  parameter.stddev = 0.1f;
  return parameter;
}
inline Parameter Vector(const std::string& name, int64_t size) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {size};
  parameter.initializer = Initializer::kOnes;
  return parameter;
}

// Four blocks; the first is resident.
inline ParameterRegistry SomeParameters() {
  ParameterRegistry registry;
  registry.BeginBlock(0, /*resident=*/true);
  Parameter padded = Matrix("table", 5, 7);
  padded.storage_rows = 16;
  registry.Add(padded);
  registry.Add(Vector("bias", 3));
  registry.BeginBlock(1, /*resident=*/false);
  registry.Add(Matrix("wide", 10, 30));
  registry.Add(Vector("scale", 65));
  registry.BeginBlock(2, /*resident=*/false);
  registry.Add(Matrix("last", 4, 4));
  registry.BeginBlock(3, /*resident=*/false);
  registry.Add(Matrix("end", 9, 20));
  return registry;
}

// How its ranks share the state and reduce gradients.
struct Sharding {
  int zero = 0;
  int shards = 1;
  bool overlap = true;
  kernels::DType compute = kernels::DType::kF32;
  kernels::DType wire = kernels::DType::kF32;
  bool chained = false;
};

// One rank with flat storage over SomeParameters().
struct Rank {
  explicit Rank(Communicator& communicator, int64_t micro_batches = 1, const Sharding& how = {})
      : groups(*MeshGroups::MakeData(communicator, how.shards)),
        registry(SomeParameters()),
        layout(registry, {.bucket_bytes = 1024,
                          .shards = how.shards,
                          .replicas = communicator.size() / how.shards,
                          .by_block = how.zero >= 2,
                          .resident_elements = 20}),
        device(kernels::MakeCpuDevice(1)),
        compute(*device->MakeStream()),
        communication(*device->MakeStream({.threaded = true})),
        gathering(*device->MakeStream({.threaded = true})),
        flat(*FlatBuffers::Make(
            *device, *compute, registry, layout,
            {.gradient_levels = GradientReducer::Levels(micro_batches, how.zero, how.chained),
             .seed = 3,
             .compute = how.compute,
             .zero = how.zero,
             .shard = groups->shard().rank()})),
        reducer(*GradientReducer::Make(
            *flat, *groups, *compute, *communication,
            {.overlap = how.overlap, .wire = how.wire, .chained = how.chained})),
        gatherer(*ParameterGatherer::Make(*flat, groups->gather(), *reducer, {{0, 4}}, *compute,
                                          *gathering, how.overlap)) {}

  // Writes the elements of the own parts to values[parameter][element], which has zeros elsewhere.
  // `at` returns the own part of a bucket, fp32.
  template <typename At>
  void Collect(At at, std::vector<std::vector<float>>& values) {
    values.resize(registry.size());
    for (int bucket = 0; bucket < static_cast<int>(layout.buckets().size()); ++bucket) {
      const FlatRange part = layout.Part(bucket, groups->shard().rank());
      const kernels::Tensor own = at(bucket);
      for (const FlatSlice& slice : layout.Slices(part)) {
        auto& to = values[slice.parameter];
        to.resize(registry.at(slice.parameter).elements());
        const float* from = own.f32() + (slice.flat - part.begin);
        std::copy(from, from + slice.count, to.begin() + slice.first);
      }
    }
  }

  std::unique_ptr<MeshGroups> groups;
  ParameterRegistry registry;
  FlatLayout layout;
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<kernels::Stream> compute, communication, gathering;
  std::unique_ptr<FlatBuffers> flat;
  std::unique_ptr<GradientReducer> reducer;
  std::unique_ptr<ParameterGatherer> gatherer;
};

}  // namespace muster::parallel

#endif  // MUSTER_TESTS_PARALLEL_OPTIM_RANK_H_
