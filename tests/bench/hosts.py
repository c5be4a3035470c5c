"""What hosts cost: throughput across two of them, how soon training goes on after a cut, and after
a host is gone for good. Run by hand, as root; prints Markdown for docs/benchmarks/results.md.

Hosts are network namespaces of this machine joined by virtual Ethernet, so both sides of every
comparison share its cores, and the network costs what the kernel's TCP does.
"""

import argparse
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e/hosts"))

from hosts import HostsCluster  # noqa: E402
from network import Network, why_not  # noqa: E402

EXAMPLE = ROOT / "examples/gpt-kjv.yaml"
WARM_UP = 20  # steps that are not timed
QUICK_REPORTS = ("--heartbeat-interval", "100ms")  # how exactly a step can be timed from outside


def spread(values, digits=2):
    """Median (smallest, largest)."""
    return (f"{statistics.median(values):.{digits}f} "
            f"({min(values):.{digits}f}, {max(values):.{digits}f})")


class Bench:
    def __init__(self, binaries, directory, repeats):
        self.binaries = binaries
        self.directory = directory
        self.repeats = repeats
        self.serial = 0
        data = directory / "data"
        data.mkdir()
        text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True)
        (data / "kjv.txt").write_bytes(text.stdout)
        subprocess.run([binaries / "muster", "data", "tokenize", "--input", data / "kjv.txt",
                        "--output", data / "kjv", "--tokenizer", "bytes", "--split",
                        "train=0.9,validation=0.1"], check=True, capture_output=True)

    def cluster(self, network, head, workers, *flags):
        """A coordinator on `head` with these workers, {host: slots}, in a directory of its own."""
        self.serial += 1
        directory = self.directory / f"cluster-{self.serial}"
        directory.mkdir()
        (directory / "data").symlink_to(self.directory / "data")
        cluster = HostsCluster(self.binaries, network, directory, head,
                               {host: {"slots": slots} for host, slots in workers.items()},
                               (*QUICK_REPORTS, *flags))
        cluster.up()
        return cluster

    def submit(self, cluster, name, steps, *settings):
        cluster.run("submit", EXAMPLE, "--set", f"name={name}", "--set",
                    f"engine.training.steps={steps}", "--set", "engine.training.evaluate_every=0",
                    "--set", "engine.training.evaluate_samples=16", "--set",
                    "engine.training.schedule.cosine.warmup_steps=10",
                    *[word for setting in settings for word in ("--set", setting)])

    def training(self, cluster, name, step):
        job = cluster.wait_for(name, f"step {step}", lambda job: job["step"] >= step, 300)
        if job["state"] != "running":
            raise AssertionError(f"{name} is {job['state']}: {job['causes']}")
        return job

    def throughput(self):
        """Tokens per second of two ranks on one host and on two, in turns."""
        steps = 140
        figures = {"one host": [], "two hosts": []}
        losses = {}
        with Network(["head", "both", "a", "b"], kind="veth", mtu=1500) as network:
            clusters = {"one host": self.cluster(network, "head", {"both": 2}),
                        "two hosts": self.cluster(network, "head", {"a": 1, "b": 1})}
            try:
                for repeat in range(self.repeats + 1):
                    for where, cluster in clusters.items():
                        name = f"run-{repeat}"
                        self.submit(cluster, name, steps)
                        begin = self.training(cluster, name, WARM_UP)["step"]
                        began = time.monotonic()
                        end = self.training(cluster, name, steps - WARM_UP)["step"]
                        took = time.monotonic() - began
                        job = cluster.finish(name)
                        losses[where] = job["trainLoss"]
                        rate = (end - begin) * 16 * 128 / took
                        print(f"{where}: {rate:.0f} tokens/s", file=sys.stderr)
                        if repeat > 0:  # the first of each warms the machine
                            figures[where].append(rate)
            finally:
                for cluster in clusters.values():
                    cluster.down()
        if len(set(losses.values())) != 1:
            raise AssertionError(f"the losses differ: {losses}")
        ratios = [two / one for one, two in zip(figures["one host"], figures["two hosts"])]
        for where, rates in figures.items():
            print(f"| throughput of gpt-kjv, 2 ranks on {where}, tokens/s | {spread(rates, 0)} | |")
        print(f"| two hosts / one host, of runs one after the other | {spread(ratios, 3)} "
              "| >= 0.9 |", flush=True)

    def cuts(self, kind, seconds):
        """From the moment when a cut link is back to the next step."""
        took = []
        with Network(["head", "a", "b"], kind=kind) as network:
            cluster = self.cluster(network, "head", {"a": 1, "b": 1})
            try:
                self.submit(cluster, "cut", 100000)
                self.training(cluster, "cut", WARM_UP)
                for _ in range(self.repeats):
                    network.cut("a", "b")
                    time.sleep(seconds)
                    reached = cluster.job("cut")["step"]
                    network.mend("a", "b")
                    took.append(cluster.step_after("cut", reached, 30))
                    print(f"{kind}: next step {took[-1]:.2f} s after", file=sys.stderr)
                    self.training(cluster, "cut", reached + 20)
                job = cluster.job("cut")
                if (job["attempts"], job["state"]) != (1, "running"):
                    raise AssertionError(f"{job['attempts']} attempts: {job['causes']}")
            finally:
                cluster.down()
        print(f"| cut of {seconds} s ({kind}): link back to next step, s | {spread(took)} | < 2 |",
              flush=True)

    def losses_of_hosts(self, lost_after):
        """From the last step before a host dies to the first of the next attempt, elsewhere."""
        took = []
        for _ in range(self.repeats):
            with Network(["head", "a", "b", "c"], kind="veth", mtu=1500) as network:
                cluster = self.cluster(network, "head", {"a": 1, "b": 1, "c": 1}, "--lost-after",
                                       f"{lost_after}s")
                try:
                    self.submit(cluster, "gone", 100000, "checkpoint.every_steps=20")
                    job = self.training(cluster, "gone", 30)
                    lost = job["ranks"][1]["host"]
                    network[lost].kill()
                    died = time.monotonic()
                    job = cluster.wait_for(
                        "gone", "a step of the next attempt",
                        lambda job: job["epoch"] == 2 and job["state"] == "running" and
                        any(rank["step"] > 0 for rank in job["ranks"]), lost_after + 60)
                    took.append(time.monotonic() - died)
                    print(f"host gone: {took[-1]:.2f} s", file=sys.stderr)
                    if lost in {rank["host"] for rank in job["ranks"]}:
                        raise AssertionError(f"{lost} is dead and has ranks")
                finally:
                    cluster.down()
        print(f"| host gone, --lost-after {lost_after}s: its death to the first step elsewhere, s "
              f"| {spread(took, 1)} | < {lost_after + 5} |", flush=True)


def machine():
    models = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo")
              if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), " \
           f"Linux {platform.release()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=ROOT / "build/bin", type=pathlib.Path)
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--only", choices=["throughput", "cuts", "gone"])
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"hosts.py: {reason}")
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"],
                            capture_output=True, text=True, check=True).stdout.strip()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-hosts-bench-"))
    try:
        bench = Bench(options.bin.resolve(), directory, options.repeats)
        print(f"Machine: {machine()}. Muster at {commit}; "
              f"`tests/bench/hosts.py --repeats {options.repeats}`; load average "
              f"{os.getloadavg()[0]:.1f} before. Median (smallest, largest).\n")
        print("| what | measured | bar |\n|---|---|---|", flush=True)
        if options.only in (None, "throughput"):
            bench.throughput()
        if options.only in (None, "cuts"):
            for kind in ("veth", "switch"):
                bench.cuts(kind, 12)
        if options.only in (None, "gone"):
            bench.losses_of_hosts(10)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
