"""`./dev demo`: trains a small GPT on the King James Bible on a local cluster, from text to sample.

With --chaos a rank, a daemon and the coordinator are killed -9 on the way, and the result is compared
with that of an undisturbed run of the same build.
"""

import argparse
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import loss_curve
from cluster import Cluster, is_final, kill

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = "gpt-kjv"


def say(text):
    print(f"\033[1m==> {text}\033[0m" if sys.stdout.isatty() else f"==> {text}", flush=True)


def prepare_data(cluster, work):
    data = work / "data"
    data.mkdir(parents=True, exist_ok=True)
    text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True).stdout
    (data / "kjv.txt").write_bytes(text)
    cluster.run("data", "tokenize", "--input", data / "kjv.txt", "--output", data / "kjv",
                "--tokenizer", "bytes", "--split", "train=0.9,validation=0.1", capture_output=False)


class Chaos(threading.Thread):
    """Kills one process of each kind, each time waiting until training has moved on."""

    def __init__(self, cluster):
        super().__init__(daemon=True)
        self.cluster = cluster
        self.log = []
        self.error = None

    def run(self):
        try:
            self.torment()
        except Exception as error:  # shown by the main thread
            self.error = error

    def reach(self, step):
        return self.cluster.wait_for(JOB, f"step {step}",
                                     lambda job: job["step"] >= step or is_final(job), 600)

    def note(self, text):
        self.log.append(text)
        print(f"\n    chaos: {text}", flush=True)

    def torment(self):
        steps = self.reach(1)["steps"]
        job = self.reach(steps * 30 // 100)
        victim = job["ranks"][-1]
        kill(victim["pid"])
        self.note(f"killed -9 rank {victim['rank']} (pid {victim['pid']}) at step {job['step']}")
        self.cluster.wait_for(JOB, "a new attempt trains",
                              lambda j: j["epoch"] > job["epoch"] and j["state"] == "running")

        job = self.reach(steps * 50 // 100)
        home = job["ranks"][0]["worker"]
        daemon = next(w for w in self.cluster.status()["workers"] if w["name"] == home)
        kill(daemon["pid"])
        self.note(f"killed -9 daemon {home} (pid {daemon['pid']}) at step {job['step']}")
        self.cluster.up()
        self.note(f"muster local up again: {home} re-attaches to its ranks")

        job = self.reach(steps * 70 // 100)
        coordinator = self.cluster.status()["coordinator"]["pid"]
        kill(coordinator)
        self.note(f"killed -9 the coordinator (pid {coordinator}) at step {job['step']}")
        self.cluster.up()
        job = self.cluster.wait_for(JOB, "the coordinator serves again", lambda j: True)
        self.note(f"muster local up again: the coordinator is back, training is at step {job['step']}")


def train(binaries, work, chaos):
    shutil.rmtree(work / "home", ignore_errors=True)
    shutil.rmtree(work / "checkpoints", ignore_errors=True)
    cluster = Cluster(binaries, work / "home", cwd=work)
    with cluster:
        status = cluster.status()
        say(f"cluster: coordinator {status['coordinator']['address']}, "
            f"{len(status['workers'])} workers with {cluster.slots} slots each")
        prepare_data(cluster, work)
        say(f"submitting examples/{JOB}.yaml")
        tormentor = Chaos(cluster) if chaos else None
        if tormentor:
            tormentor.start()
        started = time.monotonic()
        watched = cluster.run("submit", ROOT / "examples" / f"{JOB}.yaml", "--watch", check=False,
                              capture_output=False)
        seconds = time.monotonic() - started
        job = cluster.job(JOB)
        if tormentor:
            tormentor.join(timeout=60)
            if tormentor.error:
                raise tormentor.error
            if len(tormentor.log) < 5:
                raise AssertionError("the job ended before every process had been killed")
        if watched.returncode != 0 or job["state"] != "succeeded":
            raise AssertionError(f"the job ended as {job['state']}: {job.get('message')}")
        report(cluster, job, seconds, work)
    return job, seconds


def report(cluster, job, seconds, work):
    say(f"trained {job['steps']} steps in {seconds:.0f} s, {job['attempts']} attempt(s)")
    for end in job["causes"]:
        print(f"    attempt {end['epoch']}: {end['cause']} at step {end['step']}: {end['message']}")
    print(f"    validation loss {job['validationLoss']:.4f} nats per byte")
    say('sample, prompt "In the beginning"')
    cluster.run("sample", JOB, "--prompt", "In the beginning", "--tokens", 300, "--temperature", 0.8,
                "--top-k", 40, "--seed", 7, capture_output=False)
    checkpoints = [c for c in cluster.json("checkpoints", JOB) if not c.get("removed")]
    status = cluster.status()
    say("where things are (the cluster is stopped now, its state stays)")
    newest = work / checkpoints[-1]["path"]
    picture = newest.parent / "loss.svg"
    picture.write_text(loss_curve.svg(f"{JOB}: {job['steps']} steps on the King James Bible",
                                      job["losses"]))
    print(f"    newest checkpoint  {newest}")
    print(f"    loss curve         {picture}")
    print(f"    state and logs     {work / 'home'}")
    print(f"    metrics were at    http://{status['coordinator']['metrics']}/metrics, "
          + ", ".join(f"http://{w['metrics']}/metrics" for w in status["workers"]))


def fingerprint(binaries):
    digest = hashlib.sha256()
    for path in [pathlib.Path(binaries) / "muster-rank", ROOT / "examples" / f"{JOB}.yaml"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--chaos", action="store_true")
    options = parser.parse_args()
    work = pathlib.Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    reference_file = work / "undisturbed.json"
    key = fingerprint(options.bin)

    reference = None
    if options.chaos:
        if reference_file.exists():
            reference = json.loads(reference_file.read_text())
        if reference is None or reference["key"] != key:
            say("no undisturbed run of this build to compare with yet: that first")
            reference = undisturbed(options.bin, work, key, reference_file)
        job, _ = train(options.bin, work, chaos=True)
        same = all(job[field] == reference[field] for field in ("trainLoss", "validationLoss"))
        say(f"validation loss {job['validationLoss']!r} with chaos, "
            f"{reference['validationLoss']!r} without: {'the same' if same else 'DIFFERENT'}")
        return 0 if same else 1
    undisturbed(options.bin, work, key, reference_file)
    return 0


def undisturbed(binaries, work, key, reference_file):
    job, seconds = train(binaries, work, chaos=False)
    reference = {"key": key, "trainLoss": job["trainLoss"], "validationLoss": job["validationLoss"],
                 "seconds": seconds}
    reference_file.write_text(json.dumps(reference))
    return reference


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, RuntimeError) as problem:
        print(f"demo: {problem}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
