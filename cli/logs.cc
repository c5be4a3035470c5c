#include "cli/logs.h"

#include <algorithm>

#include "cli/reconnect.h"

namespace muster::cli {

absl::Status Logs(CoordinatorClient& client, const LogsOptions& options, Format format,
                  Terminal& terminal) {
  v1::GetLogsRequest request;
  request.set_name(options.job);
  request.set_rank(options.rank);
  request.set_epoch(options.epoch);
  request.set_follow(options.follow);
  request.set_tail_bytes(options.tail_bytes);
  // The position of the next byte to print, so that a stream that is opened again repeats nothing.
  uint64_t epoch = 0;
  int64_t next_offset = 0;
  const auto open = [&](Absence& absence) {
    return client.GetLogs(request, [&](const v1::LogChunk& chunk) {
      absence.Heard();
      if (chunk.epoch() < epoch) return true;
      if (chunk.epoch() > epoch) next_offset = 0;
      epoch = chunk.epoch();
      const int64_t skip = std::clamp<int64_t>(next_offset - chunk.offset(), 0,
                                               static_cast<int64_t>(chunk.data().size()));
      const std::string data = chunk.data().substr(static_cast<size_t>(skip));
      next_offset =
          std::max(next_offset, chunk.offset() + static_cast<int64_t>(chunk.data().size()));
      if (data.empty()) return true;
      if (format == Format::kTable) {
        terminal.out << data << std::flush;
      } else {
        PrintItem(Json{{"epoch", chunk.epoch()},
                       {"rank", chunk.rank()},
                       {"offset", chunk.offset() + skip},
                       {"text", data}},
                  format, terminal.out);
      }
      return terminal.out.good();
    });
  };
  if (options.follow) return ReadReconnecting(client, terminal, open);
  Absence once(absl::ZeroDuration());
  return open(once);
}

}  // namespace muster::cli
