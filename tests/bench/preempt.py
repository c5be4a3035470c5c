#!/usr/bin/env python3
"""How long a job of a larger priority waits for the devices of a running one.

A local cluster of one worker with two slots runs a small GPT; then a job of a larger priority is
submitted. Measured, each time: from the call of `muster submit` until the winner's first step is
reported; and how many steps of the victim were trained and not saved. Verified: the losses of the
victim, to its end, are those of the same job left alone, to the last bit. Prints one line of JSON.

    tests/bench/preempt.py --bin build/bin [--runs 7]
"""

import argparse
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "e2e"))
from cluster import Cluster, is_final  # noqa: E402

SPEC = """\
name: {name}
priority: {priority}
engine:
  model: {{family: gpt2, layers: 4, hidden: 128, heads: 4, vocab: 256, sequence_length: 64}}
  data: {{train: [{{path: data/text}}]}}
  training: {{steps: {steps}, global_batch: 16, micro_batch: 8, seed: 7, optimizer: {{adamw: {{lr: 1.0e-3}}}}}}
resources: {{device: cpu, ranks: 2}}
checkpoint: {{path: checkpoints/{name}, every_steps: 100000, keep: 2}}
preemption: {{min_runtime: 0s}}
"""


# At least so many steps of the victim between two winners.
STEPS_EACH = 60


def finish(cluster, name):
    job = cluster.finish(name)
    assert job["state"] == "succeeded", job
    return job


def submit(cluster, directory, name, priority, steps):
    path = directory / f"{name}.yaml"
    path.write_text(SPEC.format(name=name, priority=priority, steps=steps))
    cluster.run("submit", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-preempt-"))
    cluster = Cluster(options.bin.resolve(), directory / "home", cwd=directory, workers=1, slots=2)
    seconds, lost = [], []
    try:
        (directory / "text").write_bytes(pathlib.Path(__file__).read_bytes() * 200)
        cluster.run("data", "tokenize", "--input", directory / "text", "--output",
                    directory / "data/text", "--tokenizer", "bytes")
        cluster.up()
        steps = STEPS_EACH * (options.runs + 2)
        submit(cluster, directory, "victim", 50, steps)
        for run in range(options.runs):
            before = cluster.wait_for("victim", "it trains",
                                      lambda j: j["state"] == "running" and j["step"] >= STEPS_EACH * run + 20)
            name = f"winner-{run}"
            asked = time.monotonic()
            submit(cluster, directory, name, 900, 5)
            cluster.wait_for(name, "its first step", lambda j: j["step"] >= 1 or is_final(j))
            seconds.append(time.monotonic() - asked)
            finish(cluster, name)
            victim = cluster.job("victim")
            end = victim["causes"][-1]
            assert (end["epoch"], end["cause"]) == (before["epoch"], "preempted"), end
            lost.append(end["step"] - victim["lastCommittedStep"])
        victim = finish(cluster, "victim")
        assert [end["cause"] for end in victim["causes"]] == options.runs * ["preempted"] + ["completed"], victim["causes"]
        submit(cluster, directory, "alone", 50, steps)
        alone = finish(cluster, "alone")
        assert victim["losses"] == alone["losses"], (victim["losses"], alone["losses"])
        assert alone["losses"][-1]["step"] == steps and alone["attempts"] == 1
    finally:
        cluster.down()
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"runs": options.runs, "seconds_median": round(statistics.median(seconds), 3),
                      "seconds_min": round(min(seconds), 3), "seconds_max": round(max(seconds), 3),
                      "steps_lost": sum(lost), "losses_equal": len(alone["losses"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
