#include "cli/app.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <tuple>

#include "base/status_macros.h"
#include "cli/admin.h"
#include "cli/checkpoints.h"
#include "cli/completion.h"
#include "cli/convert.h"
#include "cli/coordinator_client.h"
#include "cli/data.h"
#include "cli/debug.h"
#include "cli/describe.h"
#include "cli/doctor.h"
#include "cli/events.h"
#include "cli/explain.h"
#include "cli/jobs.h"
#include "cli/local.h"
#include "cli/logs.h"
#include "cli/plan.h"
#include "cli/profile.h"
#include "cli/queues.h"
#include "cli/reconnect.h"
#include "cli/version.h"
#include "cli/watch.h"
#include "cli/workers.h"

namespace muster::cli {
namespace {

constexpr int kUsageError = 2;
constexpr absl::Duration kVersionTimeout = absl::Seconds(2);

// Declares every command with its flags, then runs the one that the arguments name.
class Application {
 public:
  explicit Application(Surroundings& surroundings)
      : surroundings_(surroundings), terminal_(surroundings.terminal) {
    Declare();
  }

  int Run(std::vector<std::string> arguments) {
    if (!arguments.empty() && arguments[0] == kCompleteCommand) return CompleteWord(arguments);
    if (!arguments.empty() && arguments[0] == "help") {  // `muster help submit`
      arguments.erase(arguments.begin());
      arguments.push_back("--help");
    }
    try {
      // CLI11 takes the arguments from the back.
      app_.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    } catch (const CLI::ParseError& error) {
      const std::string unknown = UnknownCommand(app_, arguments);
      if (error.get_exit_code() != 0 && !unknown.empty()) {
        terminal_.err << "muster: " << unknown << "; see muster --help" << std::endl;
        return kUsageError;
      }
      return app_.exit(error, terminal_.out, terminal_.err) == 0 ? 0 : kUsageError;
    }
    const absl::Status status = action_();
    terminal_.out.flush();
    if (status.ok()) return 0;
    terminal_.err << "muster: " << status.message() << std::endl;
    return 1;
  }

 private:
  void Declare() {
    app_.description(
        "muster: trains large models on a fleet. Exit status: 0 done, 1 refused or "
        "failed, 2 wrong usage.");
    app_.name("muster");
    app_.require_subcommand(1);
    app_.fallthrough();
    app_.set_version_flag("--version", "muster " + surroundings_.version);
    app_.add_option("--coordinator", coordinator_,
                    "HOST:PORT, or file:PATH of a file that holds it [default: "
                    "$MUSTER_COORDINATOR, else the cluster of `muster local up`]");
    DeclareSubmit();
    DeclarePlan();
    DeclareReads();
    DeclareChanges();
    DeclareLogs();
    DeclareProfile();
    DeclareSample();
    DeclareConvert();
    DeclareData();
    DeclareLocal();
    DeclareAdmin();
    DeclareRest();
  }

  // Adds a command that runs `action`. It has -o.
  CLI::App* Add(CLI::App& parent, const std::string& name, const std::string& help,
                std::function<absl::Status()> action) {
    CLI::App* command = parent.add_subcommand(name, help);
    command->fallthrough();
    command->add_option("-o,--format", format_text_, "table, json or yaml")
        ->check(CLI::IsMember({"table", "json", "yaml"}));
    command->final_callback([this, action = std::move(action)] { action_ = action; });
    return command;
  }
  // Adds a command that only has commands below it.
  CLI::App* AddGroup(CLI::App& parent, const std::string& name, const std::string& help) {
    CLI::App* group = parent.add_subcommand(name, help);
    group->require_subcommand(1);
    group->fallthrough();
    return group;
  }
  void TakesJob(CLI::App* command, bool required = true) {
    command->add_option(kJobPositional, job_, "Name of a job (its newest run), or its id")
        ->required(required);
  }

  void DeclareSubmit() {
    CLI::App* submit = Add(app_, "submit", "Submit a job spec (docs/job-spec.md)", [this] {
      submit_.working_directory = surroundings_.working_directory;
      return WithClient([this](CoordinatorClient& client) {
        return Submit(client, submit_, format(), terminal_);
      });
    });
    TakesSpec(submit, submit_.file, submit_.overrides);
    submit->add_flag("--watch", submit_.watch, "Follow it to its end; exit 1 when it fails");
    submit->add_option("--request-id", submit_.request_id,
                       "The same id never makes a second job [default: a new one]");
    submit->add_flag("--dry-run", submit_.dry_run,
                     "Let the coordinator check it, print it with defaults, submit nothing");
  }

  void TakesSpec(CLI::App* command, std::string& file, std::vector<std::string>& overrides) {
    command->add_option("FILE", file, "YAML or JSON; - is stdin")->required();
    command
        ->add_option("--set", overrides,
                     "key=value, e.g. engine.training.steps=100 or engine.data.train[0].path=x; "
                     "null removes; may be repeated")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false);
  }

  void DeclarePlan() {
    CLI::App* plan =
        Add(app_, "plan", "Memory and work of every rank of a spec, before it runs", [this] {
          plan_.working_directory = surroundings_.working_directory;
          plan_.rank_binary = surroundings_.binaries + "/muster-rank";
          if (!plan_on_cluster_) return Plan(plan_, nullptr, format(), terminal_);
          return WithClient(
              [this](auto& client) { return Plan(plan_, &client, format(), terminal_); });
        });
    TakesSpec(plan, plan_.file, plan_.overrides);
    plan->add_flag("--cluster", plan_on_cluster_,
                   "Also whether it would start now, and where; if not, why, and when it would");
    plan->add_option("--device-memory", plan_.device_memory,
                     "Of each rank's device, e.g. 141GiB: whether it fits, or what would")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
        ->type_name("SIZE");
  }

  void DeclareReads() {
    CLI::App* get = AddGroup(app_, "get", "List jobs or workers, or show one job");
    Add(*get, "jobs", "All jobs, newest first", [this] {
      return WithClient([this](auto& client) { return GetJobs(client, format(), terminal_); });
    });
    TakesJob(Add(*get, "job", "One job", [this] {
      return WithClient([this](auto& client) { return GetJob(client, job_, format(), terminal_); });
    }));
    Add(*get, "workers", "All workers", [this] {
      return WithClient([this](auto& client) { return GetWorkers(client, format(), terminal_); });
    });
    Add(app_, "queue", "The queues: what each uses, is guaranteed, borrows and waits for", [this] {
      return WithClient([this](auto& client) { return Queues(client, format(), terminal_); });
    });
    CLI::App* describe = AddGroup(app_, "describe", "Everything about one job");
    TakesJob(Add(*describe, "job", "State, ranks, attempts, checkpoints, events and spec", [this] {
      return WithClient(
          [this](auto& client) { return DescribeJob(client, job_, format(), terminal_); });
    }));
    TakesJob(Add(app_, "watch", "Follow a job to its end; exit 1 when it fails", [this] {
      return WithClient([this](auto& client) {
        return Watch(client, job_, format(), terminal_, kReconnectPatience);
      });
    }));
    TakesJob(Add(app_, "cancel", "Ask a job to stop", [this] {
      return WithClient([this](auto& client) { return Cancel(client, job_, format(), terminal_); });
    }));
    TakesJob(
        Add(app_, "explain", "Why a job waits, what would let it start, and when it will", [this] {
          return WithClient(
              [this](auto& client) { return Explain(client, job_, format(), terminal_); });
        }));
    TakesJob(Add(app_, "checkpoints", "A job's committed checkpoints, oldest first", [this] {
      return WithClient(
          [this](auto& client) { return Checkpoints(client, job_, format(), terminal_); });
    }));
  }

  void DeclareChanges() {
    using JobChange = CoordinatorClient::JobChange;
    const std::vector<std::tuple<std::string, JobChange, std::string>> changes = {
        {"preempt", JobChange::kPreempt,
         "Stop a running job at the end of a step, with a checkpoint; it stays in its queue"},
        {"suspend", JobChange::kSuspend, "The same, and hold it until `muster resume`"},
        {"resume", JobChange::kResume, "Let a suspended or held job wait in its queue again"},
        {"hold", JobChange::kHold, "Keep a job that waits from starting"},
        {"release", JobChange::kRelease, "As resume"},
        {"requeue", JobChange::kRequeue,
         "Stop a running job now and put it back into its queue; or end a back-off"}};
    for (const auto& [name, change, help] : changes) {
      CLI::App* command = Add(app_, name, help, [this, change = change] {
        v1::ChangeJobRequest request;
        request.set_name(job_);
        request.set_reason(reason_);
        return WithClient([this, change, request](auto& client) {
          return ChangeJob(client, change, request, format(), terminal_);
        });
      });
      TakesJob(command);
      command->add_option("--reason", reason_, "For people: it stands in the job's events")
          ->type_name("TEXT");
    }
  }

  void DeclareLogs() {
    CLI::App* logs = Add(app_, "logs", "Output of one rank", [this] {
      logs_.job = job_;
      return WithClient([this](auto& client) { return Logs(client, logs_, format(), terminal_); });
    });
    TakesJob(logs);
    logs->add_flag("-f,--follow", logs_.follow,
                   "Wait for more, through restarts, until the job ends");
    logs->add_option("--rank", logs_.rank, "Rank [default: 0]")->check(CLI::NonNegativeNumber);
    logs->add_option("--epoch", logs_.epoch, "Attempt [default: the newest]");
    logs->add_option("--tail", logs_.tail_bytes, "Only the last BYTES")
        ->check(CLI::NonNegativeNumber)
        ->type_name("BYTES");
    logs->add_flag("--all-ranks", logs_.all_ranks,
                   "Every rank, one after the other; each line begins with its rank");
    logs->add_option("--grep", logs_.grep,
                     "Only lines that match this regular expression (POSIX extended)")
        ->type_name("REGEX");
    CLI::App* debug = Add(app_, "debug", "What the collectives of a running job wait for", [this] {
      debug_.job = job_;
      debug_.timeout = absl::Seconds(debug_timeout_);
      return WithClient(
          [this](auto& client) { return Debug(client, debug_, format(), terminal_); });
    });
    TakesJob(debug);
    debug->add_flag("--calls", debug_.calls, "Every recorded call of every rank");
    debug->add_option("--timeout", debug_timeout_, "Seconds a rank has to answer [default: 5]")
        ->check(CLI::PositiveNumber)
        ->type_name("SECONDS");
    CLI::App* events = Add(app_, "events", "What happened to a job, or in the cluster", [this] {
      return WithClient(
          [this](auto& client) { return Events(client, job_, follow_, format(), terminal_); });
    });
    TakesJob(events, /*required=*/false);
    events->add_flag("-f,--follow", follow_, "Go on with new events");
  }

  void DeclareProfile() {
    CLI::App* profile =
        Add(app_, "profile", "A Chrome trace of the next steps of a running job", [this] {
          profile_.job = job_;
          return WithClient(
              [this](auto& client) { return Profile(client, profile_, format(), terminal_); });
        });
    TakesJob(profile);
    profile->add_option("--steps", profile_.steps, "How many")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    profile->add_option("--output", profile_.output, "File to write [default: NAME.trace.json]")
        ->type_name("FILE");
  }

  void DeclareSample() {
    CLI::App* sample = Add(app_, "sample", "Text from a job's newest sound checkpoint", [this] {
      sample_.job = job_;
      sample_.rank_binary = surroundings_.binaries + "/muster-rank";
      return WithClient(
          [this](auto& client) { return Sample(client, sample_, format(), terminal_); });
    });
    TakesJob(sample);
    sample->add_option("--prompt", sample_.prompt, "Text to go on from")->required();
    sample->add_option("--tokens", sample_.tokens, "Tokens to make")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    sample->add_option("--temperature", sample_.temperature, "0 takes the likeliest token")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    sample->add_option("--top-k", sample_.top_k, "Only from the K likeliest; 0 = all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    sample->add_option("--seed", sample_.seed, "The same seed gives the same text")
        ->capture_default_str();
    sample->add_option("--step", sample_.step, "Checkpoint of this step [default: the newest]")
        ->check(CLI::PositiveNumber);
    sample->add_flag("-v,--verbose", sample_.verbose,
                     "Tokens per second on stderr, also where that is no terminal");
  }

  void DeclareConvert() {
    CLI::App* convert =
        Add(app_, "convert", "A checkpoint to a Hugging Face model folder, or back", [this] {
          convert_.rank_binary = surroundings_.binaries + "/muster-rank";
          return Convert(convert_, format(), terminal_);
        });
    convert
        ->add_option("FROM", convert_.source,
                     "Directory of a checkpoint (see `muster checkpoints`), or a folder with "
                     "config.json and safetensors")
        ->required();
    convert->add_option("TO", convert_.destination, "Directory to make")->required();
    convert->add_option("--dtype", convert_.dtype, "Of an exported folder: fp32, bf16 or fp16")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
        ->capture_default_str();
  }

  void DeclareData() {
    CLI::App* data = AddGroup(app_, "data", "Make and look at datasets");
    CLI::App* tokenize = Add(*data, "tokenize", "Datasets (PREFIX.bin, PREFIX.idx) from text",
                             [this] { return DataTokenize(tokenize_, format(), terminal_); });
    tokenize
        ->add_option("--input", tokenize_.inputs,
                     "Text or JSON lines, also gzip or zstd: files, directories, globs, in "
                     "this order; - is stdin")
        ->required()
        ->type_name("FILE");
    tokenize->add_option("--output", tokenize_.output, "PREFIX; with --split PREFIX.NAME")
        ->required()
        ->type_name("PREFIX");
    tokenize
        ->add_option(
            "--tokenizer", tokenize_.tokenizer,
            "tokenizer.json, vocab.json (with merges.txt beside it), a SentencePiece model or a "
            "tiktoken file; "
            "bytes: one token per byte")
        ->capture_default_str()
        ->type_name("FILE");
    tokenize->add_option("--field", tokenize_.field,
                         "The inputs are JSON lines, and this string of each is a document "
                         "[default: text, of *.jsonl and *.ndjson]");
    tokenize
        ->add_option("--bos", tokenize_.bos,
                     "Token in front of every document; auto: what the tokenizer asks for; none")
        ->capture_default_str();
    tokenize
        ->add_option("--eos", tokenize_.eos,
                     "Token behind every document; auto: what the tokenizer asks for, or has for "
                     "the end of a text; none")
        ->capture_default_str();
    tokenize->add_option("--threads", tokenize_.threads, "0 = all cores")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str();
    tokenize->add_option("--split", tokenize_.splits,
                         "Parts by position, e.g. train=0.9,validation=0.1");
    tokenize
        ->add_option("--documents", tokenize_.boundary,
                     "A document is a file, a line, or ends at a blank-line")
        ->check(CLI::IsMember({"file", "line", "blank-line"}))
        ->capture_default_str();
    DeclareTrainTokenizer(*data);
    DeclareLookAtData(*data);
    CLI::App* inspect = Add(*data, "inspect", "What a dataset holds; checks all of it", [this] {
      return DataInspect(prefix_, inspect_tokenizer_, format(), terminal_);
    });
    inspect->add_option("PREFIX", prefix_, "Dataset: PREFIX.bin and PREFIX.idx")->required();
    inspect
        ->add_option("--tokenizer", inspect_tokenizer_,
                     "To show text: a file, bytes, none; auto: that of the dataset")
        ->capture_default_str();
  }

  void DeclareLookAtData(CLI::App& data) {
    CLI::App* stats = Add(data, "stats", "Lengths of documents, bytes per token, duplicates",
                          [this] { return DataStats(prefix_, format(), terminal_); });
    CLI::App* sample = Add(data, "sample", "Some documents as text", [this] {
      sample_documents_.prefix = prefix_;
      return DataSample(sample_documents_, format(), terminal_);
    });
    CLI::App* validate = Add(data, "validate", "Check all of a dataset against its description",
                             [this] { return DataValidate(prefix_, format(), terminal_); });
    for (CLI::App* command : {stats, sample, validate}) {
      command->add_option("PREFIX", prefix_, "Dataset: PREFIX.bin and PREFIX.idx")->required();
    }
    sample->add_option("--count", sample_documents_.count, "How many")
        ->check(CLI::Range(1, 1'000'000))
        ->capture_default_str();
    sample->add_option("--tokens", sample_documents_.tokens_max, "At most so many of each")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    sample->add_option("--seed", sample_documents_.seed, "The same seed, the same documents")
        ->capture_default_str();
    sample->add_option("--tokenizer", sample_documents_.tokenizer, "As of inspect")
        ->capture_default_str();
    CLI::App* merge = Add(data, "merge", "One dataset from several, in order", [this] {
      return DataMerge(merged_, merge_output_, format(), terminal_);
    });
    merge->add_option("--input", merged_, "Datasets of the same tokenizer")
        ->required()
        ->type_name("PREFIX");
    merge->add_option("--output", merge_output_, "The dataset to write")
        ->required()
        ->type_name("PREFIX");
  }

  void DeclareTrainTokenizer(CLI::App& data) {
    CLI::App* train =
        Add(data, "train-tokenizer", "A tokenizer.json of byte-level BPE from text",
            [this] { return DataTrainTokenizer(train_tokenizer_, format(), terminal_); });
    train->add_option("--input", train_tokenizer_.inputs, "As of tokenize")
        ->required()
        ->type_name("FILE");
    train->add_option("--output", train_tokenizer_.output, "The file to write")
        ->required()
        ->type_name("FILE");
    train->add_option("--vocabulary", train_tokenizer_.vocabulary, "Tokens, with the special ones")
        ->check(CLI::Range(256, 1 << 22))
        ->capture_default_str();
    train->add_option("--pattern", train_tokenizer_.pattern, "How text is split into words")
        ->check(CLI::IsMember({"gpt2", "llama3", "qwen2", "o200k"}))
        ->capture_default_str();
    train
        ->add_option("--special", train_tokenizer_.specials,
                     "Special tokens, whose ids are behind all others")
        ->capture_default_str();
    train
        ->add_option("--min-frequency", train_tokenizer_.frequency_min,
                     "How often a pair occurs that becomes a token")
        ->check(CLI::Range(1, 1 << 30))
        ->capture_default_str();
    train->add_option("--field", train_tokenizer_.field, "As of tokenize");
    train->add_option("--threads", train_tokenizer_.threads, "0 = all cores")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str();
  }

  void DeclareLocal() {
    CLI::App* local = AddGroup(app_, "local", "A cluster of processes on this machine");
    CLI::App* up = Add(*local, "up", "Start it, or what of it has died", [this] {
      return WithHome([this] { return LocalUp(local_, format(), terminal_); });
    });
    up->add_option("--workers", local_.workers, "Worker daemons [default: as before, or 2]")
        ->check(CLI::Range(1, 64));
    up->add_option("--slots", local_.slots, "CPU slots of each worker [default: as before, or 2]")
        ->check(CLI::Range(1, 1024));
    CLI::App* down = Add(*local, "down", "End all of it, ranks too", [this] {
      return WithHome([this] { return LocalDown(local_, purge_, terminal_); });
    });
    down->add_flag("--purge", purge_, "Remove its state: jobs, events, logs");
    CLI::App* status = Add(*local, "status", "Addresses and pids", [this] {
      return WithHome([this] { return LocalStatus(local_, format(), terminal_); });
    });
    for (CLI::App* command : {up, down, status}) {
      command->add_option("--home", home_, "Directory [default: $MUSTER_HOME, else ~/.muster]");
    }
  }

  void DeclareAdmin() {
    CLI::App* admin = AddGroup(app_, "admin", "For operators: workers, backups of the state");
    Add(*admin, "remove-worker", "Give a worker up at once and forget it",
        [this] {
          return WithClient(
              [this](auto& client) { return RemoveWorker(client, worker_, format(), terminal_); });
        })
        ->add_option("WORKER", worker_, "Name of the worker")
        ->required();
    CLI::App* queues = AddGroup(*admin, "queues", "Define the queues of the cluster");
    Add(*queues, "apply", "Define the queues, in place of those that there are (docs/queues.md)",
        [this] {
          return WithClient([this](auto& client) {
            return ApplyQueues(client, queues_file_, format(), terminal_);
          });
        })
        ->add_option("FILE", queues_file_, "YAML or JSON")
        ->required();
    Add(*queues, "get", "The queues as they were last defined, as YAML for apply", [this] {
      return WithClient(
          [this](auto& client) { return GetQueuePolicy(client, format(), terminal_); });
    });
    Add(*admin, "backup", "Write a copy of the coordinator's state on its host", [this] {
      return WithClient([this](auto& client) { return Backup(client, format(), terminal_); });
    });
    Add(*admin, "snapshot", "Write the state, its log and the events to one file",
        [this] {
          return WithClient(
              [this](auto& client) { return Snapshot(client, snapshot_, format(), terminal_); });
        })
        ->add_option("FILE", snapshot_, "The file to write")
        ->required();
    Add(*admin, "verify", "Read a backup on this machine through, and say what it holds",
        [this] {
          state_.coordinator_binary = surroundings_.binaries + "/muster-coordinator";
          return VerifyState(state_, format(), terminal_);
        })
        ->add_option("BACKUP", state_.backup, "Directory of the backup")
        ->required();
    CLI::App* restore =
        Add(*admin, "restore", "Make a new data directory of a coordinator from a backup", [this] {
          state_.coordinator_binary = surroundings_.binaries + "/muster-coordinator";
          return RestoreState(state_, format(), terminal_);
        });
    restore->add_option("BACKUP", state_.backup, "Directory of the backup")->required();
    restore->add_option("--data-dir", state_.data_dir, "The new data directory")
        ->required()
        ->type_name("DIR");
  }

  void DeclareRest() {
    Add(app_, "doctor",
        "Whether this machine can run a worker or coordinator: driver, libraries, limits, disk, "
        "network. Exit 1 when a check fails",
        [this] { return Doctor(); })
        ->add_option("--state-dir", doctor_directory_,
                     "Directory whose disk is tried: that of the daemon or coordinator "
                     "[default: the current one]")
        ->type_name("DIR");
    CLI::App* replay =
        Add(app_, "replay", "Fold the log of a snapshot again, and compare with its state", [this] {
          replay_.coordinator_binary = surroundings_.binaries + "/muster-coordinator";
          return ReplayState(replay_, format(), terminal_);
        });
    replay->add_option("FILE", replay_.file, "Of `muster admin snapshot`, or a backup")->required();
    replay->add_option("--from", replay_.from, "An earlier one, to begin with its state")
        ->type_name("FILE");
    replay->add_option("--until", replay_.until, "Show the jobs as of this entry of the log")
        ->type_name("ENTRY");
    Add(app_, "version", "Versions of this program and of the coordinator",
        [this] { return Version(); });
    CLI::App* completion = AddGroup(app_, "completion", "Shell completion");
    Add(*completion, "bash", "For ~/.bashrc: source <(muster completion bash)", [this] {
      terminal_.out << BashCompletion();
      return absl::OkStatus();
    });
  }

  Format format() const {
    return format_text_ == "json"   ? Format::kJson
           : format_text_ == "yaml" ? Format::kYaml
                                    : Format::kTable;
  }

  // --home, else $MUSTER_HOME, else ~/.muster, as an absolute path; empty when none is known.
  std::string Home() const {
    std::filesystem::path home = home_.empty() ? surroundings_.environment("MUSTER_HOME") : home_;
    if (home.empty()) {
      const std::string user = surroundings_.environment("HOME");
      if (user.empty()) return "";
      home = std::filesystem::path(user) / ".muster";
    }
    home = (std::filesystem::path(surroundings_.working_directory) / home).lexically_normal();
    return home.has_filename() ? home.string() : home.parent_path().string();
  }

  absl::Status WithHome(const std::function<absl::Status()>& action) {
    local_.home = Home();
    local_.binaries = surroundings_.binaries;
    if (local_.home.empty()) {
      return absl::FailedPreconditionError("set $MUSTER_HOME: neither it nor $HOME is set");
    }
    return action();
  }

  absl::Status WithClient(const std::function<absl::Status(CoordinatorClient&)>& action) {
    ASSIGN_OR_RETURN(
        const Endpoint endpoint,
        FindCoordinator(coordinator_, surroundings_.environment("MUSTER_COORDINATOR"), Home()));
    return action(*CoordinatorClient::Connect(endpoint));
  }

  absl::Status Doctor() {
    MachineFacts facts = GatherFacts(doctor_directory_.empty() ? surroundings_.working_directory
                                                               : doctor_directory_);
    facts.version = surroundings_.version;
    const std::string named = surroundings_.environment("MUSTER_COORDINATOR");
    if (!coordinator_.empty() || !named.empty()) {
      facts.coordinator_address = coordinator_.empty() ? named : coordinator_;
      absl::StatusOr<std::string>& answer =
          facts.coordinator.emplace(absl::UnknownError("was not asked"));
      const absl::Status found = WithClient([&](CoordinatorClient& client) -> absl::Status {
        ASSIGN_OR_RETURN(const v1::GetVersionResponse version, client.GetVersion(kVersionTimeout));
        answer = version.version();
        return absl::OkStatus();
      });
      if (!found.ok()) answer = found;
    }
    return Report(Examine(facts), format(), terminal_);
  }

  absl::Status Version() {
    absl::StatusOr<v1::GetVersionResponse> coordinator = absl::UnknownError("was not asked");
    const absl::Status found = WithClient([&](CoordinatorClient& client) {
      coordinator = client.GetVersion(kVersionTimeout);
      return coordinator.status();
    });
    if (!found.ok()) coordinator = found;
    PrintVersions(surroundings_.version, coordinator, format(), terminal_);
    return absl::OkStatus();
  }

  int CompleteWord(const std::vector<std::string>& arguments) {
    std::vector<std::string> words(arguments.begin() + 1, arguments.end());
    if (!words.empty() && words[0] == "--") words.erase(words.begin());
    const auto job_names = [this] {
      std::vector<std::string> names;
      const absl::Status status = WithClient([&](CoordinatorClient& client) -> absl::Status {
        // Asked first, with a short time limit: a dead coordinator must not block the shell.
        RETURN_IF_ERROR(client.GetVersion(kVersionTimeout).status());
        ASSIGN_OR_RETURN(const std::vector<v1::Job> jobs, client.ListJobs());
        for (const v1::Job& job : jobs) names.push_back(job.name());
        return absl::OkStatus();
      });
      if (!status.ok()) names.clear();
      std::sort(names.begin(), names.end());
      names.erase(std::unique(names.begin(), names.end()), names.end());
      return names;
    };
    for (const std::string& word : Complete(app_, words, job_names)) terminal_.out << word << "\n";
    return 0;
  }

  Surroundings& surroundings_;
  Terminal& terminal_;
  CLI::App app_;
  std::function<absl::Status()> action_;

  std::string coordinator_;
  std::string format_text_ = "table";
  std::string home_;
  std::string job_;
  std::string reason_;
  std::string queues_file_;
  std::string worker_;
  std::string doctor_directory_;
  StateOptions state_;
  std::string snapshot_;
  ReplayOptions replay_;
  std::string prefix_;
  std::string inspect_tokenizer_ = "auto";
  bool follow_ = false;
  bool purge_ = false;
  SubmitOptions submit_;
  PlanOptions plan_;
  bool plan_on_cluster_ = false;
  LogsOptions logs_;
  DebugOptions debug_;
  double debug_timeout_ = 5;
  ProfileOptions profile_;
  ConvertOptions convert_;
  SampleOptions sample_;
  TokenizeArguments tokenize_;
  TrainTokenizerArguments train_tokenizer_;
  SampleDocumentsArguments sample_documents_;
  std::vector<std::string> merged_;
  std::string merge_output_;
  LocalOptions local_;
};

}  // namespace

int Run(const std::vector<std::string>& arguments, Surroundings& surroundings) {
  return Application(surroundings).Run(arguments);
}

}  // namespace muster::cli
