// The arrays of the cluster: which jobs are tasks of which, and which of them may wait for devices.
#ifndef MUSTER_COORDINATOR_CORE_ARRAYS_H_
#define MUSTER_COORDINATOR_CORE_ARRAYS_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "coordinator/core/job_entry.h"

namespace muster::coordinator {

struct Array {
  std::string name;
  std::string id;  // ArrayTask.array_id
  int32_t tasks = 0;
  int32_t max_running = 0;           // 0: no limit
  uint64_t sequence = 0;             // the smallest submit sequence of its known tasks
  std::map<int32_t, JobId> jobs;     // by index; old ended ones are forgotten
  std::set<JobId> live;              // of these
  std::set<JobId> admitted;          // of `live`: they run, or wait for devices
  std::map<int32_t, JobId> waiting;  // by index: they wait until they are admitted
  bool task_failed = false;          // a known one has failed or was cancelled
};

// Nothing of it is durable: a live task is admitted if and only if it has an attempt or
// StateRow.queued is set, and whatever else is here follows from the jobs. Value type; one thread.
class ArrayTable {
 public:
  // A task that is submitted, or recovered. Does nothing for other jobs; so do those below.
  void Add(const JobEntry& job);
  // It may wait for devices: it was admitted before, or is now. False: as many tasks as may do; it
  // waits for TakeNext.
  bool Admit(const JobEntry& job);
  // It neither runs nor waits any more, while it is held or since it has ended.
  void Leave(const JobEntry& job);
  // To be called when it has entered its final state.
  void Ended(const JobEntry& job);
  void Forget(const JobEntry& job);

  // The tasks whose turn has come, in order of index, which are admitted with this.
  std::vector<JobId> TakeNext();
  // Whether TakeNext may have any.
  bool pending() const { return !left_.empty(); }
  // It waits for TakeNext.
  bool Waits(const JobEntry& job) const;

  // Null when no task of such an array is known. The newest of that name.
  const Array* FindId(const std::string& id) const;
  const Array* FindName(const std::string& name) const;
  // For checks.
  const std::map<std::string, Array>& all() const { return arrays_; }

 private:
  Array* Of(const JobEntry& job);

  std::map<std::string, Array> arrays_;                             // by id
  std::map<std::string, std::map<uint64_t, std::string>> by_name_;  // ids by sequence
  std::set<std::string> left_;                                      // a task has left it
};

// Without what has become of its tasks.
v1::ArrayReport ReportOf(const Array& array);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_ARRAYS_H_
