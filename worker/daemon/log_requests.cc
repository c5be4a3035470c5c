#include "worker/daemon/log_requests.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/time.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

template <typename Request>
RankKey RankOf(const Request& request) {
  return {KeyOf(request), request.rank()};
}

int64_t LengthOf(int64_t length_max) {
  return length_max > 0 ? std::min(length_max, kLogReplyBytesMax) : kLogReplyBytesMax;
}

// Makes `reply` say why `what` of the rank cannot be had.
template <typename Reply>
Reply Refused(Reply reply, const char* what, const RankKey& rank, const std::string& worker,
              const absl::Status& why) {
  reply.set_status_code(static_cast<int>(why.code()));
  reply.set_status_message(absl::StrCat(what, " of ", ToString(rank), " on worker ", worker, ": ",
                                        std::string(why.message())));
  return reply;
}

}  // namespace

LogRequests::LogRequests(std::string attempts_directory, std::string worker, DaemonCore& core)
    : attempts_directory_(std::move(attempts_directory)), worker_(std::move(worker)), core_(core) {}

v1::LogReply LogRequests::Answer(const v1::LogRequest& request) const {
  const RankKey key = RankOf(request);
  const std::string run_directory = RunDirectory(key);
  v1::LogReply reply;
  reply.set_request(request.request());
  // Asked before the log is read, so that a closed log is read whole.
  const bool closed = ReadShimExit(run_directory).has_value();
  const std::string directory = run_directory + kLogDirectory;
  const int64_t offset =
      request.has_since() ? LogOffsetAt(directory, FromProto(request.since())) : request.offset();
  absl::StatusOr<LogChunk> chunk = ReadLog(directory, offset, LengthOf(request.length_max()));
  if (!chunk.ok()) {
    const bool may_write = core_.Holds(key.attempt) && !closed;
    if (!may_write || !absl::IsNotFound(chunk.status())) {
      return Refused(std::move(reply), "log", key, worker_, chunk.status());
    }
    reply.set_end(true);
    return reply;
  }
  reply.set_offset(chunk->offset);
  reply.set_end(chunk->end);
  reply.set_closed(closed);
  const int64_t behind = chunk->offset + static_cast<int64_t>(chunk->data.size());
  for (const LogTime& time : ReadLogTimes(directory, chunk->offset, behind)) {
    v1::LogMark& mark = *reply.add_marks();
    mark.set_offset(time.offset);
    *mark.mutable_time() = ToProto(time.time);
  }
  *reply.mutable_data() = std::move(chunk->data);
  return reply;
}

v1::CollectivesReply LogRequests::Answer(const v1::CollectivesRequest& request) {
  const RankKey key = RankOf(request);
  v1::CollectivesReply reply;
  reply.set_request(request.request());
  absl::StatusOr<v1::CollectiveRecord> record =
      ReadCollectives(RankFiles(RunDirectory(key)), CollectivesFile(request.number()));
  if (record.ok()) {
    *reply.mutable_record() = *std::move(record);
    return reply;
  }
  const absl::Status why = absl::IsNotFound(record.status())
                               ? core_.AskForCollectives(key, request.number())
                               : record.status();
  return why.ok() ? reply : Refused(std::move(reply), "collectives", key, worker_, why);
}

absl::StatusOr<v1::CollectiveRecord> LogRequests::ReadCollectives(const RankFiles& files,
                                                                  const std::string& name) const {
  ASSIGN_OR_RETURN(const std::string bytes, files.Read(name, kCollectivesBytesMax));
  v1::CollectiveRecord record;
  if (!record.ParseFromString(bytes)) {
    return absl::DataLossError(absl::StrCat(name.substr(1), " is no record of collectives"));
  }
  return record;
}

v1::ProfileReply LogRequests::Answer(const v1::ProfileRequest& request) const {
  const RankKey key = RankOf(request);
  const std::string run_directory = RunDirectory(key);
  const int64_t first_step = request.steps().first_step(), steps = request.steps().steps();
  v1::ProfileReply reply;
  reply.set_request(request.request());
  const auto refuse = [&](const absl::Status& why) {
    return Refused(std::move(reply), "profile", key, worker_, why);
  };
  // Asked before looking for the trace, so that one left just before the exit is found.
  const bool exited = ReadShimExit(run_directory).has_value();
  const std::string trace = ProfileTraceFile(first_step, steps);
  const RankFiles files(run_directory);
  const absl::StatusOr<int64_t> size = files.Size(trace);
  if (!absl::IsNotFound(size.status())) {
    if (!size.ok()) return refuse(size.status());
    const int64_t offset = std::clamp<int64_t>(request.offset(), 0, *size);
    const int64_t length = std::min(*size - offset, LengthOf(request.length_max()));
    absl::StatusOr<std::string> data = files.ReadRange(trace, offset, length);
    if (!data.ok()) return refuse(data.status());
    reply.set_recorded(true);
    reply.set_offset(offset);
    reply.set_end(offset + length == *size);
    *reply.mutable_data() = *std::move(data);
    return reply;
  }
  const auto why = files.Read(ProfileFailureFile(first_step, steps), kReportBytesMax);
  if (why.ok()) return refuse(absl::FailedPreconditionError(*why));
  if (exited || !core_.Holds(key.attempt)) {
    return refuse(
        absl::FailedPreconditionError("the rank has ended without recording these steps"));
  }
  const absl::Status asked = AskForProfile(request.steps(), files);
  return asked.ok() ? reply : refuse(asked);
}

absl::Status LogRequests::AskForProfile(const v1::ProfileSteps& steps,
                                        const RankFiles& files) const {
  const std::string wanted = steps.SerializeAsString();
  const absl::StatusOr<std::string> asked = files.Read(kProfileRequestFile, kReportBytesMax);
  if (asked.ok() && *asked == wanted) return absl::OkStatus();
  return files.Write(kProfileRequestFile, wanted);
}

std::string LogRequests::RunDirectory(const RankKey& key) const {
  return absl::StrCat(attempts_directory_, "/", RunDirectoryName(key));
}

}  // namespace muster::worker
