#!/usr/bin/env python3
"""Short jobs beside Slurm: from the first submission of N jobs of one slot that do nothing until the last has ended.

Both have one worker (node) with the same number of slots (CPUs) on this machine, one after the other. Jobs are
submitted as one array, one by one by a few shells (`sbatch`, `muster submit`), and to Muster as a file of so many
specs, each a job of its own; Slurm has nothing like it, so that this is compared with sbatch one by one. Verified:
every job of both succeeded. Prints one line of JSON for each way, with the processor time of the whole machine that a
job took, and the ratios of Muster's rates to Slurm's. Needs root and Debian's slurm-wlm.

    tests/bench/slurm.py --bin build/bin [--jobs 5000] [--slots 32] [--shells 4]
                         [--only muster|slurm] [--way array|single|file]
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/deploy")]
from cluster import Cluster  # noqa: E402
from slurm_cluster import Slurm  # noqa: E402

SPEC = """\
name: noop
command: ["true"]
resources: {device: cpu, ranks: 1}
"""
# Muster's arrays have at most so many tasks; more jobs are several arrays.
TASKS_MAX = 10000


def settings(jobs):
    """What Slurm's guide for high throughput says of queues of many short jobs."""
    return [f"MaxJobCount={4 * jobs + 1000}", f"MaxArraySize={jobs + 1}", "MinJobAge=3600", "SlurmctldDebug=error",
            "SlurmdDebug=error",
            f"SchedulerParameters=default_queue_depth={jobs},sched_interval=1,bf_interval=30,sched_min_interval=100000"]


def states(slurm):
    """How many jobs are in which state, each task of an array for itself."""
    out = {}
    for state in slurm("squeue", "-h", "-r", "-t", "all", "-o", "%T").split():
        out[state] = out.get(state, 0) + 1
    return out


def wait_until(what, condition, seconds=3600, every=0.2):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(every)


def repeat(command, count, shells, environment, cwd):
    """Runs a command so many times, some at a time. Returns when all have been accepted."""
    loop = f"seq {count} | xargs -P {shells} -I {{}} {command} > /dev/null"
    subprocess.run(["sh", "-c", loop], check=True, env=environment, cwd=cwd)


def busy():
    """Seconds for which processors of this machine have worked since it started."""
    user, nice, system, _, _, irq, soft_irq = map(int, pathlib.Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


class Watch:
    """From the first submission to the last end."""

    def __init__(self):
        self.begin, self.busy, self.submitted = time.monotonic(), busy(), 0

    def accepted(self):
        self.submitted = time.monotonic() - self.begin

    def report(self, way, jobs):
        seconds, worked = time.monotonic() - self.begin, busy() - self.busy
        print(json.dumps({"way": way, "jobs": jobs, "submitted_seconds": round(self.submitted, 2),
                          "seconds": round(seconds, 2), "jobs_per_second": round(jobs / seconds, 1),
                          "processor_ms_per_job": round(1000 * worked / jobs, 2)}), flush=True)
        return jobs / seconds


def run_slurm(options, way):
    with tempfile.TemporaryDirectory(prefix="muster-slurm-bench-", ignore_cleanup_errors=True) as home:
        slurm = Slurm(home, nodes=1, cpus=options.slots, settings=settings(options.jobs))
        try:
            (slurm.home / "noop.sh").write_text("#!/bin/sh\ntrue\n")
            wait_until("the node is idle", slurm.idle)
            watch = Watch()
            if way == "array":
                slurm("sbatch", "-n", 1, "-o", "/dev/null", f"--array=1-{options.jobs}", "noop.sh")
            else:
                repeat("sbatch -n 1 -o /dev/null noop.sh", options.jobs, options.shells, slurm.environment, home)
            watch.accepted()
            wait_until("all jobs have ended", lambda: not slurm("squeue", "-h", "-t", "PD,R,CG,CF"), every=0.5)
            rate = watch.report(f"slurm, {way}", options.jobs)
            found = states(slurm)
            assert found == {"COMPLETED": options.jobs}, found
        finally:
            slurm.close()
    return rate


def run_muster(options, way):
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-short-jobs-"))
    cluster = Cluster(options.bin, directory / "home", cwd=directory, workers=1, slots=options.slots)
    try:
        cluster.up()
        (directory / "noop.yaml").write_text(SPEC)
        (directory / "all.yaml").write_text(
            "---\n".join(SPEC.replace("noop", f"noop-{i}") for i in range(options.jobs)))
        watch = Watch()
        if way == "array":
            for first in range(0, options.jobs, TASKS_MAX):
                numbers = ", ".join(map(str, range(first, min(first + TASKS_MAX, options.jobs))))
                (directory / f"array-{first}.yaml").write_text(f"{SPEC}array: {{number: [{numbers}]}}\n")
                cluster.run("submit", f"array-{first}.yaml", "--set", f"name=noop-{first}")
        elif way == "file":
            cluster.run("submit", "all.yaml")
        else:
            repeat(f"{cluster.muster_binary} submit noop.yaml --set name=noop-{{}}", options.jobs, options.shells,
                   cluster.environment, directory)
        watch.accepted()
        wait_until("all jobs have ended", lambda: idle(cluster), every=0.5)
        rate = watch.report(f"muster, {way}", options.jobs)
        done = succeeded(cluster)
        assert done == options.jobs, done
    finally:
        cluster.down()
        shutil.rmtree(directory, ignore_errors=True)
    return rate


def idle(cluster):
    return all(int(queue.get("runningJobs", 0)) + int(queue.get("waitingJobs", 0)) == 0
               for queue in cluster.json("queue"))


def succeeded(cluster):
    jobs = cluster.json("get", "jobs", "--tasks")
    return sum(1 for job in jobs if job["state"] == "succeeded")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--shells", type=int, default=4)
    parser.add_argument("--only", choices=["muster", "slurm"])
    parser.add_argument("--way", choices=["array", "single", "file"])
    options = parser.parse_args()
    if options.only != "muster" and (os.geteuid() != 0 or not shutil.which("slurmctld")):
        print("needs root and slurm-wlm, which ./dev test --deploy installs", file=sys.stderr)
        return 77
    rates = {}
    # Slurm second: it removes files all the time, after which those that others make cost more for minutes.
    for system, run in (("muster", run_muster), ("slurm", run_slurm)):
        ways = {"muster": ("array", "single", "file"), "slurm": ("array", "single")}[system]
        wanted = "single" if system == "slurm" and options.way == "file" else options.way
        for way in ways:
            if options.only in (None, system) and wanted in (None, way):
                rates[system, way] = run(options, way)
    peers = {"array": "array", "single": "single", "file": "single"}
    ratios = {way: round(rates["muster", way] / rates["slurm", peer], 2) for way, peer in peers.items()
              if ("slurm", peer) in rates and ("muster", way) in rates}
    if ratios:
        fastest = {system: max(rate for (of, _), rate in rates.items() if of == system) for system in ("slurm", "muster")}
        print(json.dumps({**{f"ratio_{way}": ratio for way, ratio in ratios.items()},
                          "ratio_of_fastest": round(fastest["muster"] / fastest["slurm"], 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
