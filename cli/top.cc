#include "cli/top.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "cli/usage.h"
#include "proto/class_time.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

constexpr size_t kJobsMax = 1000;
constexpr size_t kQueueLinesMax = 6;

using Rows = std::vector<std::vector<std::string>>;

std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

// At most `columns` characters, cut between them: names may hold any UTF-8.
std::string Cut(const std::string& line, int columns) {
  size_t end = 0;
  for (int width = 0; end < line.size(); ++width) {
    if (width == columns) return line.substr(0, end);
    do {
      ++end;
    } while (end < line.size() && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80);
  }
  return line;
}

// Devices that the job holds now, shared ones by its share.
double DevicesOf(const v1::Job& job) {
  double devices = 0;
  for (const v1::ClassTime& time : job.usage().times()) devices += DevicesIn(time);
  return devices;
}

std::string ClassOf(const v1::Job& job) {
  for (const v1::ClassTime& time : job.usage().times()) {
    if (DevicesIn(time) > 0) return spec::EnumName(time.usage_class());
  }
  return "-";
}

double LossOf(const v1::Job& job) { return job.train_loss(); }

struct Order {
  const char* name;
  // Whether `a` comes before `b`.
  bool (*before)(const v1::Job& a, const v1::Job& b);
};
const Order kOrders[] = {
    // Running ones first, then those that wait, each by name.
    {"state",
     [](const v1::Job& a, const v1::Job& b) {
       return std::make_pair(DevicesOf(a) == 0, a.name()) <
              std::make_pair(DevicesOf(b) == 0, b.name());
     }},
    {"name", [](const v1::Job& a, const v1::Job& b) { return a.name() < b.name(); }},
    {"devices", [](const v1::Job& a, const v1::Job& b) { return DevicesOf(a) > DevicesOf(b); }},
    {"tokens", [](const v1::Job& a,
                  const v1::Job& b) { return a.tokens_per_second() > b.tokens_per_second(); }},
    {"loss", [](const v1::Job& a, const v1::Job& b) { return LossOf(a) > LossOf(b); }},
    {"goodput",
     [](const v1::Job& a, const v1::Job& b) { return a.usage().goodput() < b.usage().goodput(); }},
    {"age", [](const v1::Job& a,
               const v1::Job& b) { return FromProto(a.submitted()) < FromProto(b.submitted()); }},
};

struct Totals {
  int64_t ready = 0, unreachable = 0, lost = 0;
  int64_t devices = 0, free = 0, unusable = 0, away = 0;
  double held = 0, cordoned = 0;
  int64_t waiting = 0, training = 0;
  double tokens_per_second = 0;
  std::map<v1::UsageClass, double> by_class;
  double productive = 0, used = 0;
};

Totals TotalsOf(const TopData& data, absl::Time now) {
  Totals totals;
  for (const v1::Worker& worker : data.workers) {
    const bool ready = worker.state() == v1::WORKER_STATE_READY;
    totals.ready += ready ? 1 : 0;
    totals.unreachable += worker.state() == v1::WORKER_STATE_UNREACHABLE ? 1 : 0;
    totals.lost += worker.state() == v1::WORKER_STATE_LOST ? 1 : 0;
    totals.devices += worker.devices_size();
    totals.free += worker.slots_free();
    if (!ready) totals.away += worker.devices_size();
    if (ready && worker.has_cordon()) {
      totals.cordoned += std::max(0.0, worker.devices_size() - worker.slots_used());
    }
    for (const v1::Device& device : worker.devices()) {
      totals.unusable += ready && !device.unusable().empty() ? 1 : 0;
    }
  }
  for (const v1::Job& job : data.jobs) {
    totals.held += DevicesOf(job);
    if (DevicesOf(job) == 0) ++totals.waiting;
    if (job.state() == v1::JOB_STATE_RUNNING) {
      ++totals.training;
      totals.tokens_per_second += job.tokens_per_second();
    }
    for (const v1::ClassTime& time : job.usage().times()) {
      if (DevicesIn(time) > 0) totals.by_class[time.usage_class()] += DevicesIn(time);
    }
    for (const auto& [time, seconds] : DeviceSecondsAt(job.usage(), now)) {
      totals.used += seconds;
      if (time.usage_class() == v1::USAGE_CLASS_PRODUCTIVE) totals.productive += seconds;
    }
  }
  return totals;
}

std::string DevicesText(const Totals& totals) {
  std::vector<std::string> classes;
  for (const auto& [usage_class, devices] : totals.by_class) {
    classes.push_back(absl::StrCat(devices, " ", spec::EnumName(usage_class)));
  }
  std::string text = absl::StrCat("devices  ", totals.devices, ": ", totals.held, " held");
  if (!classes.empty()) absl::StrAppend(&text, " (", absl::StrJoin(classes, ", "), ")");
  absl::StrAppend(&text, ", ", totals.free, " free");
  if (totals.unusable > 0) absl::StrAppend(&text, ", ", totals.unusable, " unusable");
  if (totals.cordoned > 0) absl::StrAppend(&text, ", ", totals.cordoned, " cordoned");
  if (totals.away > 0) absl::StrAppend(&text, ", ", totals.away, " on workers that are away");
  return text;
}

Rows QueueRows(const TopData& data, absl::Time now) {
  struct Queue {
    int64_t running = 0, waiting = 0;
    double devices = 0, wanted = 0, productive = 0, used = 0;
  };
  std::map<std::string, Queue> queues;
  for (const v1::Job& job : data.jobs) {
    Queue& queue = queues[job.spec().queue()];
    const double devices = DevicesOf(job);
    queue.devices += devices;
    ++(devices > 0 ? queue.running : queue.waiting);
    if (devices == 0) {
      const int32_t ranks = job.sizes().empty() ? job.spec().resources().ranks() : job.sizes(0);
      queue.wanted += ranks * (spec::ShareOf(job.spec()) / double{spec::kWholeDevice});
    }
    for (const auto& [time, seconds] : DeviceSecondsAt(job.usage(), now)) {
      queue.used += seconds;
      if (time.usage_class() == v1::USAGE_CLASS_PRODUCTIVE) queue.productive += seconds;
    }
  }
  Rows rows = {{"QUEUE", "JOBS", "DEVICES", "WAITING", "WANTED", "GOODPUT"}};
  for (const auto& [name, queue] : queues) {
    if (rows.size() > kQueueLinesMax) {
      rows.push_back({absl::StrCat("(", queues.size() - kQueueLinesMax, " more)")});
      break;
    }
    rows.push_back({name, absl::StrCat(queue.running), absl::StrCat(queue.devices),
                    absl::StrCat(queue.waiting), absl::StrCat(queue.wanted),
                    queue.used > 0 ? Percent(queue.productive / queue.used) : "-"});
  }
  return rows;
}

Rows JobRows(const TopData& data, const TopView& view, absl::Time now) {
  std::vector<const v1::Job*> jobs;
  for (const v1::Job& job : data.jobs) jobs.push_back(&job);
  for (const Order& order : kOrders) {
    if (view.sort != order.name) continue;
    std::stable_sort(jobs.begin(), jobs.end(),
                     [&order](const v1::Job* a, const v1::Job* b) { return order.before(*a, *b); });
  }
  if (view.reversed) std::reverse(jobs.begin(), jobs.end());
  Rows rows = {{"JOB", "STATE", "DEVICES", "DOING", "STEP", "LOSS", "TOKENS/S", "MFU", "GOODPUT",
                "ATTEMPTS", "QUEUE", "AGE"}};
  for (const v1::Job* job : jobs) {
    const double devices = DevicesOf(*job);
    const double goodput = GoodputAt(job->usage(), now);
    rows.push_back(
        {job->name(), spec::EnumName(job->state()), devices > 0 ? absl::StrCat(devices) : "-",
         ClassOf(*job), StepText(*job), Loss(job->train_loss()),
         job->state() == v1::JOB_STATE_RUNNING ? ShortNumber(job->tokens_per_second()) : "-",
         job->model_flops_utilization() > 0 ? Percent(job->model_flops_utilization()) : "-",
         goodput > 0 ? Percent(goodput) : "-", absl::StrCat(job->attempts()), job->spec().queue(),
         Age(job->submitted(), now)});
  }
  return rows;
}

Rows WorkerRows(const TopData& data, absl::Time now) {
  Rows rows = {{"WORKER", "STATE", "HOST", "DEVICES", "USED", "FREE", "JOBS", "LAST HEARD"}};
  for (const v1::Worker& worker : data.workers) {
    rows.push_back({worker.name(), spec::EnumName(worker.state()), worker.host(),
                    absl::StrCat(worker.devices_size()), absl::StrCat(worker.slots_used()),
                    absl::StrCat(worker.slots_free()),
                    worker.jobs().empty() ? "-" : absl::StrJoin(worker.jobs(), ","),
                    Age(worker.last_heard(), now)});
  }
  return rows;
}

void AddTable(const Rows& rows, std::vector<std::string>& lines) {
  const std::string text = Table(rows);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

// The terminal of a live view: no echo, no line editing, a screen of its own. Whatever ends the
// process by a signal that can be caught restores it first.
class Screen {
 public:
  explicit Screen(std::ostream& out) : out_(out) {
    caught = 0;
    struct sigaction action = {};
    action.sa_handler = [](int number) {
      if (number != SIGWINCH) caught = number;
    };
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      ::sigaction(kSignals[i], &action, &handlers_[i]);
    }
    Enter();
  }
  ~Screen() {
    Leave();
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      ::sigaction(kSignals[i], &handlers_[i], nullptr);
    }
    // As if it had not been caught: the shell sees why the process ended.
    if (stopped()) ::raise(caught);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void Draw(const std::vector<std::string>& lines) {
    out_ << "\x1b[H";
    const char* separator = "";
    for (const std::string& line : lines) {
      out_ << separator << line << "\x1b[K";
      separator = "\r\n";
    }
    out_ << "\x1b[J" << std::flush;
  }
  // Columns and lines; those of a small terminal when they are not known.
  static std::pair<int, int> Size() {
    winsize size = {};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return {80, 24};
    return {size.ws_col, size.ws_row};
  }
  // A key, or 0: `timeout` has passed, the window has changed or the process should end.
  char Key(absl::Duration timeout) {
    if (caught == SIGTSTP) {  // the shell goes on with its own screen meanwhile
      caught = 0;
      Leave();
      ::raise(SIGSTOP);
      Enter();
    }
    pollfd wait = {keys_ ? STDIN_FILENO : -1, POLLIN, 0};
    if (::poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0) return 0;
    char key = 0;
    const ssize_t got = ::read(STDIN_FILENO, &key, 1);
    // Its terminal is gone.
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return 'q';
    return key;
  }
  static bool stopped() { return caught != 0 && caught != SIGTSTP; }

 private:
  // SIGWINCH only has to interrupt poll().
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGTSTP, SIGWINCH};
  static volatile sig_atomic_t caught;

  void Enter() {
    if (::tcgetattr(STDIN_FILENO, &before_) == 0) {
      termios raw = before_;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      raw.c_cc[VMIN] = 0;
      raw.c_cc[VTIME] = 0;
      keys_ = ::tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
    }
    out_ << "\x1b[?1049h\x1b[?25l" << std::flush;
  }
  void Leave() {
    out_ << "\x1b[?25h\x1b[?1049l" << std::flush;
    if (keys_) ::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }

  std::ostream& out_;
  termios before_ = {};
  bool keys_ = false;  // stdin is a terminal
  struct sigaction handlers_[std::size(kSignals)] = {};
};
volatile sig_atomic_t Screen::caught = 0;

// `first`: workers as they are now, and not as of the last sample, which a coordinator that has
// just started does not have yet.
absl::Status Read(CoordinatorClient& client, TopData& data, bool first = false) {
  ASSIGN_OR_RETURN(std::vector<v1::Job> jobs, client.ListLiveJobs(kJobsMax));
  ASSIGN_OR_RETURN(std::vector<v1::Worker> workers,
                   first ? client.ListWorkers() : client.SampleWorkers());
  data.jobs = std::move(jobs);
  data.workers = std::move(workers);
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> TopOrders() {
  std::vector<std::string> names;
  for (const Order& order : kOrders) names.emplace_back(order.name);
  return names;
}

std::vector<std::string> TopFrame(const TopData& data, const TopView& view, absl::Time now) {
  const Totals totals = TotalsOf(data, now);
  std::vector<std::string> lines;
  std::string workers = absl::StrCat("workers  ", totals.ready, " ready");
  if (totals.unreachable > 0) absl::StrAppend(&workers, ", ", totals.unreachable, " unreachable");
  if (totals.lost > 0) absl::StrAppend(&workers, ", ", totals.lost, " lost");
  lines.push_back(std::move(workers));
  lines.push_back(DevicesText(totals));
  std::string jobs = absl::StrCat(
      "jobs     ", totals.training, " training, ", totals.waiting, " waiting, ",
      data.jobs.size() - static_cast<size_t>(totals.training) - static_cast<size_t>(totals.waiting),
      " starting or ending; ", ShortNumber(totals.tokens_per_second), " tokens/s");
  if (totals.used > 0) {
    absl::StrAppend(&jobs, "; goodput ", Percent(totals.productive / totals.used));
  }
  lines.push_back(std::move(jobs));
  if (!data.problem.empty()) lines.push_back(absl::StrCat("not current: ", data.problem));
  std::set<size_t> headings;
  const auto add = [&](const Rows& rows) {
    lines.emplace_back();
    headings.insert(lines.size());
    AddTable(rows, lines);
  };
  // On a small screen the jobs are worth more than the queues.
  if (view.lines == 0 || view.lines >= 20) add(QueueRows(data, now));
  if (view.workers || view.lines == 0) add(WorkerRows(data, now));
  if (!view.workers || view.lines == 0) add(JobRows(data, view, now));
  if (view.lines > 0) {
    const size_t limit = static_cast<size_t>(std::max(1, view.lines - (view.keys ? 1 : 0)));
    if (lines.size() > limit) {
      const size_t left_out = lines.size() - limit + 1;
      lines.resize(limit - 1);
      lines.push_back(absl::StrCat("(", left_out, " more)"));
    }
    while (view.keys && lines.size() < limit) lines.emplace_back();
    if (view.keys) {
      lines.push_back(absl::StrCat("q quit  s sort: ", view.sort, view.reversed ? ", reversed" : "",
                                   "  r reverse  w ", view.workers ? "jobs" : "workers"));
    }
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    lines[i] = Cut(lines[i], view.columns);
    if (view.colour && headings.contains(i))
      lines[i] = absl::StrCat("\x1b[1m", lines[i], "\x1b[0m");
  }
  return lines;
}

absl::Status Top(CoordinatorClient& client, TopOptions options, Format format, Terminal& terminal) {
  TopData data;
  RETURN_IF_ERROR(Read(client, data, /*first=*/true));
  TopView view;
  view.sort = options.sort;
  if (format != Format::kTable) {
    Json jobs = Json::array(), workers = Json::array();
    for (const v1::Job& job : data.jobs) jobs.push_back(ToJson(job));
    for (const v1::Worker& worker : data.workers) workers.push_back(ToJson(worker));
    Print(Json{{"jobs", std::move(jobs)}, {"workers", std::move(workers)}}, format, terminal.out);
    return absl::OkStatus();
  }
  if (options.once || !terminal.is_tty) {
    view.columns = terminal.is_tty ? terminal.columns : 1000;
    for (const std::string& line : TopFrame(data, view, absl::Now())) terminal.out << line << "\n";
    return absl::OkStatus();
  }
  view.keys = true;
  view.colour = terminal.colour;
  Screen screen(terminal.out);
  absl::Time next = absl::Now() + options.interval;
  while (!Screen::stopped()) {
    std::tie(view.columns, view.lines) = Screen::Size();
    screen.Draw(TopFrame(data, view, absl::Now()));
    switch (screen.Key(std::max(absl::ZeroDuration(), next - absl::Now()))) {
      case 'q':
      case 'Q':
        return absl::OkStatus();
      case 's': {
        const std::vector<std::string> orders = TopOrders();
        const auto known = std::find(orders.begin(), orders.end(), view.sort);
        view.sort =
            known == orders.end() || known + 1 == orders.end() ? orders.front() : *(known + 1);
        break;
      }
      case 'r':
        view.reversed = !view.reversed;
        break;
      case 'w':
        view.workers = !view.workers;
        break;
      default:
        break;
    }
    if (absl::Now() < next || Screen::stopped()) continue;
    // The last numbers stay on the screen while the coordinator cannot be asked.
    const absl::Status read = Read(client, data);
    data.problem = read.ok() ? "" : std::string(read.message());
    next = absl::Now() + options.interval;
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
