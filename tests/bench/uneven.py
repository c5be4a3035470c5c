#!/usr/bin/env python3
"""Uneven tensor shares on ranks of uneven speed: two CPU ranks, held to 5:3 by the kernel's scheduler.

Two tensor ranks train a Mamba-2, each on a thread of its own. Rank 1 gets three fifths of a
processor (cgroup cpu, a period of 5 ms), so that the two do 1.6 times the work of one. Step times:

    even       equal shares, nobody is held back
    throttled  equal shares, rank 1 is held back: every step waits for it
    uneven     tensor_shares [5, 3], rank 1 is held back
    measured   balance: measured, rank 1 is held back from its start
    ideal      even x 2 / 1.6: what a split without any loss could reach

Takes turns, and prints medians, the ratios to the ideal and the shares that were measured as one
line of JSON. Root only; the machine must have two idle processors.

    tests/bench/uneven.py --bin build/bin [--runs 3] [--groups 1]
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "e2e"))
from cluster import Cluster, is_final  # noqa: E402

SPEED = 0.6  # of rank 1
PERIOD = 5000  # microseconds
WARM_UP, STEPS = 3, 24
SPEC = """\
name: {name}
engine:
  model: {{family: mamba2, layers: 4, hidden: 512, mamba: {{head_width: 64, state: 64, groups: {groups}}}, vocab: 256, sequence_length: 512}}
  data: {{train: [{{path: data/text}}]}}
  training: {{steps: 100000, global_batch: 2, micro_batch: 2, seed: 7, optimizer: {{adamw: {{lr: 1.0e-4}}}}}}
  parallel: {{tensor: 2, sequence: true, {split}}}
resources: {{device: cpu, ranks: 2, threads_per_rank: 1}}
checkpoint: {{path: checkpoints/{name}, every_steps: 100000}}
"""


class Throttle:
    """A cgroup with a share of one processor, of version 1 or 2."""

    def __init__(self, speed):
        root = pathlib.Path("/sys/fs/cgroup")
        first = (root / "cpu").is_dir()
        self.path = (root / "cpu" if first else root) / f"muster-uneven-{os.getpid()}"
        self.path.mkdir()
        quota = int(PERIOD * speed)
        if first:
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.path / "cpu.max").write_text(f"{quota} {PERIOD}")

    def hold(self, pid):
        (self.path / "cgroup.procs").write_text(str(pid))

    def close(self):
        self.path.rmdir()


def step_seconds(cluster, name, split, groups, throttle):
    path = cluster.cwd / f"{name}.yaml"
    path.write_text(SPEC.format(name=name, split=split, groups=groups))
    cluster.run("submit", path)
    if throttle is not None:  # before it measures
        job = cluster.wait_for(name, "rank 1 has a process", lambda j: j["ranks"][1]["pid"] > 0)
        throttle.hold(job["ranks"][1]["pid"])
    job = cluster.wait_for(name, "it trains", lambda j: j["step"] >= 1 or is_final(j))
    assert job["state"] == "running", job["message"]
    first = cluster.wait_for(name, "it is warm", lambda j: j["step"] >= job["step"] + WARM_UP)
    begin = time.monotonic()
    last = cluster.wait_for(name, "it has trained", lambda j: j["step"] >= first["step"] + STEPS)
    seconds = (time.monotonic() - begin) / (last["step"] - first["step"])
    cluster.run("cancel", name)
    cluster.finish(name)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--groups", type=int, default=1,
                        help="of the 16 heads; with 2, rank 0 has heads of rank 1's group")
    options = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-uneven-"))
    cluster = Cluster(options.bin.resolve(), directory / "home", cwd=directory, workers=1, slots=2)
    throttle = Throttle(SPEED)
    seconds = {"even": [], "throttled": [], "uneven": [], "measured": []}
    measured = []
    try:
        (directory / "text").write_bytes(pathlib.Path(__file__).read_bytes() * 200)
        cluster.run("data", "tokenize", "--input", directory / "text", "--output",
                    directory / "data/text", "--tokenizer", "bytes")
        cluster.up()
        for run in range(options.runs):
            for what, split, held in (("even", "tensor_shares: [1, 1]", None),
                                      ("throttled", "tensor_shares: [1, 1]", throttle),
                                      ("uneven", "tensor_shares: [5, 3]", throttle),
                                      ("measured", "balance: measured", throttle)):
                seconds[what].append(step_seconds(cluster, f"{what}-{run}", split,
                                                  options.groups, held))
            log = cluster.run("logs", f"measured-{run}").stdout
            measured.append(re.search(r"tensor_shares=\[([^]]*)\]|equally fast", log).group(0))
    finally:
        cluster.down()
        throttle.close()
        shutil.rmtree(directory, ignore_errors=True)
    median = {what: statistics.median(values) for what, values in seconds.items()}
    ideal = median["even"] * 2 / (1 + SPEED)
    print(json.dumps({
        "runs": options.runs,
        "groups": options.groups,
        **{what: [round(x, 3) for x in (median[what], min(values), max(values))]
           for what, values in seconds.items()},
        "ideal": round(ideal, 3),
        "throttled_to_ideal": round(median["throttled"] / ideal, 3),
        "uneven_to_ideal": round(median["uneven"] / ideal, 3),
        "measured_to_ideal": round(median["measured"] / ideal, 3),
        "measured_shares": measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
