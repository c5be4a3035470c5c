// The CPU devices of this machine, and its name.
#ifndef MUSTER_WORKER_DAEMON_MACHINE_H_
#define MUSTER_WORKER_DAEMON_MACHINE_H_

#include <string>
#include <vector>

#include "muster/v1/job.pb.h"

namespace muster::worker {

// cpu:0 .. cpu:slots-1, spread evenly over the NUMA nodes, each with an equal share of the memory.
// Requires: slots >= 0.
std::vector<v1::Device> CpuSlots(int slots);
// How many CPUs this process may run on; at least 1.
int UsableCpus();
std::string HostName();

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_MACHINE_H_
