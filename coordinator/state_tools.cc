#include "coordinator/state_tools.h"

#include <filesystem>
#include <memory>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;

absl::Status Failed(const std::string& what, const std::error_code& error) {
  return absl::UnavailableError(absl::StrCat("cannot ", what, ": ", error.message()));
}

// Opens the copy and marks it, so that nothing but a whole restore is left behind.
absl::Status Mark(const std::string& copy, absl::Time now) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, OpenRocksDbStore(copy, "", ""));
  return MarkRestored(*store, now);
}

}  // namespace

absl::StatusOr<StoreContents> VerifyBackup(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, OpenRocksDbStoreForReading(directory));
  return Verify(*store);
}

absl::StatusOr<StoreContents> RestoreBackup(const std::string& directory,
                                            const std::string& data_dir, absl::Time now) {
  ASSIGN_OR_RETURN(const StoreContents contents, VerifyBackup(directory));
  const std::string target = StateDirectoryOf(data_dir), partial = target + ".partial";
  std::error_code error;
  if (fs::exists(target, error)) {
    return absl::AlreadyExistsError(
        absl::StrCat(target,
                     " exists: a backup is restored to a new data directory, never over a "
                     "state; move the old one away or name another --data-dir"));
  }
  fs::create_directories(data_dir, error);
  if (error) return Failed(absl::StrCat("make ", data_dir), error);
  fs::remove_all(partial, error);
  fs::copy(directory, partial, fs::copy_options::recursive, error);
  absl::Status status =
      error ? Failed(absl::StrCat("copy ", directory, " to ", partial), error) : Mark(partial, now);
  if (status.ok()) {
    fs::rename(partial, target, error);
    if (error) status = Failed(absl::StrCat("rename ", partial, " to ", target), error);
  }
  if (!status.ok()) {
    fs::remove_all(partial, error);
    return status;
  }
  return contents;
}

}  // namespace muster::coordinator
