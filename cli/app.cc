#include "cli/app.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "base/trace_context.h"
#include "cli/access.h"
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
#include "cli/fleet.h"
#include "cli/jobs.h"
#include "cli/local.h"
#include "cli/logs.h"
#include "cli/pki.h"
#include "cli/plan.h"
#include "cli/profile.h"
#include "cli/queues.h"
#include "cli/rank_map.h"
#include "cli/reconnect.h"
#include "cli/top.h"
#include "cli/usage.h"
#include "cli/version.h"
#include "cli/watch.h"
#include "cli/workers.h"
#include "security/tls_files.h"

namespace muster::cli {
namespace {

constexpr int kUsageError = 2;
constexpr absl::Duration kVersionTimeout = absl::Seconds(2);

// Refuses an option's text in fewer words than CLI11's own checks of ranges without an end.
CLI::Validator AtLeast(int low, bool whole = true) {
  return CLI::Validator(
      [low, whole](const std::string& text) -> std::string {
        double value = 0;
        if (absl::SimpleAtod(text, &value) && value >= low &&
            (!whole || value == std::floor(value))) {
          return "";
        }
        return absl::StrCat("'", text, "' is not a ", whole ? "whole number" : "number",
                            ", at least ", low);
      },
      "");
}

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
        terminal_.err << "muster: " << unknown << std::endl;
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
    DeclareTls();
    DeclareSubmit();
    DeclarePlan();
    DeclareReads();
    DeclareChanges();
    DeclareTop();
    DeclareUsage();
    DeclareLogs();
    DeclareProfile();
    DeclareSample();
    DeclareConvert();
    DeclareData();
    DeclareLocal();
    DeclareFleet();
    DeclareAdmin();
    DeclareRest();
  }

  // What the coordinator is called with, for every command.
  void DeclareTls() {
    const auto file = [this](const char* name, std::string& target, const char* help) {
      app_.add_option(name, target, help)->type_name("FILE");
    };
    file("--tls-ca", tls_.authorities,
         "Authorities of the coordinator's certificate, PEM: turns TLS on [default: "
         "$MUSTER_TLS_CA]");
    file("--tls-cert", tls_.certificate, "Your certificate, PEM [default: $MUSTER_TLS_CERT]");
    file("--tls-key", tls_.key, "Its private key, PEM [default: $MUSTER_TLS_KEY]");
    app_.add_option("--tls-server-name", server_name_,
                    "Name in the coordinator's certificate [default: $MUSTER_TLS_SERVER_NAME, else "
                    "the host of --coordinator]");
    file("--token-file", token_file_,
         "File with your token [default: $MUSTER_TOKEN_FILE; $MUSTER_TOKEN is a token itself]");
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

  // One or more, for ForEachJob().
  void TakesJobs(CLI::App* command) {
    command->add_option(kJobPositional, jobs_, "Names of jobs (their newest runs), or their ids")
        ->required();
  }
  // One that fails keeps none of the others from being asked; every message is shown.
  absl::Status ForEachJob(const std::function<absl::Status(const std::string&)>& ask) {
    absl::Status failed;
    for (const std::string& job : jobs_) {
      const absl::Status status = ask(job);
      if (status.ok()) continue;
      if (!failed.ok()) terminal_.err << "muster: " << failed.message() << std::endl;
      failed = status;
    }
    return failed;
  }

  void DeclareSubmit() {
    CLI::App* submit = Add(app_, "submit", "Submit job specs (docs/job-spec.md)", [this] {
      submit_.working_directory = surroundings_.working_directory;
      return WithClient([this](CoordinatorClient& client) {
        return Submit(client, submit_, format(), terminal_);
      });
    });
    submit
        ->add_option("FILE", submit_.files,
                     "YAML or JSON; - is stdin. A file may hold several documents")
        ->required();
    TakesOverrides(submit, submit_.overrides);
    submit->add_flag("--watch", submit_.watch, "Follow it to its end; exit 1 when it fails");
    submit->add_option("--request-id", submit_.request_id,
                       "The same id never makes a second job [default: a new one]");
    submit->add_flag("--dry-run", submit_.dry_run,
                     "Let the coordinator check it, print it with defaults, submit nothing");
  }

  void TakesOverrides(CLI::App* command, std::vector<std::string>& overrides) {
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
    plan->add_option("FILE", plan_.file, "YAML or JSON; - is stdin")->required();
    TakesOverrides(plan, plan_.overrides);
    plan->add_flag("--cluster", plan_on_cluster_,
                   "Also whether it would start now, and where; if not, why, and when it would");
    plan->add_option("--device-memory", plan_.device_memory,
                     "Of each rank's device, e.g. 141GiB: whether it fits, or what would")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
        ->type_name("SIZE");
  }

  void DeclareReads() {
    CLI::App* get =
        AddGroup(app_, "get", "List jobs, workers, queues or reservations, or show one job");
    CLI::App* jobs = Add(*get, "jobs", "All jobs, newest first", [this] {
      return WithClient(
          [this](auto& client) { return GetJobs(client, labels_, tasks_, format(), terminal_); });
    });
    jobs->add_option("-l,--labels", labels_,
                     "Only jobs with labels that match all of these: NAME=VALUE, NAME!=VALUE, NAME "
                     "or !NAME, separated by commas");
    jobs->add_flag("--tasks", tasks_, "A line for every task of an array, not one for the array");
    TakesJob(Add(*get, "job", "One job", [this] {
      return WithClient([this](auto& client) { return GetJob(client, job_, format(), terminal_); });
    }));
    Add(*get, "spares", "Devices that are kept free for jobs that recover from a fault", [this] {
      return WithClient([this](auto& client) { return GetSpares(client, format(), terminal_); });
    });
    Add(*get, "reservations", "Devices that are reserved, and for whom", [this] {
      return WithClient(
          [this](auto& client) { return GetReservations(client, format(), terminal_); });
    });
    for (CLI::App* parent : {get, &app_}) {
      Add(*parent, "workers", "All workers", [this] {
        return WithClient(
            [this](auto& client) { return GetWorkers(client, tree_, format(), terminal_); });
      })->add_flag("--tree", tree_, "As a tree of zones, blocks, racks and NVLink domains");
    }
    for (const auto& [parent, name] : {std::pair(&app_, "queue"), {get, "queues"}}) {
      Add(*parent, name, "The queues: what each uses, is guaranteed, borrows and waits for",
          [this] {
            return WithClient([this](auto& client) { return Queues(client, format(), terminal_); });
          });
    }
    CLI::App* describe = AddGroup(app_, "describe", "Everything about one job or worker");
    Add(*describe, "worker", "State, devices, domains, and the faults that speak against it",
        [this] {
          return WithClient([this](auto& client) {
            return DescribeWorker(client, fleet_.workers.front(), format(), terminal_);
          });
        })
        ->add_option("WORKER", fleet_.workers, "Its name")
        ->required()
        ->expected(1);
    TakesJob(Add(*describe, "job", "State, ranks, attempts, checkpoints, events and spec", [this] {
      return WithClient(
          [this](auto& client) { return DescribeJob(client, job_, format(), terminal_); });
    }));
    TakesJob(Add(app_, "watch", "Follow a job to its end; exit 1 when it fails", [this] {
      return WithClient([this](auto& client) {
        return Watch(client, job_, format(), terminal_, kReconnectPatience);
      });
    }));
    TakesJobs(Add(app_, "cancel", "Ask jobs to stop", [this] {
      return WithClient([this](auto& client) {
        return ForEachJob(
            [&](const std::string& job) { return Cancel(client, job, format(), terminal_); });
      });
    }));
    TakesJob(Add(app_, "explain",
                 "Why a job, or the tasks of an array, wait, what would let them start, and when",
                 [this] {
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
         "Stop running jobs at the end of a step, with a checkpoint; they stay in their queues"},
        {"suspend", JobChange::kSuspend, "The same, and hold them until `muster resume`"},
        {"resume", JobChange::kResume, "Let suspended or held jobs wait in their queues again"},
        {"hold", JobChange::kHold, "Keep jobs that wait from starting"},
        {"release", JobChange::kRelease, "As resume"},
        {"requeue", JobChange::kRequeue,
         "Stop running jobs now and put them back into their queues; or end a back-off"}};
    for (const auto& [name, change, help] : changes) {
      CLI::App* command = Add(app_, name, help, [this, change = change] {
        return WithClient([this, change](auto& client) {
          return ForEachJob([&](const std::string& job) {
            v1::ChangeJobRequest request;
            request.set_name(job);
            request.set_reason(reason_);
            return ChangeJob(client, change, request, format(), terminal_);
          });
        });
      });
      TakesJobs(command);
      command->add_option("--reason", reason_, "For people: it stands in the job's events")
          ->type_name("TEXT");
    }
    CLI::App* resize = Add(app_, "resize",
                           "Give an elastic job another number of ranks (docs/elastic.md)", [this] {
                             return WithClient([this](auto& client) {
                               return ResizeJob(client, job_, ranks_, reason_, format(), terminal_);
                             });
                           });
    TakesJob(resize);
    resize->add_option("RANKS", ranks_, "A number, or auto: the scheduler chooses")->required();
    resize->add_option("--reason", reason_, "For people: it stands in the job's events")
        ->type_name("TEXT");
  }

  void DeclareTop() {
    CLI::App* top = Add(app_, "top", "Workers, devices, queues and jobs, live; q ends it", [this] {
      top_.interval = absl::Seconds(top_interval_);
      return WithClient([this](auto& client) { return Top(client, top_, format(), terminal_); });
    });
    top->add_flag("--once", top_.once, "Print them once, also where this is no terminal");
    top->add_option("--sort", top_.sort, "Order of the jobs")
        ->check(CLI::IsMember(TopOrders()))
        ->capture_default_str()
        ->type_name("ORDER");
    top->add_option("--interval", top_interval_, "Seconds between two looks [default: 1]")
        ->check(CLI::Range(0.5, 3600.0))
        ->type_name("SECONDS");
  }

  void DeclareUsage() {
    CLI::App* usage =
        Add(app_, "usage", "What devices were used for, in device-hours, and the goodput", [this] {
          usage_.job = job_;
          return WithClient(
              [this](auto& client) { return Usage(client, usage_, format(), terminal_); });
        });
    TakesJob(usage, /*required=*/false);
    usage
        ->add_option("--by", usage_.by,
                     "One line for each job, queue, tenant or cause; several "
                     "with commas")
        ->check(CLI::IsMember({"job", "queue", "tenant", "cause"}))
        ->delimiter(',')
        ->capture_default_str()
        ->type_name("KEY");
    usage
        ->add_option("--since", usage_.since,
                     "From then on: 90s, 10m, 36h, 7d ago, or a time [default: all that is known]")
        ->type_name("TIME");
    usage->add_option("--until", usage_.until, "Up to then [default: now]")->type_name("TIME");
    usage->add_option("--queue", usage_.queue, "Only jobs of this queue");
    usage->add_option("--tenant", usage_.tenant, "Only jobs with this label `tenant`");
    CLI::App* diff =
        Add(app_, "diff-rankmap", "Which ranks another attempt of a job has elsewhere", [this] {
          return WithClient([this](auto& client) {
            return DiffRankMap(client, job_, diff_from_, diff_to_, format(), terminal_);
          });
        });
    TakesJob(diff);
    diff->add_option("FROM", diff_from_, "Epoch [default: the one before TO]");
    diff->add_option("TO", diff_to_, "Epoch [default: the newest]");
  }

  void DeclareLogs() {
    CLI::App* logs = Add(app_, "logs", "Output of one rank", [this] {
      logs_.job = job_;
      return WithClient([this](auto& client) { return Logs(client, logs_, format(), terminal_); });
    });
    TakesJob(logs);
    logs->add_flag("-f,--follow", logs_.follow,
                   "Wait for more, through restarts, until the job ends");
    logs->add_option("--rank", logs_.rank, "Rank [default: 0]")->check(AtLeast(0));
    logs->add_option("--epoch", logs_.epoch, "Attempt [default: the newest]");
    logs->add_option("--tail", logs_.tail_bytes, "Only the last BYTES")
        ->check(AtLeast(0))
        ->type_name("BYTES");
    logs->add_option("--since", logs_.since,
                     "Only what was written since: 90s, 10m, 36h ago, or a time")
        ->excludes("--tail")
        ->type_name("TIME");
    logs->add_flag("--all-ranks", logs_.all_ranks,
                   "Every rank, in order of time; each line begins with its rank");
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
    sample->add_option("--prompt", sample_.prompt, "Text to go on from")
        ->required()
        ->check(CLI::Validator(
            [](const std::string& text) {
              return text.empty() ? std::string("it is empty; give a text to go on from") : "";
            },
            ""));
    sample->add_option("--tokens", sample_.tokens, "Tokens to make")
        ->check(AtLeast(1))
        ->capture_default_str();
    sample->add_option("--temperature", sample_.temperature, "0 takes the likeliest token")
        ->check(AtLeast(0, /*whole=*/false))
        ->capture_default_str();
    sample->add_option("--top-k", sample_.top_k, "Only from the K likeliest; 0 = all")
        ->check(AtLeast(0))
        ->capture_default_str();
    sample->add_option("--seed", sample_.seed, "The same seed gives the same text")
        ->capture_default_str();
    sample->add_option("--step", sample_.step, "Checkpoint of this step [default: the newest]")
        ->check(AtLeast(1));
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

  void DeclareFleet() {
    const auto takes_workers = [this](CLI::App* command) {
      command->add_option("WORKER", fleet_.workers, "Names of workers")->required();
    };
    const auto takes_reason = [this](CLI::App* command) {
      command->add_option("--reason", fleet_.reason, "Why, for people")->type_name("TEXT");
    };
    CLI::App* cordon = Add(app_, "cordon", "Keep new ranks away from workers", [this] {
      return WithClient(
          [this](auto& client) { return Cordon(client, fleet_, format(), terminal_); });
    });
    takes_workers(cordon);
    takes_reason(cordon);
    takes_workers(Add(app_, "uncordon", "Give workers ranks again; ends a drain too", [this] {
      return WithClient(
          [this](auto& client) { return Uncordon(client, fleet_, format(), terminal_); });
    }));
    takes_workers(Add(app_, "forgive", "Forget the faults of workers, as after a repair", [this] {
      return WithClient(
          [this](auto& client) { return Forgive(client, fleet_, format(), terminal_); });
    }));
    CLI::App* drain = Add(
        app_, "drain", "Cordon workers and move their jobs after their next checkpoint", [this] {
          return WithClient(
              [this](auto& client) { return Drain(client, fleet_, format(), terminal_); });
        });
    takes_workers(drain);
    takes_reason(drain);
    drain
        ->add_option("--timeout", fleet_.timeout,
                     "How long jobs may take to commit it, such as 10m; 0s stops them at once "
                     "[default: 30m]")
        ->type_name("TIME");
    CLI::App* reserve =
        Add(app_, "reserve", "Keep devices for the jobs of one queue or with one label", [this] {
          return WithClient([this](auto& client) {
            return Reserve(client, reserve_, absl::Now(), format(), terminal_);
          });
        });
    reserve->add_option("NAME", reserve_.name, "Of the reservation")->required();
    reserve->add_option("WORKER", reserve_.workers,
                        "All devices of this worker; WORKER/DEVICE: one of them, w1/cuda:0");
    reserve->add_option("--queue", reserve_.queue, "For jobs of this queue");
    reserve->add_option("--label", reserve_.label, "For jobs with this label")
        ->type_name("NAME=VALUE");
    reserve->add_option("--owner", reserve_.owner, "Who asked for it, for people");
    reserve->add_option("--for", reserve_.for_time, "How long, such as 2h")->type_name("TIME");
    reserve->add_flag("--end", reserve_.end, "End the reservation of this name instead");
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
        ->add_option("FILE", queues_file_, "YAML or JSON; - is stdin")
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
    DeclareTokens(*admin);
    DeclarePki(*admin);
    Add(app_, "audit", "Who changed what, and who was refused, oldest first",
        [this] {
          return WithClient(
              [this](auto& client) { return Audit(client, since_, format(), terminal_); });
        })
        ->add_option("--since", since_,
                     "Only from so long ago (24h, 7d), or from a moment (2026-11-24T08:00:00Z)")
        ->type_name("TIME");
  }

  void DeclareTokens(CLI::App& admin) {
    CLI::App* token = AddGroup(admin, "token", "Bearer tokens of users (docs/security.md)");
    CLI::App* create = Add(*token, "create", "Make a token and print it, this once", [this] {
      return WithClient(
          [this](auto& client) { return TokenCreate(client, token_, format(), terminal_); });
    });
    create->add_option("USER", token_.user, "Who calls with it")->required();
    TakesRoles(create, token_.roles)->required();
    create->add_option("--expires", token_.expires, "How long it is good, at most 365d")
        ->capture_default_str()
        ->type_name("TIME");
    Add(*token, "list", "Tokens, without their secrets", [this] {
      return WithClient([this](auto& client) { return TokenList(client, format(), terminal_); });
    });
    Add(*token, "revoke", "End a token now",
        [this] {
          return WithClient(
              [this](auto& client) { return TokenRevoke(client, token_, format(), terminal_); });
        })
        ->add_option("ID", token_.id, "The letters behind muster_; see `muster admin token list`")
        ->required();
  }

  static CLI::Option* TakesRoles(CLI::App* command, std::vector<std::string>& roles) {
    return command
        ->add_option("--role", roles,
                     "viewer, submitter, operator or admin; @QUEUE behind it for one queue; may be "
                     "repeated")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false);
  }

  void DeclarePki(CLI::App& admin) {
    CLI::App* pki = AddGroup(admin, "pki", "An authority in a directory, and its certificates");
    CLI::App* init = Add(*pki, "init", "Make an authority and the coordinator's certificate",
                         [this] { return PkiInit(pki_, format(), terminal_); });
    init->add_option("--host", pki_.hosts,
                     "DNS name or IP address by which the coordinator is called; may be repeated")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false)
        ->required();
    init->add_option("--cluster", pki_.cluster, "In the authority's name")->capture_default_str();
    CLI::App* worker = Add(*pki, "issue-worker", "A worker's certificate, which names it",
                           [this] { return PkiIssueWorker(pki_, format(), terminal_); });
    worker->add_option("WORKER", pki_.name, "Its --name; '*' is good for every worker")->required();
    CLI::App* metrics =
        Add(*pki, "issue-metrics", "A certificate for the metrics of a worker's daemon",
            [this] { return PkiIssueMetrics(pki_, format(), terminal_); });
    metrics->add_option("HOST", pki_.hosts, "DNS names or addresses by which it is scraped")
        ->required();
    CLI::App* user = Add(*pki, "issue-user", "A user's certificate, with their roles",
                         [this] { return PkiIssueUser(pki_, format(), terminal_); });
    user->add_option("USER", pki_.name, "Their name")->required();
    TakesRoles(user, pki_.roles);
    CLI::App* rotate = Add(*pki, "rotate", "Issue again what ends soon; replace the authority",
                           [this] { return PkiRotate(pki_, format(), terminal_); });
    rotate->add_option("--before", pki_.before, "What ends within this time")
        ->capture_default_str()
        ->type_name("TIME");
    rotate->add_flag("--new-authority", pki_.new_authority,
                     "Make another authority, trusted beside the others; issue nothing");
    rotate->add_flag("--retire", pki_.retire, "Trust only the newest authority");
    CLI::App* revoke = Add(*pki, "revoke", "Add a certificate to the revocation list",
                           [this] { return PkiRevoke(pki_, format(), terminal_); });
    revoke->add_option("CERTIFICATE", pki_.certificate, "Its file")->required()->type_name("FILE");
    for (CLI::App* command : {init, worker, metrics, user, rotate, revoke}) {
      command->add_option("--pki-dir", pki_.directory, "Directory of the authority")
          ->default_val("pki")
          ->type_name("DIR");
    }
    for (CLI::App* command : {init, worker, metrics, user}) {
      command->add_option("--lifetime", pki_.lifetime, "How long the certificate is good")
          ->capture_default_str()
          ->type_name("TIME");
    }
  }

  void DeclareRest() {
    CLI::App* doctor =
        Add(app_, "doctor",
            "Whether this machine can run a worker or coordinator: driver, libraries, limits, "
            "disk, network, TLS. Exit 1 when a check fails",
            [this] { return Doctor(); });
    doctor
        ->add_option("--state-dir", doctor_.directory,
                     "Directory whose disk is tried: that of the daemon or coordinator "
                     "[default: the current one]")
        ->type_name("DIR");
    doctor
        ->add_option("--ports", doctor_.ports,
                     "Ports that services are to listen on, such as 7600,9071,20000-20999")
        ->type_name("LIST");
    doctor
        ->add_option("--job-user", doctor_.job_user.user,
                     "Whether a daemon of this user could run with it")
        ->type_name("NAME");
    doctor
        ->add_option("--job-user-map", doctor_.job_user.map_file, "The same, for --job-user owner")
        ->type_name("FILE");
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
    replay->add_flag("--strict", replay_.strict,
                     "Exit with 1 when a plan made again decides something else");
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
        Endpoint endpoint,
        FindCoordinator(coordinator_, surroundings_.environment("MUSTER_COORDINATOR"), Home()));
    RETURN_IF_ERROR(AddProof(endpoint));
    return action(*CoordinatorClient::Connect(endpoint));
  }

  // What the flags and the environment say of TLS and of the caller. The cluster of `muster local`
  // needs none of it, and what is meant for another does not keep it from being called.
  absl::Status AddProof(Endpoint& endpoint) {
    const bool local =
        endpoint.origin != "--coordinator" && endpoint.origin != "$MUSTER_COORDINATOR";
    const auto pick = [this, local](const std::string& flag, const char* variable) {
      return !flag.empty() || local ? flag : surroundings_.environment(variable);
    };
    endpoint.tls = {.certificate = pick(tls_.certificate, "MUSTER_TLS_CERT"),
                    .key = pick(tls_.key, "MUSTER_TLS_KEY"),
                    .authorities = pick(tls_.authorities, "MUSTER_TLS_CA")};
    endpoint.server_name = pick(server_name_, "MUSTER_TLS_SERVER_NAME");
    // As tools of OpenTelemetry hand the trace of a script on to what it runs.
    const std::string traceparent = surroundings_.environment("TRACEPARENT");
    if (ParseTraceparent(traceparent).has_value()) endpoint.traceparent = traceparent;
    const std::string file = pick(token_file_, "MUSTER_TOKEN_FILE");
    if (token_file_.empty()) endpoint.token = pick("", "MUSTER_TOKEN");
    if (endpoint.token.empty() && !file.empty()) {
      ASSIGN_OR_RETURN(const std::string text, PosixFileSystem()->Read(file));
      endpoint.token = std::string(absl::StripAsciiWhitespace(text));
      if (endpoint.token.empty()) {
        return absl::InvalidArgumentError(absl::StrCat("the token file ", file, " is empty"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Doctor() {
    if (doctor_.directory.empty()) doctor_.directory = surroundings_.working_directory;
    Endpoint given;
    given.origin = "$MUSTER_COORDINATOR";  // as for a cluster that somebody named
    AddProof(given).IgnoreError();         // of a token alone, which the call below tells, too
    doctor_.tls = given.tls;
    ASSIGN_OR_RETURN(MachineFacts facts, GatherFacts(doctor_));
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
        ASSIGN_OR_RETURN(const std::vector<v1::Job> jobs, client.ListJobs(/*label_selector=*/""));
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
  security::TlsFiles tls_;
  std::string server_name_;
  std::string token_file_;
  TokenOptions token_;
  PkiOptions pki_;
  std::string since_;
  std::string format_text_ = "table";
  std::string home_;
  std::string job_;
  std::vector<std::string> jobs_;
  std::string reason_;
  std::string ranks_;
  bool tasks_ = false;
  std::string labels_;
  std::string queues_file_;
  std::string worker_;
  bool tree_ = false;
  FleetOptions fleet_;
  ReserveOptions reserve_;
  DoctorOptions doctor_;
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
  TopOptions top_;
  double top_interval_ = 1;
  UsageOptions usage_;
  uint64_t diff_from_ = 0, diff_to_ = 0;
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
