// What several RPCs do with their requests.
#ifndef MUSTER_COORDINATOR_RPC_REQUESTS_H_
#define MUSTER_COORDINATOR_RPC_REQUESTS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// kInvalidArgument when this cannot be the name or id of a job.
inline absl::Status CheckJobName(const std::string& name) {
  if (name.empty()) return absl::InvalidArgumentError("name: a job's name or id is required");
  if (name.size() > kNameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", name.size(), " bytes, at most ", kNameBytesMax, " are possible"));
  }
  return absl::OkStatus();
}

// kInvalidArgument when the job has no such rank.
inline absl::Status CheckRank(const v1::Job& job, int32_t rank) {
  const int ranks = job.spec().resources().ranks();
  if (rank >= 0 && rank < ranks) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank: ", rank, " is not in 0 to ", ranks - 1, ", the ranks of job ", job.id()));
}

inline absl::StatusOr<int> PageSize(int asked) {
  if (asked < 0 || asked > kPageSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size: ", asked, " is not in 0 to ", kPageSizeMax));
  }
  return asked == 0 ? kPageSizeDefault : asked;
}

// A page token is "<kind><position>". The kind says which listing it is of, so that a token of
// another listing is refused.
inline absl::Status TokenError() {
  return absl::InvalidArgumentError(
      "page_token: not from a page of this listing; start again without one");
}

// 0 when there is no token.
inline absl::StatusOr<uint64_t> Position(const std::string& token, char kind) {
  uint64_t position = 0;
  if (token.empty()) return position;
  if (token[0] != kind || !absl::SimpleAtoi(token.substr(1), &position) || position == 0) {
    return TokenError();
  }
  return position;
}

// True when `event` is about this job, given by name or id; an empty `job` stands for every event.
inline bool IsAbout(const v1::Event& event, const std::string& job) {
  return job.empty() || event.job_id() == job || event.job_name() == job;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_REQUESTS_H_
