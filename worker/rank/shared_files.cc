#include "worker/rank/shared_files.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/failure.h"
#include "worker/rank/engine_spec.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using parallel::Mark;

constexpr int64_t kReadAtOnce = 4 << 20;
constexpr uint64_t kHeaderBytesMax = 256 << 20;  // of a safetensors file; more is garbage
constexpr char kTokenPrefix[] = ".same-directory.e";
constexpr absl::Duration kLookAgain = absl::Milliseconds(100);

absl::StatusOr<std::string> SizeAndChecksum(FileSystem& files, const std::string& path,
                                            int64_t begin = 0, int64_t count = -1) {
  ASSIGN_OR_RETURN(const int64_t size, files.Size(path));
  const int64_t end = count < 0 ? size : std::min(size, begin + count);
  uint32_t crc = 0;
  for (int64_t at = begin; at < end; at += kReadAtOnce) {
    ASSIGN_OR_RETURN(const std::string bytes,
                     files.ReadRange(path, at, std::min(kReadAtOnce, end - at)));
    crc = parallel::Crc32c(bytes, crc);
  }
  return absl::StrFormat("%d bytes, CRC32C %08x", size, crc);
}

absl::StatusOr<std::string> DescribeDataset(FileSystem& files, const std::string& prefix) {
  ASSIGN_OR_RETURN(const std::string index, SizeAndChecksum(files, prefix + ".idx"));
  ASSIGN_OR_RETURN(const int64_t tokens, files.Size(prefix + ".bin"));
  return absl::StrCat("an index of ", index, ", and ", tokens, " bytes of tokens");
}

absl::StatusOr<std::string> DescribeWeights(FileSystem& files, const std::string& directory) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(directory));
  std::vector<std::string> parts;
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(directory, "/", name);
    if (absl::EndsWith(name, ".json")) {
      ASSIGN_OR_RETURN(const std::string text, SizeAndChecksum(files, path));
      parts.push_back(absl::StrCat(name, ": ", text));
    } else if (absl::EndsWith(name, ".safetensors")) {
      ASSIGN_OR_RETURN(const std::string length, files.ReadRange(path, 0, sizeof(uint64_t)));
      uint64_t header = 0;
      std::memcpy(&header, length.data(), sizeof(header));
      ASSIGN_OR_RETURN(
          const std::string text,
          SizeAndChecksum(files, path, 0,
                          static_cast<int64_t>(std::min(header, kHeaderBytesMax) + 8)));
      parts.push_back(absl::StrCat(name, ": ", text, " of its header"));
    }
  }
  return absl::StrJoin(parts, "; ");
}

std::string NameOf(const RankHost& host) {
  return absl::StrCat("worker ", host.worker, " (host ", host.host, ")");
}

absl::StatusOr<std::vector<std::string>> Gather(parallel::Communicator& world,
                                                kernels::Device& device, const std::string& text) {
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  auto texts = parallel::GatherTexts(world, *stream, text);
  if (!texts.ok()) {
    return Mark(Annotate(texts.status(), "comparison of files"), FailureDomain::kCommunication);
  }
  return texts;
}

// Whether `rank` is the first rank of its worker, which looks at files for the others.
bool Speaks(const std::vector<RankHost>& hosts, int rank) {
  for (int before = 0; before < rank; ++before) {
    const RankHost& other = hosts[static_cast<size_t>(before)];
    const RankHost& own = hosts[static_cast<size_t>(rank)];
    if (other.worker == own.worker && other.host == own.host) return false;
  }
  return true;
}

std::string TokenPath(const std::string& directory, uint64_t epoch, int rank) {
  return absl::StrCat(directory, "/", kTokenPrefix, epoch, ".rank-", rank);
}

void RemoveStaleTokens(FileSystem& files, const std::string& directory, uint64_t epoch) {
  const auto names = files.List(directory);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, kTokenPrefix)) continue;
    const std::string rest = name.substr(sizeof(kTokenPrefix) - 1);
    uint64_t of = 0;
    if (absl::SimpleAtoi(rest.substr(0, rest.find('.')), &of) && of < epoch) {
      files.RemoveFile(absl::StrCat(directory, "/", name)).IgnoreError();
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<Input>> DescribeInputs(const v1::JobSpec& spec, FileSystem& files) {
  std::vector<Input> inputs;
  const auto add = [&](const std::string& field, const std::string& path,
                       absl::StatusOr<std::string> content) -> absl::Status {
    if (!content.ok()) return Mark(Annotate(content.status(), field), FailureDomain::kData);
    inputs.push_back({field, path, *std::move(content)});
    return absl::OkStatus();
  };
  const v1::DataSpec& data = spec.engine().data();
  for (const auto& [name, list] :
       {std::make_pair("train", &data.train()), std::make_pair("validation", &data.validation())}) {
    for (int i = 0; i < list->size(); ++i) {
      const std::string path = ResolvePath(spec, (*list)[i].path());
      RETURN_IF_ERROR(add(absl::StrCat("engine.data.", name, "[", i, "].path"), path,
                          DescribeDataset(files, path)));
    }
  }
  if (const std::string& from = spec.engine().model().initialize_from(); !from.empty()) {
    const std::string path = ResolvePath(spec, from);
    RETURN_IF_ERROR(add("engine.model.initialize_from", path, DescribeWeights(files, path)));
  }
  return inputs;
}

absl::Status CheckInputs(parallel::Communicator& world, kernels::Device& device,
                         const std::vector<RankHost>& hosts, const std::vector<Input>& inputs) {
  std::vector<std::string> lines;
  for (const Input& input : inputs) {
    lines.push_back(absl::StrJoin({input.field, input.path, input.content}, "\t"));
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                   Gather(world, device, absl::StrJoin(lines, "\n")));
  size_t first = texts.size();
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    if (first == texts.size()) first = rank;
    if (texts[rank] == texts[first]) continue;
    const std::vector<std::string> theirs = absl::StrSplit(texts[rank], '\n');
    const std::vector<std::string> ours = absl::StrSplit(texts[first], '\n');
    for (size_t i = 0; i < std::min(ours.size(), theirs.size()); ++i) {
      if (ours[i] == theirs[i]) continue;
      const std::vector<std::string> here = absl::StrSplit(ours[i], '\t');
      const std::vector<std::string> there = absl::StrSplit(theirs[i], '\t');
      return Mark(absl::FailedPreconditionError(
                      absl::StrCat(here[0], ": ", here.size() > 1 ? here[1] : "",
                                   " is not the same on all hosts: ", NameOf(hosts[first]), " has ",
                                   here.back(), "; ", NameOf(hosts[rank]), " has ", there.back(),
                                   ". Every worker must have the same files under the same paths")),
                  FailureDomain::kData);
    }
    return Mark(absl::FailedPreconditionError("the ranks have different lists of inputs"),
                FailureDomain::kData);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> GroupsByDirectory(parallel::Communicator& world,
                                                   kernels::Device& device, FileSystem& files,
                                                   const std::vector<RankHost>& hosts,
                                                   const std::string& directory, uint64_t epoch,
                                                   absl::Duration patience) {
  const int rank = world.rank();
  const bool speaks = Speaks(hosts, rank);
  absl::Status failure;
  std::string token;
  if (speaks) {
    token = RandomId();
    failure = files.MakeDirectory(directory);
    if (failure.ok()) failure = files.WriteAtomically(TokenPath(directory, epoch, rank), token);
  }
  // A rank that cannot write takes part all the same, so that nobody waits for it.
  ASSIGN_OR_RETURN(const std::vector<std::string> tokens, Gather(world, device, token));
  int lowest = rank;
  if (speaks && failure.ok()) {
    const absl::Time deadline = absl::Now() + patience;
    do {
      for (int other = 0; other < rank && lowest == rank; ++other) {
        if (tokens[static_cast<size_t>(other)].empty()) continue;
        const auto seen = files.Read(TokenPath(directory, epoch, other));
        if (seen.ok() && *seen == tokens[static_cast<size_t>(other)]) lowest = other;
      }
      if (lowest < rank || rank == 0 || absl::Now() >= deadline) break;
      absl::SleepFor(kLookAgain);
    } while (true);
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> seen,
                   Gather(world, device, failure.ok() ? absl::StrCat(lowest) : "failed"));
  if (speaks && failure.ok()) {
    files.RemoveFile(TokenPath(directory, epoch, rank)).IgnoreError();
    if (lowest == rank) RemoveStaleTokens(files, directory, epoch);
  }
  if (!failure.ok()) {
    return Mark(Annotate(failure, absl::StrCat("checkpoint.path on ", NameOf(hosts[rank]))),
                FailureDomain::kStorage);
  }
  std::vector<int> groups;
  for (size_t of = 0; of < seen.size(); ++of) {
    int lower = 0;
    if (!absl::SimpleAtoi(seen[of], &lower)) {
      return Mark(absl::UnavailableError(absl::StrCat("checkpoint.path: ", NameOf(hosts[of]),
                                                      " cannot write to ", directory)),
                  FailureDomain::kStorage);
    }
    // A rank that sees the file of rank `lower` belongs to that rank's group, even where a cache
    // still hides the file of the group's first rank from it.
    const auto index = static_cast<size_t>(lower);
    groups.push_back(index < of ? groups[index] : lower);
  }
  // The other ranks of a worker see the same files as its first one.
  for (size_t of = 0; of < groups.size(); ++of) {
    for (size_t before = 0; before < of; ++before) {
      if (hosts[before].worker == hosts[of].worker && hosts[before].host == hosts[of].host) {
        groups[of] = groups[before];
        break;
      }
    }
  }
  return groups;
}

absl::Status CheckShared(const std::vector<int>& groups, const std::vector<RankHost>& hosts,
                         const std::string& directory) {
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    if (groups[rank] == 0) continue;
    return Mark(absl::FailedPreconditionError(absl::StrCat(
                    "checkpoint.path: ", directory, " on ", NameOf(hosts[rank]),
                    " is another directory than on ", NameOf(hosts[0]),
                    ": every host of the job must mount one shared file system there; or set "
                    "checkpoint.storage to local, and each host keeps its own part")),
                FailureDomain::kStorage);
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
