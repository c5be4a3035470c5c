#include "kernels/device/replay.h"

#include <algorithm>

namespace muster::kernels {

bool Replay::Run(const Key& key, absl::FunctionRef<void()> work) {
  Entry& entry = entries_[key];
  if (entry.recorded != nullptr) {
    if (stream_.Run(*entry.recorded)) return false;
    // Scratch memory has moved. The work on it is done: growing waits for the stream.
    entry.recorded.reset();
  }
  if (!entry.warm || entry.gave_up || !stream_.BeginRecording()) {
    entry.warm = true;
    work();
    return true;
  }
  work();
  entry.recorded = stream_.EndRecording();
  if (entry.recorded != nullptr && stream_.Run(*entry.recorded)) return true;
  entry.recorded.reset();
  entry.gave_up = true;
  work();
  return true;
}

int Replay::recordings() const {
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(), [](const auto& entry) {
    return entry.second.recorded != nullptr;
  }));
}

}  // namespace muster::kernels
