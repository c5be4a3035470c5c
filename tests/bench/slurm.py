#!/usr/bin/env python3
"""Short jobs beside Slurm: from the first submission of N jobs of one slot that do nothing until the last has ended.

Both have one worker (node) with the same number of slots (CPUs) on this machine, one after the other. Jobs are
submitted one by one by a few shells (`sbatch`, `muster submit`), and for Slurm also as one array, which is the
fastest that its users can do. Verified: every job of both succeeded. Prints one line of JSON for each way, and
the ratio to the faster one of Slurm's. Needs root and Debian's slurm-wlm.

    tests/bench/slurm.py --bin build/bin [--jobs 5000] [--slots 32] [--shells 4] [--only muster|single|array]
"""

import argparse
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/deploy")]
from cluster import Cluster  # noqa: E402
from processes import Process  # noqa: E402

SPEC = """\
name: noop
command: ["true"]
resources: {device: cpu, ranks: 1}
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Slurm:
    """slurmctld and one slurmd, as deploy's tests start them, with what Slurm's guide for high throughput says of
    queues of many short jobs."""

    def __init__(self, home, slots, jobs):
        self.home = pathlib.Path(home)
        control, node = free_ports(2)
        for folder in ("state", "spool"):
            (self.home / folder).mkdir()
        host = socket.gethostname()
        (self.home / "slurm.conf").write_text(f"""
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MaxJobCount={4 * jobs + 1000}
MaxArraySize={jobs + 1}
MinJobAge=3600
SchedulerParameters=default_queue_depth={jobs},sched_interval=1,bf_interval=30,sched_min_interval=100000
SlurmctldDebug=error
SlurmdDebug=error
StateSaveLocation={self.home}/state
SlurmdSpoolDir={self.home}/spool
SlurmctldPidFile={self.home}/slurmctld.pid
SlurmdPidFile={self.home}/slurmd.pid
SlurmctldLogFile={self.home}/slurmctld.log
SlurmdLogFile={self.home}/slurmd.log
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs={slots} RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n0 Default=YES MaxTime=60 State=UP
""")
        (self.home / "noop.sh").write_text("#!/bin/sh\ntrue\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}
        self.processes = [Process(["slurmctld", "-D", "-c"], self.home / "out", self.environment),
                          Process(["slurmd", "-D", "-N", "n0"], self.home / "out", self.environment)]
        wait_until("the node is idle", lambda: self("sinfo", "-h", "-o", "%T", check=False).split() == ["idle"])

    def close(self):
        for process in reversed(self.processes):
            process.stop(seconds=10)

    def __call__(self, *arguments, check=True):
        result = subprocess.run([str(a) for a in arguments], env=self.environment, capture_output=True, text=True,
                                cwd=self.home)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(map(str, arguments))}: {result.stdout}{result.stderr}")
        return result.stdout

    def states(self):
        """How many jobs are in which state, each task of an array for itself."""
        out = {}
        for state in self("squeue", "-h", "-r", "-t", "all", "-o", "%T").split():
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


def report(way, jobs, submitted, ended):
    print(json.dumps({"way": way, "jobs": jobs, "submitted_seconds": round(submitted, 2),
                      "seconds": round(ended, 2), "jobs_per_second": round(jobs / ended, 1)}), flush=True)
    return jobs / ended


def run_slurm(options, way):
    with tempfile.TemporaryDirectory(prefix="muster-slurm-bench-", ignore_cleanup_errors=True) as home:
        slurm = Slurm(home, options.slots, options.jobs)
        try:
            begin = time.monotonic()
            if way == "array":
                slurm("sbatch", "-n", 1, "-o", "/dev/null", f"--array=1-{options.jobs}", "noop.sh")
            else:
                repeat("sbatch -n 1 -o /dev/null noop.sh", options.jobs, options.shells, slurm.environment, home)
            submitted = time.monotonic() - begin
            wait_until("all jobs have ended", lambda: not slurm("squeue", "-h", "-t", "PD,R,CG,CF"), every=0.5)
            ended = time.monotonic() - begin
            states = slurm.states()
            assert states == {"COMPLETED": options.jobs}, states
        finally:
            slurm.close()
    return report(f"slurm, {way}", options.jobs, submitted, ended)


def run_muster(options):
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-short-jobs-"))
    cluster = Cluster(options.bin, directory / "home", cwd=directory, workers=1, slots=options.slots)
    try:
        cluster.up()
        (directory / "noop.yaml").write_text(SPEC)
        begin = time.monotonic()
        repeat(f"{cluster.muster_binary} submit noop.yaml --set name=noop-{{}}", options.jobs, options.shells, cluster.environment,
               directory)
        submitted = time.monotonic() - begin
        wait_until("all jobs have ended", lambda: idle(cluster), every=0.5)
        ended = time.monotonic() - begin
        metrics = succeeded(cluster)
        assert metrics == options.jobs, metrics
    finally:
        cluster.down()
        shutil.rmtree(directory, ignore_errors=True)
    return report("muster", options.jobs, submitted, ended)


def idle(cluster):
    return all(int(queue.get("runningJobs", 0)) + int(queue.get("waitingJobs", 0)) == 0
               for queue in cluster.json("queue"))


def succeeded(cluster):
    jobs = cluster.json("get", "jobs")
    return sum(1 for job in jobs if job["state"] == "succeeded")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--shells", type=int, default=4)
    parser.add_argument("--only", choices=["muster", "single", "array"])
    options = parser.parse_args()
    if options.only != "muster" and (os.geteuid() != 0 or not shutil.which("slurmctld")):
        print("needs root and slurm-wlm, which ./dev test --deploy installs", file=sys.stderr)
        return 77
    rates = {}
    for way in ("array", "single"):
        if options.only in (None, way):
            rates[way] = run_slurm(options, way)
    if options.only in (None, "muster"):
        rates["muster"] = run_muster(options)
    if len(rates) == 3:
        print(json.dumps({"ratio_to_faster": round(rates["muster"] / max(rates["array"], rates["single"]), 2),
                          "ratio_to_single": round(rates["muster"] / rates["single"], 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
