#include "worker/rank/profiler.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

constexpr char kStepsTrack[] = "steps";  // which cli/step_breakdown.cc looks for

}  // namespace

Profiler::Profiler(FileSystem& files, std::string run_directory, int rank, std::string title,
                   std::shared_ptr<parallel::FlightRecorder> collectives)
    : files_(files),
      run_directory_(std::move(run_directory)),
      rank_(rank),
      title_(std::move(title)),
      collectives_(std::move(collectives)) {}

void Profiler::LookForRequest(int64_t step) {
  const std::string path = run_directory_ + kProfileRequestFile;
  // Cheap enough for every step: looking up a missing file takes about a microsecond.
  if (access(path.c_str(), F_OK) != 0) return;
  const absl::StatusOr<std::string> bytes = files_.Read(path);
  v1::ProfileSteps steps;
  if (!bytes.ok() || !steps.ParseFromString(*bytes) || steps.steps() < 1) return;
  if (steps.first_step() == asked_.first_step() && steps.steps() == asked_.steps()) return;
  asked_ = steps;
  waiting_ = steps.first_step() >= step;
  if (!waiting_) {
    WriteInRunDirectory(
        ProfileFailureFile(asked_.first_step(), asked_.steps()),
        absl::StrFormat("rank %d had come to step %d when it was asked for steps from %d", rank_,
                        step, steps.first_step()));
  }
}

kernels::Trace* Profiler::BeginStep(int64_t step) {
  if (run_directory_.empty()) return nullptr;
  if (trace_ == nullptr) LookForRequest(step);
  // On a device the time of a step includes the update of the step before, so recording begins one
  // step early.
  const int64_t lead = device_ == kernels::DeviceKind::kCuda ? 1 : 0;
  if (waiting_ && (step == asked_.first_step() || step == asked_.first_step() - lead)) {
    waiting_ = false;
    trace_ = std::make_shared<kernels::Trace>();
    step_ended_ = 0;
    collectives_->SetTrace(trace_);
    if (device_ == kernels::DeviceKind::kCuda) {
      auto started = kernels::DeviceTrace::Start(trace_);
      if (started.ok()) {
        device_trace_ = *std::move(started);
      } else {
        // Without the device's records the trace still has the host's; it says what is missing.
        const int64_t now = absl::GetCurrentTimeNanos();
        trace_->Add(absl::StrCat("no device records: ", started.status().message()),
                    "see the row's name", now, now + 1);
      }
    }
  }
  const bool recorded = trace_ != nullptr && step >= asked_.first_step() &&
                        step < asked_.first_step() + asked_.steps();
  return recorded ? trace_.get() : nullptr;
}

void Profiler::EndStep(int64_t step, double seconds) {
  if (trace_ == nullptr || step < asked_.first_step()) return;
  AddStep(step, seconds);
  if (step >= asked_.first_step() + asked_.steps() - 1) Finish();
}

// A span of the device's time. Spans of the host's enqueueing run ahead of it.
void Profiler::AddStep(int64_t step, double seconds) {
  const int64_t now = absl::GetCurrentTimeNanos();
  trace_->Add(kStepsTrack, absl::StrCat("step ", step),
              std::max(step_ended_, now - static_cast<int64_t>(seconds * 1e9)), now);
  step_ended_ = now;
}

void Profiler::Finish() {
  device_trace_.reset();
  collectives_->SetTrace(nullptr);
  WriteInRunDirectory(ProfileTraceFile(asked_.first_step(), asked_.steps()),
                      trace_->ToJson(rank_, title_));
  trace_.reset();
}

void Profiler::WriteInRunDirectory(const std::string& file, const std::string& text) {
  // A full disk costs the profile, not the job.
  files_.WriteAtomically(run_directory_ + file, text).IgnoreError();
}

}  // namespace muster::worker
