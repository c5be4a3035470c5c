#include "worker/daemon/record_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "muster/v1/daemon_state.pb.h"

namespace muster::worker {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr size_t kHeaderBytes = kLengthBytes + 8;

uint64_t HashOf(absl::string_view bytes) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

void AppendNumber(uint64_t number, size_t bytes, std::string& out) {
  for (size_t i = 0; i < bytes; ++i) out.push_back(static_cast<char>(number >> (8 * i)));
}

uint64_t NumberIn(absl::string_view bytes) {
  uint64_t number = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    number |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return number;
}

std::string EntryOf(const std::vector<DaemonRecord>& changes) {
  v1::RecordChanges payload;
  for (const DaemonRecord& change : changes) {
    v1::RecordChange& added = *payload.add_changes();
    added.set_name(change.name);
    if (change.value.has_value()) added.set_value(*change.value);
  }
  const std::string bytes = payload.SerializeAsString();
  std::string entry;
  entry.reserve(kHeaderBytes + bytes.size());
  AppendNumber(bytes.size(), kLengthBytes, entry);
  AppendNumber(HashOf(bytes), kHeaderBytes - kLengthBytes, entry);
  return entry + bytes;
}

// Takes the first entry off `rest`. False: it is not whole, or damaged.
bool TakeEntry(absl::string_view& rest, std::vector<DaemonRecord>& changes) {
  if (rest.size() < kHeaderBytes) return false;
  const uint64_t length = NumberIn(rest.substr(0, kLengthBytes));
  const uint64_t hash = NumberIn(rest.substr(kLengthBytes, kHeaderBytes - kLengthBytes));
  if (rest.size() - kHeaderBytes < length) return false;
  const absl::string_view bytes = rest.substr(kHeaderBytes, length);
  v1::RecordChanges payload;
  if (HashOf(bytes) != hash || !payload.ParseFromArray(bytes.data(), static_cast<int>(length))) {
    return false;
  }
  for (v1::RecordChange& change : *payload.mutable_changes()) {
    DaemonRecord& record = changes.emplace_back();
    record.name = change.name();
    if (change.has_value()) record.value = std::move(*change.mutable_value());
  }
  rest.remove_prefix(kHeaderBytes + length);
  return true;
}

// Whether what begins with an entry that cannot be read is the rest of one write that a crash cut
// short: nothing of it follows the entry, or, where the file grew before its bytes were written,
// nothing but zeros.
bool CutShort(absl::string_view rest) {
  if (std::all_of(rest.begin(), rest.end(), [](char c) { return c == 0; })) return true;
  if (rest.size() < kHeaderBytes) return true;
  const uint64_t length = NumberIn(rest.substr(0, kLengthBytes));
  return rest.size() - kHeaderBytes <= length;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RecordLog>> RecordLog::Open(FileSystem& files,
                                                           const std::string& directory) {
  std::unique_ptr<RecordLog> log(new RecordLog(files, directory));
  if (!files.Exists(log->path())) {
    RETURN_IF_ERROR(log->ReadOldFiles());
    RETURN_IF_ERROR(log->Rewrite());
  } else {
    RETURN_IF_ERROR(log->Read());
    ASSIGN_OR_RETURN(log->file_, files.Reopen(log->path(), log->bytes_));
  }
  // Those of an earlier version are in the journal now.
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(directory));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(directory, "/", name);
    if (path != log->path()) RETURN_IF_ERROR(files.RemoveFile(path));
  }
  return log;
}

absl::Status RecordLog::Read() {
  ASSIGN_OR_RETURN(const std::string bytes, files_.Read(path()));
  absl::string_view rest = bytes;
  std::vector<DaemonRecord> changes;
  while (TakeEntry(rest, changes)) {
    Apply(changes);
    changes.clear();
  }
  bytes_ = static_cast<int64_t>(bytes.size() - rest.size());
  if (CutShort(rest)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "the daemon's records in ", path(), " are damaged at byte ", bytes_, " of ", bytes.size(),
      "; end the ranks of this worker, move the file away and start the "
      "daemon again: it joins as a new one"));
}

absl::Status RecordLog::ReadOldFiles() {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files_.List(directory_));
  for (const std::string& name : names) {
    if (absl::EndsWith(name, ".tmp")) continue;  // left by a write that was cut short
    ASSIGN_OR_RETURN(records_[name], files_.Read(absl::StrCat(directory_, "/", name)));
  }
  return absl::OkStatus();
}

void RecordLog::Apply(const std::vector<DaemonRecord>& changes) {
  for (const DaemonRecord& change : changes) {
    if (change.value.has_value()) {
      records_[change.name] = *change.value;
    } else {
      records_.erase(change.name);
    }
  }
}

int64_t RecordLog::RecordBytes() const {
  size_t bytes = 0;
  for (const auto& [name, value] : records_) bytes += name.size() + value.size();
  return static_cast<int64_t>(bytes);
}

absl::Status RecordLog::Rewrite() {
  std::vector<DaemonRecord> all;
  for (const auto& [name, value] : records_) all.push_back({name, value});
  const std::string entry = EntryOf(all);
  RETURN_IF_ERROR(files_.WriteAtomically(path(), entry));
  bytes_ = static_cast<int64_t>(entry.size());
  ASSIGN_OR_RETURN(file_, files_.Reopen(path(), bytes_));
  return absl::OkStatus();
}

absl::Status RecordLog::Write(const std::vector<DaemonRecord>& changes) {
  if (changes.empty()) return absl::OkStatus();
  Apply(changes);
  if (bytes_ > std::max(kJournalBytes, 4 * RecordBytes())) return Rewrite();
  const std::string entry = EntryOf(changes);
  RETURN_IF_ERROR(file_->Append(entry));
  RETURN_IF_ERROR(file_->Sync());
  bytes_ += static_cast<int64_t>(entry.size());
  return absl::OkStatus();
}

}  // namespace muster::worker
