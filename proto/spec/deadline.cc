#include "proto/spec/deadline.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/spec/names.h"

namespace muster::spec {

absl::StatusOr<std::variant<absl::Time, absl::Duration>> ParseDeadline(const std::string& text) {
  using Parsed = std::variant<absl::Time, absl::Duration>;
  absl::Duration after;
  if (absl::ParseDuration(text, &after) && absl::AbsDuration(after) <= kDeadlineMax) {
    return Parsed(after);
  }
  absl::Time at;
  std::string ignored;
  // Abseil reads "infinite-future" as a time as well.
  if (absl::ParseTime(absl::RFC3339_full, text, &at, &ignored) && at > absl::InfinitePast() &&
      at < absl::InfiniteFuture()) {
    return Parsed(at);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(Quoted(text),
                   " is neither a time with its zone, such as 2026-12-01T08:00:00Z, nor a duration "
                   "from the submission, such as 36h, of at most ten years"));
}

absl::Status FixDeadline(v1::JobSpec& spec, absl::Time now) {
  if (spec.deadline().empty()) return absl::OkStatus();
  const auto parsed = ParseDeadline(spec.deadline());
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("deadline: ", parsed.status().message()));
  }
  const auto* after = std::get_if<absl::Duration>(&*parsed);
  const absl::Time at = after != nullptr ? now + *after : std::get<absl::Time>(*parsed);
  if (at <= now) {
    return absl::InvalidArgumentError(
        absl::StrCat("deadline: ", Quoted(spec.deadline()), " is not later than the submission, ",
                     DeadlineText(absl::FromUnixSeconds(absl::ToUnixSeconds(now))),
                     "; choose a later one, or leave it out"));
  }
  if (at > now + kDeadlineMax) {
    return absl::InvalidArgumentError(absl::StrCat("deadline: ", Quoted(spec.deadline()),
                                                   " is more than ten years ahead; leave it out"));
  }
  spec.set_deadline(DeadlineText(at));
  return absl::OkStatus();
}

std::string DeadlineText(absl::Time deadline) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E*SZ", deadline, absl::UTCTimeZone());
}

absl::Time DeadlineOf(const v1::JobSpec& spec) {
  if (spec.deadline().empty()) return absl::InfiniteFuture();
  const auto parsed = ParseDeadline(spec.deadline());
  if (!parsed.ok()) return absl::InfiniteFuture();
  const auto* at = std::get_if<absl::Time>(&*parsed);
  return at == nullptr ? absl::InfiniteFuture() : *at;
}

}  // namespace muster::spec
