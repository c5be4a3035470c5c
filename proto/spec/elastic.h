// The sizes of an elastic job: the numbers of ranks in its range that its layout allows.
#ifndef MUSTER_PROTO_SPEC_ELASTIC_H_
#define MUSTER_PROTO_SPEC_ELASTIC_H_

#include <cstdint>
#include <vector>

#include "muster/v1/spec.pb.h"

namespace muster::spec {

// A job may have so many sizes at most.
constexpr int kSizesMax = 1024;
// Of resources.ranks.max.
constexpr int kElasticRanksMax = 65'536;

// resources.ranks is a range.
inline bool IsElastic(const v1::JobSpec& spec) { return spec.resources().has_rank_range(); }

// The numbers of ranks that a job with these degrees can run with, ascending: without a range
// resources.ranks alone; else those in the range that engine.parallel and the batches allow, with
// engine.parallel.data as what varies; of a command all that placement.segment divides. Empty when
// none is possible; of more than kSizesMax the first kSizesMax + 1. Requires: ApplyDefaults has set
// the other degrees.
std::vector<int32_t> SizesOf(const v1::JobSpec& spec);

// The spec of an attempt with so many ranks: without a range, with the data-parallel degree that
// goes with them. A spec without a range stays as it is.
v1::JobSpec AtSize(const v1::JobSpec& spec, int32_t ranks);

// The same with one data-parallel replica.
v1::JobSpec OneReplica(const v1::JobSpec& spec);

// Whether the job can be stopped with a checkpoint from which it goes on with other ranks.
bool ResizesWhileRunning(const v1::JobSpec& spec);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_ELASTIC_H_
