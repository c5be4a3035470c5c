"""Two GPUs of one machine as two hosts: daemons with host ids of their own share no memory and no GPU
links, so NCCL talks over sockets, as between machines.

Trains the same jobs (data parallel, ZeRO-3, tensor, pipeline) on one host with both GPUs and on two
"hosts" with one each, compares their losses, and prints where the time of a step went on both. What it
prints is a log for people; it exits with 1 when anything is not as it should be.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
sys.path.insert(0, str(ROOT / "tests" / "e2e" / "hosts"))
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from hosts import HostsCluster  # noqa: E402
from product import check, say, unpack  # noqa: E402

SPEC = """\
name: {name}
engine:
  model: {{preset: {model}}}
  data:
    train: [{{path: data/text.train}}]
  training:
    steps: {steps}
    global_batch: {batch}
    micro_batch: {micro}
    precision: {precision}
    seed: 1234
    optimizer: {{adamw: {{lr: 1.0e-4}}}}
    schedule: {{constant: {{warmup_steps: 10}}}}
  parallel: {parallel}
resources: {{device: cuda, ranks: 2}}
"""
LAYOUTS = {"ddp": "{data: 2}", "zero3": "{data: 2, zero: 3}", "tensor": "{tensor: 2, sequence: true}",
           "pipeline": "{pipeline: 2}"}
# Of losses. Every daemon measures how its GPU multiplies fastest, so that even two runs on one host
# with caches of their own differ in the last bits.
CLOSE = {"fp32": 1e-4, "bf16": 2e-2}


class Machine:
    """A host of hosts.HostsCluster that is just this machine."""

    address = "127.0.0.1"

    def command(self, *arguments):
        return [str(argument) for argument in arguments]

    def start(self, *arguments, **options):
        return subprocess.Popen(self.command(*arguments), start_new_session=True, **options)


def train(cluster, options, layout, where):
    name = f"{layout}-{where}"
    (cluster.directory / f"{name}.yaml").write_text(SPEC.format(
        name=name, model=options.model, precision=options.precision, steps=options.steps,
        batch=options.batch,
        micro=options.batch // 2, parallel=LAYOUTS[layout]))
    cluster.run("submit", cluster.directory / f"{name}.yaml")
    job = cluster.finish(name, 300)
    if job["state"] != "succeeded":
        print(cluster.run("logs", name, check=False).stdout[-4000:])
        raise AssertionError(f"{name}: {job['state']} {job.get('message')} {job['causes']}")
    return job


def exposed(job):
    """Milliseconds of the last step, and those that the slower rank waited for others."""
    rows = [rank["times"] for rank in job["ranks"]]
    waits = ("gradientsSeconds", "parametersSeconds", "tensorSeconds", "pipelineSeconds",
             "slowestSeconds")
    waited, step = max((sum(row[wait] for wait in waits), row["stepSeconds"]) for row in rows)
    return step * 1e3, waited * 1e3


def run(options, binaries, work, where, workers):
    directory = work / where
    directory.mkdir()
    (directory / "data").symlink_to(work / "data")
    hosts = {name: Machine() for name in ("head", *workers)}
    cluster = HostsCluster(binaries, hosts, directory, "head", workers)
    jobs = {}
    try:
        cluster.up()
        say(f"{where}: daemons are up")
        print(cluster.run("get", "workers").stdout.rstrip())
        for layout in options.layouts.split(","):
            jobs[layout] = train(cluster, options, layout, where)
            step, waited = exposed(jobs[layout])
            say(f"{where}: {layout}: {step:.1f} ms a step, of which {waited:.1f} waited for others; "
                f"last loss {jobs[layout]['trainLoss']:.5f}")
        log = cluster.run("logs", f"{options.layouts.split(',')[0]}-{where}").stdout
        print("\n".join("    " + line for line in log.splitlines()[:8]))
        print(cluster.run("describe", "job", f"{options.layouts.split(',')[0]}-{where}").stdout[:1800])
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        for name in [*workers, "coordinator"]:
            process = cluster.processes.get(name if name == "coordinator" else f"worker-{name}")
            if process is not None:
                process.terminate()
                process.wait(30)
        cluster.down()
    return jobs


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", required=True, type=pathlib.Path)
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path, help="emptied first")
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--precision", choices=sorted(CLOSE), default="fp32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    (work / "data").mkdir(parents=True)
    binaries = unpack(options.package.resolve(), work)
    subprocess.run([binaries / "muster", "data", "tokenize", "--input", options.text.resolve(),
                    "--output", work / "data" / "text", "--tokenizer", "bytes", "--split",
                    "train=0.99,validation=0.01"], check=True, stdout=subprocess.DEVNULL)
    stop = ["--stop-ranks-on-exit"]
    one = run(options, binaries, work, "one-host", {"both": {"slots": 0, "flags": stop}})
    two = run(options, binaries, work, "two-hosts", {
        "a": {"slots": 0, "flags": ["--gpus", "0", *stop]},
        "b": {"slots": 0, "flags": ["--gpus", "1", *stop]}})
    print("| layout | one host, ms a step | two hosts, ms a step | waited, one | waited, two | "
          "largest difference of losses |")
    print("|---|---|---|---|---|---|")
    for layout, job in one.items():
        other = two[layout]
        pairs = list(zip(job["losses"], other["losses"]))
        check(len(pairs) == options.steps, f"{layout}: {len(pairs)} losses")
        worst = max(abs(a["trainLoss"] - b["trainLoss"]) for a, b in pairs)
        (step1, waited1), (step2, waited2) = exposed(job), exposed(other)
        print(f"| {layout} | {step1:.1f} | {step2:.1f} | {waited1:.1f} | {waited2:.1f} | {worst:.2g} |")
        check(worst <= CLOSE[options.precision], f"{layout}: losses differ by {worst}")
        check({rank["worker"] for rank in other["ranks"]} == {"worker-a", "worker-b"},
              f"{layout} did not run on both")
        check(other["attempts"] == 1, f"{layout}: {other['causes']}")
    say("the same losses on one host and on two")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, RuntimeError) as problem:
        print(f"two_hosts: {problem}", file=sys.stderr)
        sys.exit(1)
