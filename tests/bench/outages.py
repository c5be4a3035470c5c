#!/usr/bin/env python3
"""What pauses of the coordinator and partitions cost running jobs.

A cluster over network namespaces: a coordinator and three daemons on hosts of their own. Two jobs
run all the time: a GPT on all three CPU workers, and a command of two ranks that makes a step a
second. At random the coordinator is stopped (SIGSTOP) for 1 second to 5 minutes, or all workers, or
its own link, are cut off from it for up to 10 minutes; between these the network is whole for a
while. At the end: how often what happened, the attempts of the jobs, and the steps that were
trained twice. Prints one line of JSON; fails unless every attempt is the first and no step was
trained twice.

    tests/bench/outages.py --bin build/bin [--minutes 60] [--seed 1]     (root: makes namespaces)
"""

import argparse
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e" / "hosts"))
from hosts import HostsCluster  # noqa: E402
from network import Network, why_not  # noqa: E402

GPT = """\
name: gpt
engine:
  model: {family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 256, sequence_length: 64}
  data: {train: [{path: data/text}]}
  training: {steps: 100000000, global_batch: 12, micro_batch: 4, seed: 7, optimizer: {adamw: {lr: 1.0e-4}}}
resources: {device: cpu, ranks: 3, threads_per_rank: 1}
checkpoint: {path: checkpoints/gpt, every_steps: 200, keep: 2}
restart: {max_failures: 0}
"""
COMMAND = """\
name: command
command: [python3, steps.py]
resources: {device: cpu, ranks: 2}
restart: {max_failures: 0}
"""
# Every step that a rank makes leaves a line, so that one that is made twice can be counted.
STEPS = """\
import json, os, time
step = int(os.environ.get("MUSTER_RESTORE_STEP", 0))
while True:
    time.sleep(1)
    step += 1
    with open(os.environ["MUSTER_PROGRESS_FILE"], "w") as file:
        json.dump({"step": step, "loss": 1 / step}, file)
    with open("steps-of-rank-" + os.environ["RANK"], "a") as file:
        file.write(f"{step}\\n")
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if reason := why_not():
        print(f"outages: {reason}", file=sys.stderr)
        return 77
    draw = random.Random(options.seed)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-outages-"))
    network = Network("habc", kind="veth")
    cluster = HostsCluster(options.bin.resolve(), network, directory, "h",
                           {name: {"slots": 2} for name in "abc"})
    happened = {"pauses": [], "all workers cut off": [], "coordinator cut off": []}
    try:
        (directory / "text").write_bytes(pathlib.Path(__file__).read_bytes() * 200)
        (directory / "steps.py").write_text(STEPS)
        cluster.up()
        cluster.run("data", "tokenize", "--input", directory / "text", "--output",
                    directory / "data/text", "--tokenizer", "bytes")
        for name, text in (("gpt", GPT), ("command", COMMAND)):
            (directory / f"{name}.yaml").write_text(text)
            cluster.run("submit", directory / f"{name}.yaml")
        for name in ("gpt", "command"):
            cluster.wait_for(name, "it trains", lambda job: job["state"] == "running" and job["step"] > 2)
        begin = time.monotonic()
        end = begin + 60 * options.minutes
        while (left := end - time.monotonic()) > 15:
            time.sleep(min(left, draw.uniform(2, 60)))
            # Many short ones, some as long as is promised.
            kind = draw.choice(list(happened))
            longest = 300 if kind == "pauses" else 600
            seconds = draw.uniform(1, longest if draw.random() < 0.2 else 40)
            seconds = min(seconds, max(1, end - time.monotonic()))
            happened[kind].append(round(seconds))
            print(f"{time.monotonic() - begin:6.0f} s: {kind}, {seconds:.0f} s", file=sys.stderr)
            if kind == "pauses":
                process = cluster.processes["coordinator"]
                process.send_signal(signal.SIGSTOP)
                time.sleep(seconds)
                process.send_signal(signal.SIGCONT)
            elif kind == "coordinator cut off":
                network.isolate("h")
                time.sleep(seconds)
                network.rejoin("h")
            else:
                # One after the other, as a switch that fails in parts.
                for name in draw.sample("abc", 3):
                    network.cut("h", name)
                    time.sleep(draw.uniform(0, 1))
                time.sleep(seconds)
                for name in draw.sample("abc", 3):
                    network.mend("h", name)
                    time.sleep(draw.uniform(0, 1))
        jobs = {}
        for name in ("gpt", "command"):
            seen = cluster.poll(f"{name} is heard again", lambda: cluster.job(name),
                                lambda job: job["state"] == "running", 120)
            jobs[name] = cluster.wait_for(name, "it goes on", lambda job: job["step"] > seen["step"], 120)
        again = 0
        for rank in (0, 1):
            steps = (directory / f"steps-of-rank-{rank}").read_text().split()
            again += len(steps) - len(set(steps))
    finally:
        cluster.down()
        network.close()
        shutil.rmtree(directory, ignore_errors=True)
    attempts = {name: job["attempts"] for name, job in jobs.items()}
    result = {
        "minutes": round((time.monotonic() - begin) / 60, 1), "seed": options.seed,
        "outages": {kind: {"count": len(each), "seconds": sum(each), "longest": max(each, default=0)}
                    for kind, each in happened.items()},
        "attempts": attempts, "steps": {name: job["step"] for name, job in jobs.items()},
        "steps_made_twice": again,
        "replayed_device_seconds": round(sum(
            each.get("deviceSeconds", 0) for job in jobs.values() for each in job["usage"]["times"]
            if each["usageClass"] == "USAGE_CLASS_REPLAYED"), 3),
    }
    print(json.dumps(result))
    return 0 if set(attempts.values()) == {1} and again == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
