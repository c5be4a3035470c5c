#!/usr/bin/env python3
"""Two jobs on one GPU at once (`resources.share`), with a real coordinator, daemon and ranks.

Each of two small GPTs trains alone on the GPU, then both at once with a share of a half, and, where NVIDIA's
multi-process service is installed, once more under it (`muster-worker --mps`). Verified: both had the one GPU at the
same time, each has, to the last bit, the losses that it had alone (under MPS, where products are split for the part of
the multiprocessors that it gives, they are within 2 % of them at the end), and a job that needs more memory than its share is
refused before it takes any, by name. Printed, one line of JSON: tokens a second of both together, beside those of the
two alone, one after the other.

    tests/bench/shared_gpu.py --bin build/bin [--steps 400]
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "e2e"))
from cluster import Cluster  # noqa: E402

SPEC = """\
name: {name}
engine:
  model: {{family: gpt2, layers: 6, hidden: 512, heads: 8, vocab: 256, sequence_length: 512}}
  data: {{train: [{{path: data/text}}]}}
  training: {{steps: {steps}, global_batch: {batch}, micro_batch: {batch}, precision: bf16, seed: {seed},
    optimizer: {{adamw: {{lr: 3.0e-4}}}}}}
resources: {{device: cuda, ranks: 1{share}}}
checkpoint: {{path: checkpoints/{name}, every_steps: 100000}}
restart: {{max_failures: 0}}
"""
SEEDS = {"left": 7, "right": 8}


class Run:
    def __init__(self, options, directory):
        self.options, self.directory = options, directory
        self.cluster = Cluster(options.bin, directory / "home", cwd=directory, workers=1, slots=1)

    def submit(self, name, seed=7, batch=16, share=None):
        path = self.directory / f"{name}.yaml"
        path.write_text(SPEC.format(name=name, steps=self.options.steps, seed=seed, batch=batch,
                                    share="" if share is None else f", share: {share}"))
        self.cluster.run("submit", path)

    def finish(self, name):
        job = self.cluster.finish(name)
        assert job["state"] == "succeeded", json.dumps(job["causes"])
        return job

    def together(self, suffix, alone, equal=True):
        """Both at once; their tokens a second while both train. `equal`: with the bits that each has alone."""
        names = {name: f"{name}-{suffix}" for name in SEEDS}
        for name, seed in SEEDS.items():
            self.submit(names[name], seed, share=0.5)
        jobs = self.cluster.poll("both train", lambda: [self.cluster.job(name) for name in names.values()],
                                 lambda jobs: all(job["state"] == "running" and job["step"] > 20 for job in jobs))
        assert len({(job["ranks"][0]["worker"], job["ranks"][0]["device"]) for job in jobs}) == 1, jobs
        rates = []
        for name in SEEDS:
            job = self.finish(names[name])
            assert job["attempts"] == 1, job["attempts"]
            same = job["losses"] == alone[name]["losses"]
            near = abs(job["trainLoss"] / alone[name]["trainLoss"] - 1) < 0.02
            assert same if equal else near, f"{names[name]}: losses other than alone"
            rates.append(rate(job))
        return sum(rates)

    def refusal(self):
        """What is said of a job that needs more than its share."""
        self.submit("large", batch=256, share=0.01)
        job = self.cluster.finish("large")
        assert job["state"] == "failed", job["state"]
        text = " ".join(cause.get("message", "") for cause in job["causes"])
        assert re.search(r"share", text), text
        return text


def rate(job):
    """Tokens a second over the job's training time."""
    seconds = sum(time["deviceSeconds"] for time in job["usage"]["times"] if time["usageClass"].endswith("PRODUCTIVE"))
    return job["steps"] * 16 * 512 / seconds


def under_mps(run, alone):
    """The same with a daemon that uses the multi-process service; None where that is not installed."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return None
    environment = dict(run.cluster.environment, CUDA_MPS_PIPE_DIRECTORY=str(run.directory / "mps"),
                       CUDA_MPS_LOG_DIRECTORY=str(run.directory / "mps-log"))
    for name in ("mps", "mps-log", "worker"):
        (run.directory / name).mkdir()
    subprocess.run([control, "-d"], check=True, env=environment)
    run.cluster.run("cordon", "worker-1")
    address = run.cluster.status()["coordinator"]["address"]
    worker = subprocess.Popen([str(run.options.bin / "muster-worker"), "--coordinator", address, "--name", "mps", "--mps",
                               "--state-dir", str(run.directory / "worker"), "--address", "127.0.0.1",
                               "--stop-ranks-on-exit"], env=environment, stderr=subprocess.DEVNULL)
    try:
        return run.together("mps", alone, equal=False)
    finally:
        worker.terminate()
        worker.wait(60)
        subprocess.run([control], input="quit\n", text=True, env=environment, check=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    options.bin = options.bin.resolve()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-shared-gpu-"))
    run = Run(options, directory)
    try:
        (directory / "data").mkdir()
        text = directory / "text"
        text.write_text("".join(path.read_text() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))))
        run.cluster.run("data", "tokenize", "--input", text, "--output", directory / "data/text")
        run.cluster.up()
        alone = {}
        for name, seed in SEEDS.items():
            run.submit(f"{name}-alone", seed)
            alone[name] = run.finish(f"{name}-alone")
        result = {"alone": round(sum(map(rate, alone.values())) / len(alone)), "together": round(run.together("shared", alone)),
                  "refused": run.refusal()}
        mps = under_mps(run, alone)
        result["under_mps"] = "not installed" if mps is None else round(mps)
        print(json.dumps(result))
    finally:
        run.cluster.down()
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
