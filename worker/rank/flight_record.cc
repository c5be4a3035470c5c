#include "worker/rank/flight_record.h"

#include <google/protobuf/util/time_util.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file_system.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

google::protobuf::Timestamp TimestampOf(absl::Time time) {
  return google::protobuf::util::TimeUtil::NanosecondsToTimestamp(absl::ToUnixNanos(time));
}

v1::CollectiveState StateOf(parallel::FlightRecorder::State state) {
  switch (state) {
    case parallel::FlightRecorder::State::kUnfinished:
      return v1::COLLECTIVE_STATE_UNFINISHED;
    case parallel::FlightRecorder::State::kFinished:
      return v1::COLLECTIVE_STATE_FINISHED;
    default:
      return v1::COLLECTIVE_STATE_FAILED;
  }
}

v1::Collective CollectiveOf(const parallel::FlightRecorder::Call& call) {
  v1::Collective collective;
  collective.set_group(call.group);
  collective.set_path(call.path);
  collective.set_number(static_cast<int64_t>(call.number));
  collective.set_operation(call.operation);
  collective.set_dtype(kernels::Name(call.dtype));
  collective.set_elements(call.elements);
  collective.set_bytes(call.bytes());
  collective.set_peer(call.peer);
  *collective.mutable_enqueued() = TimestampOf(call.enqueued);
  collective.set_state(StateOf(call.state));
  return collective;
}

v1::CollectiveRecord RecordOf(const parallel::FlightRecorder& recorder) {
  v1::CollectiveRecord record;
  *record.mutable_time() = TimestampOf(absl::Now());
  for (const parallel::FlightRecorder::Call& call : recorder.Calls()) {
    *record.add_collectives() = CollectiveOf(call);
  }
  return record;
}

}  // namespace

FlightRecord::FlightRecord(std::string run_directory, Logger& logger)
    : run_directory_(std::move(run_directory)),
      logger_(logger),
      recorder_(std::make_shared<parallel::FlightRecorder>()) {}

void FlightRecord::Answer(uint64_t number) {
  if (run_directory_.empty()) return;
  const auto files = PosixFileSystem();
  const std::string path = run_directory_ + CollectivesFile(number);
  const absl::Status written =
      files->WriteAtomically(path, RecordOf(*recorder_).SerializeAsString());
  if (!written.ok()) {
    logger_.Warning("cannot write the record of collectives that was asked for",
                    {{"path", path}, {"reason", written.ToString()}});
    return;
  }
  if (!answer_.empty()) files->RemoveFile(answer_).IgnoreError();
  answer_ = path;
}

void FlightRecord::AddPositions(v1::RankProgress& progress) const {
  progress.clear_groups();
  const absl::Time now = absl::Now();
  for (const auto& [path, position] : recorder_->Positions()) {
    v1::GroupPosition& group = *progress.add_groups();
    group.set_group(position.group);
    group.set_path(path);
    group.set_calls(static_cast<int64_t>(position.calls));
    if (!position.unfinished.has_value()) continue;
    *group.mutable_unfinished() = CollectiveOf(*position.unfinished);
    group.set_waited_seconds(absl::ToDoubleSeconds(now - position.unfinished->enqueued));
  }
}

void FlightRecord::Dump() {
  {
    MutexLock lock(&mutex_);
    if (dumped_) return;
    dumped_ = true;
  }
  const std::string calls = recorder_->Dump();
  if (calls.empty()) return;
  std::string path;
  absl::Status written;
  if (!run_directory_.empty()) {
    path = run_directory_ + kCollectivesLogFile;
    written = PosixFileSystem()->WriteAtomically(path, calls);
  }
  logger_.Error("collectives of this rank", {{"unfinished", recorder_->Unfinished()},
                                             {"record", written.ok() ? path : written.ToString()}});
}

}  // namespace muster::worker
