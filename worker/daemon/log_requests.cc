#include "worker/daemon/log_requests.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

RankKey RankOf(const v1::LogRequest& request) { return {KeyOf(request), request.rank()}; }

v1::LogReply ReplyTo(const v1::LogRequest& request) {
  v1::LogReply reply;
  reply.set_request(request.request());
  return reply;
}

// Nothing is there yet.
v1::LogReply NothingYet(const v1::LogRequest& request) {
  v1::LogReply reply = ReplyTo(request);
  reply.set_end(true);
  return reply;
}

int64_t LengthOf(const v1::LogRequest& request) {
  return request.length_max() > 0 ? std::min(request.length_max(), kLogReplyBytesMax)
                                  : kLogReplyBytesMax;
}

}  // namespace

LogRequests::LogRequests(std::string attempts_directory, std::string worker, DaemonCore& core)
    : attempts_directory_(std::move(attempts_directory)), worker_(std::move(worker)), core_(core) {}

v1::LogReply LogRequests::Answer(const v1::LogRequest& request) {
  if (request.has_profile()) return AnswerProfile(request);
  if (request.collectives() != 0) return AnswerCollectives(request);
  return AnswerLog(request);
}

v1::LogReply LogRequests::AnswerLog(const v1::LogRequest& request) const {
  const RankKey key = RankOf(request);
  const std::string run_directory = RunDirectory(key);
  // Asked before the log is read, so that a closed log is read whole.
  const bool closed = ReadShimExit(run_directory).has_value();
  absl::StatusOr<LogPiece> piece =
      ReadLog(run_directory + kLogDirectory, request.offset(), LengthOf(request));
  if (!piece.ok()) {
    const bool may_write = core_.Holds(key.attempt) && !closed;
    if (may_write && absl::IsNotFound(piece.status())) return NothingYet(request);
    return Refuse(request, "log", piece.status());
  }
  v1::LogReply reply = ReplyTo(request);
  reply.set_offset(piece->offset);
  reply.set_end(piece->end);
  reply.set_closed(closed);
  *reply.mutable_data() = std::move(piece->data);
  return reply;
}

v1::LogReply LogRequests::AnswerCollectives(const v1::LogRequest& request) {
  const RankKey key = RankOf(request);
  const auto record = files_->Read(RunDirectory(key) + CollectivesFile(request.collectives()));
  v1::LogReply reply = NothingYet(request);
  if (record.ok()) {
    reply.set_data(*record);
    return reply;
  }
  const absl::Status asked = core_.AskForCollectives(key, request.collectives());
  if (asked.ok()) return reply;
  reply = Refuse(request, "collectives", asked);
  reply.set_end(true);
  return reply;
}

v1::LogReply LogRequests::AnswerProfile(const v1::LogRequest& request) const {
  const std::string run_directory = RunDirectory(RankOf(request));
  const int64_t first_step = request.profile().first_step(), steps = request.profile().steps();
  // Asked before looking for the trace, so that one left just before the exit is found.
  const bool exited = ReadShimExit(run_directory).has_value();
  const std::string trace = run_directory + ProfileTraceFile(first_step, steps);
  if (files_->Exists(trace)) {
    const absl::StatusOr<int64_t> size = files_->Size(trace);
    if (!size.ok()) return Refuse(request, "profile", size.status());
    const int64_t offset = std::clamp<int64_t>(request.offset(), 0, *size);
    const int64_t length = std::min(*size - offset, LengthOf(request));
    absl::StatusOr<std::string> data = files_->ReadRange(trace, offset, length);
    if (!data.ok()) return Refuse(request, "profile", data.status());
    v1::LogReply reply = ReplyTo(request);
    reply.set_offset(offset);
    reply.set_end(offset + length == *size);
    reply.set_closed(true);
    *reply.mutable_data() = *std::move(data);
    return reply;
  }
  const auto why = files_->Read(run_directory + ProfileFailureFile(first_step, steps));
  if (why.ok()) return Refuse(request, "profile", absl::FailedPreconditionError(*why));
  if (exited || !core_.Holds(KeyOf(request))) {
    return Refuse(
        request, "profile",
        absl::FailedPreconditionError("the rank has ended without recording these steps"));
  }
  const absl::Status asked = AskForProfile(request, run_directory);
  return asked.ok() ? NothingYet(request) : Refuse(request, "profile", asked);
}

absl::Status LogRequests::AskForProfile(const v1::LogRequest& request,
                                        const std::string& run_directory) const {
  const std::string wanted = request.profile().SerializeAsString();
  const std::string path = run_directory + kProfileRequestFile;
  const absl::StatusOr<std::string> asked = files_->Read(path);
  if (asked.ok() && *asked == wanted) return absl::OkStatus();
  return files_->WriteAtomically(path, wanted);
}

std::string LogRequests::RunDirectory(const RankKey& key) const {
  return absl::StrCat(attempts_directory_, "/", RunDirectoryName(key));
}

v1::LogReply LogRequests::Refuse(const v1::LogRequest& request, const char* what,
                                 const absl::Status& why) const {
  v1::LogReply reply = ReplyTo(request);
  reply.set_status_code(static_cast<int>(why.code()));
  reply.set_status_message(absl::StrCat(what, " of ", ToString(RankOf(request)), " on worker ",
                                        worker_, ": ", std::string(why.message())));
  return reply;
}

}  // namespace muster::worker
