"""The whole product on one machine with GPUs, from a package to a trained model, in one command.

Unpacks a package, starts a coordinator and a daemon, shows the GPUs and links that the daemon found,
tokenizes a text, trains examples/gpt2-124m.yaml on every GPU, scrapes the metrics of every process,
profiles two steps, kills one rank with SIGKILL, and checks that training goes on from the last committed checkpoint and
ends well. What it prints is a log for people; it exits with 1 when anything is not as it should be.

With --device cpu the same runs at a small size on CPU slots.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from cluster import Cluster, is_final, kill  # noqa: E402

JOB = "gpt2-124m"
# Of the example's fields, on CPU slots.
SMALL = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 256, "sequence_length": 64, "steps": 500,
         "global_batch": 8, "micro_batch": 2, "precision": "fp32", "warmup_steps": 10, "device": "cpu",
         "every_steps": 30, "evaluate_every": 60, "lr": "3.0e-3"}
SHOWN = ("muster_jobs", "muster_job_step", "muster_rank_step", "muster_rank_loss", "muster_rank_tokens",
         "muster_rank_exposed", "muster_worker_ranks", "muster_commit")

started = time.monotonic()


def say(text):
    print(f"[{time.monotonic() - started:7.2f} s] {text}", flush=True)


def check(holds, what):
    if not holds:
        raise AssertionError(what)


def unpack(package, work):
    """The folder of binaries; a folder is taken as it is."""
    if package.is_dir():
        return package / "bin" if (package / "bin").is_dir() else package
    target = work / "package"
    target.mkdir(parents=True)
    subprocess.run(["tar", "-C", target, "-xf", package], check=True)
    (unpacked,) = target.iterdir()
    say(f"unpacked {package.name} ({package.stat().st_size / 2**20:.1f} MiB)")
    return unpacked / "bin"


def write_spec(options, ranks, work):
    text = (ROOT / "examples" / f"{JOB}.yaml").read_text()
    replaced = {"ranks": ranks, "data": ranks}
    if options.device == "cpu":
        replaced.update(SMALL)
    elif ranks != 4:
        replaced["global_batch"] = 64 * ranks
    if options.steps:
        replaced["steps"] = options.steps
    if options.precision:
        replaced["precision"] = options.precision
    for field, value in replaced.items():
        text, count = re.subn(rf"(\b{field}: )([^,}}\s{{]+)", rf"\g<1>{value}", text)
        check(count == 1, f"{field} stands {count} times in the example")
    spec = work / f"{JOB}.yaml"
    spec.write_text(text)
    return spec


def show_devices(cluster, device):
    (worker,) = cluster.json("get", "workers")
    print(cluster.run("get", "workers").stdout.rstrip())
    gpus = [d for d in worker["devices"] if d["kind"].endswith("cuda")]
    for gpu in gpus:
        links = ", ".join(f"{peer} NV{count}" for peer, count in sorted(gpu["nvlinks"].items()))
        print(f"  {gpu['name']}  {gpu['model']}  {gpu['uuid']}  {int(gpu['memoryBytes']) / 2**30:.0f} GiB  "
              f"PCI {gpu['pciAddress']}  NUMA {gpu['numaNode']}  {links}")
    if device == "cuda":
        check(gpus, "the daemon found no GPU")
        check(all(len(g["nvlinks"]) == len(gpus) - 1 for g in gpus), "GPUs without NVLink to the others")
    return len(gpus)


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return reply.read().decode()


def show_metrics(cluster, work):
    status = cluster.status()
    addresses = {"coordinator": status["coordinator"]["metrics"]}
    for worker in status["workers"]:
        addresses[worker["name"]] = worker["metrics"]
    for name, address in addresses.items():
        text = scrape(address)
        samples = [line for line in text.splitlines() if line and not line.startswith("#")]
        check(samples, f"{name} serves no metrics at {address}")
        say(f"metrics of {name} at {address}: {len(samples)} samples, for example")
        for line in [s for s in samples if s.startswith(SHOWN) and "bucket" not in s][:8]:
            print(f"    {line}")


def train(cluster, options, ranks, work):
    spec = write_spec(options, ranks, work)
    cluster.run("submit", spec)
    say(f"submitted {spec.name}: {ranks} ranks on {options.device}")
    job = cluster.wait_for(JOB, "the first step", lambda j: j["step"] >= 1 or is_final(j), 180)
    check(not is_final(job), f"the job ended: {job.get('message')} {job['causes']}")
    say(f"step {job['step']}, loss {job['trainLoss']:.4f}, ranks on "
        + ", ".join(f"{r['device']} (pid {r['pid']})" for r in job["ranks"]))
    first_loss = job["trainLoss"]
    job = cluster.wait_for(JOB, "a committed checkpoint",
                           lambda j: int(j["lastCommittedStep"]) > 0 or is_final(j), 300)
    check(not is_final(job), f"the job ended: {job.get('message')} {job['causes']}")
    job = cluster.wait_for(JOB, "some steps beyond it",
                           lambda j: int(j["step"]) >= int(j["lastCommittedStep"]) + 10 or is_final(j), 300)
    say(f"step {job['step']}, loss {job['trainLoss']:.4f}, {job['tokensPerSecond']:.0f} tokens/s, "
        f"{job['stepSeconds'] * 1e3:.1f} ms a step, committed {job['lastCommittedStep']}")
    show_metrics(cluster, work)
    say("where two steps go:")
    print(cluster.run("profile", JOB, "--steps", "2", "--output", work / "steps.trace.json").stdout.rstrip())
    spans = json.loads((work / "steps.trace.json").read_text())
    spans = spans if isinstance(spans, list) else spans["traceEvents"]
    check({s.get("pid") for s in spans} == set(range(ranks)), "the profile is not of every rank")
    return disturb(cluster, first_loss)


def disturb(cluster, first_loss):
    job = cluster.job(JOB)
    check(not is_final(job), f"ended before a rank was killed: {job['state']}")
    victim = job["ranks"][-1]
    kill(victim["pid"])
    killed = time.monotonic()
    say(f"kill -9 rank {victim['rank']} (pid {victim['pid']}, {victim['device']}) at step {job['step']}")
    after = cluster.wait_for(JOB, "the attempt to end", lambda j: j["causes"] or is_final(j), 120)
    end = after["causes"][0]
    say(f"attempt {end['epoch']} ended after {time.monotonic() - killed:.2f} s: {end['cause']}, "
        f"rank {end.get('rank')}: {end['message']}")
    # The job's step is the last attempt's until the new ranks report one. Those of a rank have times
    # once it has trained one.
    def trains(j):
        return int(j["epoch"]) > int(job["epoch"]) and j["ranks"] and all(
            int(rank.get("times", {}).get("step", 0)) > 0 for rank in j["ranks"])
    again = cluster.wait_for(JOB, "training to go on", lambda j: is_final(j) or trains(j), 180)
    say(f"attempt {again['epoch']} trains on {time.monotonic() - killed:.2f} s after the kill: "
        f"step {again['ranks'][0]['times']['step']}, from the checkpoint of step {again['lastCommittedStep']}")
    job = cluster.finish(JOB, 600)
    check(job["state"] == "succeeded", f"ended as {job['state']}: {job.get('message')} {job['causes']}")
    check(int(job["step"]) == int(job["steps"]), f"ended at step {job['step']} of {job['steps']}")
    lost = [end for end in job["causes"] if end["cause"] != "completed"]
    check(len(lost) == 1, f"more than one attempt was lost: {lost}")
    check(job["trainLoss"] < first_loss, f"the loss did not fall: {first_loss} to {job['trainLoss']}")
    return job


def report(cluster, job):
    say(f"succeeded: {job['steps']} steps in {job['attempts']} attempts, train loss {job['trainLoss']:.4f}, "
        f"validation loss {job['validationLoss']:.4f}, last {job['tokensPerSecond']:.0f} tokens/s "
        f"({job['stepSeconds'] * 1e3:.1f} ms a step)")
    print("  loss: " + "  ".join(f"{p['step']}: {p['trainLoss']:.4f}" for p in job["losses"]
                                 if int(p["step"]) % 20 == 0 or int(p["step"]) == 1))
    print("  events:")
    for line in cluster.run("events", JOB).stdout.splitlines():
        print(f"    {line}")
    print("  rank 0's log:")
    log = cluster.run("logs", JOB, check=False).stdout.splitlines()
    # The second attempt computes with what the first has measured.
    check(not any("measuring how" in line for line in log), "the second attempt measured products again")
    for line in log[:8] + ["..."] + log[-4:]:
        print(f"    {line}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True, type=pathlib.Path,
                        help="dist/muster-*.tar.*, or a folder of binaries")
    parser.add_argument("--text", required=True, type=pathlib.Path, help="a text file to train on")
    parser.add_argument("--work", required=True, type=pathlib.Path, help="emptied first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="default: every GPU, or 4 CPU slots")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--precision", default="")
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    (work / "data").mkdir(parents=True)
    binaries = unpack(options.package.resolve(), work)
    slots = options.ranks or 4 if options.device == "cpu" else 1
    cluster = Cluster(binaries, work / "home", cwd=work, workers=1, slots=slots)
    with cluster:
        say("coordinator and daemon are up")
        gpus = show_devices(cluster, options.device)
        ranks = options.ranks or (gpus if options.device == "cuda" else 4)
        cluster.run("data", "tokenize", "--input", options.text.resolve(), "--output", work / "data" / "text",
                    "--tokenizer", "bytes", "--split", "train=0.99,validation=0.01")
        say(f"tokenized {options.text.name}, {options.text.stat().st_size} bytes")
        try:
            report(cluster, train(cluster, options, ranks, work))
        except BaseException:
            print(cluster.run("events", JOB, check=False).stdout)
            for log in sorted((work / "home").rglob("attempts/*/*")):
                if log.is_file() and (log.suffix in (".log", ".out", ".err") or "log" in log.name):
                    print(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
            raise
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, RuntimeError) as problem:
        print(f"product: {problem}", file=sys.stderr)
        sys.exit(1)
