// A core with just enough behaviour to test that the shell carries outputs out. A submitted job is
// persisted, and watchers are told; a worker that says hello is welcomed; an Observed advances
// every job by one step; a notice ends all jobs.
#ifndef MUSTER_TESTS_COORDINATOR_SCRIPTED_CORE_H_
#define MUSTER_TESTS_COORDINATOR_SCRIPTED_CORE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core.h"
#include "coordinator/core/schema.h"

namespace muster::coordinator {

class ScriptedCore : public Core {
 public:
  CoreOutput Handle(CoreEvent event, absl::Time) override {
    CoreOutput output;
    if (const auto* submit = std::get_if<SubmitEvent>(&event)) {
      v1::Job job;
      job.set_name(submit->spec.name());
      job.set_id(absl::StrCat(job.name(), "-", jobs_.size() + 1));
      job.set_state(v1::JOB_STATE_QUEUED);
      jobs_.push_back(job);
      Persist(jobs_.size() - 1, output);
      Announce(jobs_.size() - 1, output);
      // The reply is the first action: tests check that the shell publishes the job before it
      // replies.
      output.actions.insert(output.actions.begin(),
                            ReplyAction{submit->call, absl::OkStatus(), job});
    } else if (const auto* cancel = std::get_if<CancelEvent>(&event)) {
      const absl::StatusOr<v1::Job> job = GetJob(cancel->job);
      output.actions.push_back(
          ReplyAction{cancel->call, job.status(), job.ok() ? *job : v1::Job()});
    } else if (const auto* opened = std::get_if<SessionOpened>(&event)) {
      v1::FromCoordinator welcome;
      welcome.mutable_welcome()->set_heartbeat_interval_ms(500);
      output.actions.push_back(SendAction{opened->session, welcome});
    } else if (const auto* message = std::get_if<SessionMessage>(&event)) {
      for (size_t i = 0; i < jobs_.size(); ++i) {
        jobs_[i].set_attempts(1);
        jobs_[i].set_step(jobs_[i].step() + 1);
        if (message->message.has_notice()) jobs_[i].set_state(v1::JOB_STATE_SUCCEEDED);
        output.actions.push_back(Changed(i));
      }
    }
    return output;
  }

  uint64_t leader_term() const override { return 7; }
  const std::string& cluster_id() const override { return cluster_id_; }
  const std::string& history_id() const override { return history_id_; }
  absl::StatusOr<v1::Job> GetJob(const std::string& name_or_id) const override {
    for (auto job = jobs_.rbegin(); job != jobs_.rend(); ++job) {
      if (job->id() == name_or_id || job->name() == name_or_id) return *job;
    }
    return absl::NotFoundError(absl::StrCat("no job ", name_or_id));
  }
  std::vector<v1::Job> ListJobs(uint64_t, int, uint64_t*) const override { return {}; }
  std::vector<v1::Worker> ListWorkers() const override { return {}; }
  uint64_t last_event_sequence() const override { return last_event_; }
  absl::StatusOr<WorkerId> LogHolder(const JobId&, Epoch, int) const override {
    return absl::NotFoundError("no logs");
  }
  std::optional<SessionId> SessionOf(const WorkerId&) const override { return std::nullopt; }
  absl::StatusOr<Explained> Explain(const ExplainQuery&, absl::Time) override {
    return absl::NotFoundError("nothing waits");
  }
  // What the store has is all there is.
  OpenUsage Usage(absl::Time) override { return {.last_row = 1'000, .as_of_ms = 7'200'000}; }
  v1::GetQueuesResponse GetQueues(absl::Time) override { return {}; }
  const v1::QueuePolicy& queue_policy() const override { return policy_; }
  bool WouldDecide(absl::Time) override { return false; }
  std::vector<std::string> CheckInvariants(bool) const override { return {}; }

 private:
  void Persist(size_t index, CoreOutput& output) {
    output.batch.Put(Table::kSpecs, jobs_[index].id(), "row");
  }
  JobChanged Changed(size_t index) const {
    JobChanged changed{JobId(jobs_[index].id()), index + 1, {}};
    changed.changed[JobPart::kState] = std::make_shared<const v1::Job>(jobs_[index]);
    return changed;
  }
  void Announce(size_t index, CoreOutput& output) {
    const v1::Job& job = jobs_[index];
    v1::Event event;
    event.set_sequence(++last_event_);
    event.set_kind(v1::EVENT_KIND_JOB_STATE);
    event.set_job_id(job.id());
    event.set_job_name(job.name());
    output.batch.Put(Table::kEvents, schema::EventKey(last_event_), event.SerializeAsString());
    output.actions.push_back(Changed(index));
    output.actions.push_back(EventAppended{event});
  }

  const std::string cluster_id_ = "scripted", history_id_ = "its history";
  const v1::QueuePolicy policy_;
  std::vector<v1::Job> jobs_;
  uint64_t last_event_ = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_TESTS_COORDINATOR_SCRIPTED_CORE_H_
