#include <google/protobuf/util/delimited_message_util.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/pull_stream.h"
#include "coordinator/rpc/streams.h"
#include "coordinator/store/store.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;

// What a row tells without its secrets: the identities by which daemons own their names, the values
// of bootstrap keys, and the hashes of tokens. Rows and the log leave out the same, so that they
// still agree.
std::string Redacted(Table table, const std::string& value) {
  switch (table) {
    case Table::kKeyValue:
      return "";
    case Table::kWorkers: {
      v1::Worker worker;
      if (!worker.ParseFromString(value)) return value;
      worker.clear_identity();
      return schema::Serialize(worker);
    }
    case Table::kTokens: {
      v1::TokenRow row;
      if (!row.ParseFromString(value)) return value;
      row.clear_secret_hash();
      return schema::Serialize(row);
    }
    case Table::kLog: {
      v1::LogEntry entry;
      if (!entry.ParseFromString(value)) return value;
      for (v1::RowChange& change : *entry.mutable_changes()) {
        const std::optional<Table> changed = TableNamed(change.table());
        if (!change.has_value() || !changed.has_value()) continue;
        change.set_value(Redacted(*changed, change.value()));
      }
      return schema::Serialize(entry);
    }
    default:
      return value;
  }
}

// Copies the state to a directory of its own, which costs links, and reads the copy row by row.
class SnapshotStream : public PullStream<v1::SnapshotChunk> {
 public:
  SnapshotStream(Shell& shell, const std::string& directory, absl::StatusOr<Permit> permit)
      : PullStream(shell, "Snapshot", std::move(permit)),
        path_(absl::StrCat(directory, "/", absl::ToUnixNanos(absl::Now()))) {}
  ~SnapshotStream() override {
    copy_.reset();
    std::error_code error;
    fs::remove_all(path_, error);
  }

 private:
  bool WatchesEvents() const override { return true; }

  absl::Status OnOpen(const std::shared_ptr<const v1::Job>&) override {
    std::error_code error;
    fs::create_directories(fs::path(path_).parent_path(), error);
    if (error) return absl::UnavailableError(absl::StrCat(path_, ": ", error.message()));
    shell().Backup(path_, [self = shared_from_this()](const absl::Status& status) {
      auto& stream = static_cast<SnapshotStream&>(*self);
      absl::StatusOr<std::unique_ptr<Store>> copy =
          status.ok() ? OpenRocksDbStoreForReading(stream.path_)
                      : absl::StatusOr<std::unique_ptr<Store>>(status);
      stream.Post([copy = std::move(copy)](PullStream& base) mutable {
        auto& snapshot = static_cast<SnapshotStream&>(base);
        snapshot.copy_ = std::move(copy);
        snapshot.Pump();
      });
    });
    return absl::OkStatus();
  }

  Step Next(v1::SnapshotChunk* message, absl::Status* status) override {
    if (!copy_.has_value()) return Step::kWait;
    if (!copy_->ok()) {
      *status = copy_->status();
      return Step::kEnd;
    }
    std::ostringstream data;
    while (table_ < static_cast<size_t>(Table::kTableCount) && data.tellp() < kSnapshotChunkBytes) {
      bool full = false;
      *status = (**copy_)->Scan(static_cast<Table>(table_), key_, "",
                                [&](const std::string& key, const std::string& value) {
                                  full = data.tellp() >= kSnapshotChunkBytes;
                                  if (full) return false;
                                  v1::SnapshotRow row;
                                  row.set_table(Name(static_cast<Table>(table_)));
                                  row.set_key(key);
                                  row.set_value(Redacted(static_cast<Table>(table_), value));
                                  google::protobuf::util::SerializeDelimitedToOstream(row, &data);
                                  key_ = key + '\0';
                                  return true;
                                });
      if (!status->ok()) return Step::kEnd;
      if (full) break;
      ++table_;
      key_.clear();
    }
    message->set_data(std::move(data).str());
    return message->data().empty() ? Step::kEnd : Step::kSend;
  }

  const std::string path_;
  std::optional<absl::StatusOr<std::unique_ptr<Store>>> copy_;
  size_t table_ = 0;  // the table of the next row
  std::string key_;   // and its lowest possible key
};

}  // namespace

grpc::ServerWriteReactor<v1::SnapshotChunk>* StartSnapshotStream(Shell& shell,
                                                                 const std::string& directory,
                                                                 absl::StatusOr<Permit> permit) {
  const auto stream = std::make_shared<SnapshotStream>(shell, directory, std::move(permit));
  stream->Begin("");
  return stream.get();
}

}  // namespace muster::coordinator
