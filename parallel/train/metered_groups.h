// The groups of a rank whose calls on the computing stream count as waiting.
#ifndef MUSTER_PARALLEL_TRAIN_METERED_GROUPS_H_
#define MUSTER_PARALLEL_TRAIN_METERED_GROUPS_H_

#include <memory>

#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/exposure.h"
#include "parallel/comm/mesh_groups.h"

namespace muster::parallel {

struct MeteredGroups {
  // Counts `steps` steps at once. All arguments must outlive it.
  MeteredGroups(kernels::Device& device, kernels::Stream& compute, MeshGroups& groups, int steps)
      : meter(device, compute, steps),
        world(meter.Around(groups.world(), Exposure::kSlowest)),
        gather(meter.Around(groups.gather(), Exposure::kParameters)),
        tensor(meter.Around(groups.Along({Axis::kTensor}), Exposure::kTensor)),
        context(meter.Around(groups.Along({Axis::kContext}), Exposure::kContext)),
        pipeline(meter.Around(groups.Along({Axis::kPipeline}), Exposure::kPipeline)) {}

  ExposureMeter meter;
  const std::unique_ptr<Communicator> world, gather, tensor, context, pipeline;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_METERED_GROUPS_H_
