// What a daemon has to say on one stream and has not said yet.
#ifndef MUSTER_WORKER_DAEMON_OUTGOING_QUEUE_H_
#define MUSTER_WORKER_DAEMON_OUTGOING_QUEUE_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>

#include "muster/v1/session.pb.h"

namespace muster::worker {

// First in, first out, and bounded however slowly the coordinator reads: a message that says again
// what an unsent one says takes its place. Thread: one at a time.
class OutgoingQueue {
 public:
  // Drops the unsent Observed before an Observed, which takes its turn at the end: what was queued
  // before it is sent before it. A put, a get or a commit that is unsent is not queued twice.
  // A reply with part of a rank's file (log, trace, record of collectives) that would make more
  // than kFileBytesUnsentMax unsent goes without it, with RESOURCE_EXHAUSTED. False:
  // kOutgoingBytesMax would be unsent; the message is not queued.
  bool Push(v1::FromWorker message);

  bool empty() const { return messages_.empty(); }
  // The first message, which stays as it is and where it is until Pop. Requires: not empty.
  const v1::FromWorker& Send();
  // Requires: Send was called since the last Pop.
  void Pop();

  size_t size() const { return messages_.size(); }
  size_t bytes() const { return bytes_; }  // of all messages

 private:
  struct Entry {
    v1::FromWorker message;
    size_t bytes = 0;
  };
  // What a message is about; one unsent message of each subject is enough.
  struct Subject {
    v1::FromWorker::KindCase kind = v1::FromWorker::KIND_NOT_SET;
    std::string job;
    uint64_t epoch = 0;
    uint64_t number = 0;  // of the request, or the step
    friend auto operator<=>(const Subject&, const Subject&) = default;
  };
  // False: messages of its kind are all different.
  static bool SubjectOf(const v1::FromWorker& message, Subject& subject);

  std::list<Entry> messages_;
  std::map<Subject, std::list<Entry>::iterator> unsent_;
  size_t bytes_ = 0;
  size_t file_bytes_ = 0;  // of ranks' files
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_OUTGOING_QUEUE_H_
