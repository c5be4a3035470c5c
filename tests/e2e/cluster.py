"""A local Muster cluster for tests and the demo: real processes, driven through the CLI alone."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time


class Cluster:
    """`muster local` under its own MUSTER_HOME. Use as a context manager: leaves nothing running."""

    def __init__(self, binaries, home, cwd=None, workers=2, slots=2):
        self.muster_binary = str(pathlib.Path(binaries).resolve() / "muster")
        self.home = pathlib.Path(home).resolve()
        self.cwd = cwd
        self.workers = workers
        self.slots = slots
        self.environment = {k: v for k, v in os.environ.items() if k != "MUSTER_COORDINATOR"}
        self.environment["MUSTER_HOME"] = str(self.home)

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        self.down()

    def run(self, *arguments, check=True, **options):
        """Runs `muster ARGUMENTS`, captured unless told otherwise."""
        options.setdefault("capture_output", True)
        result = subprocess.run([self.muster_binary, *map(str, arguments)], text=True, cwd=self.cwd,
                                env=self.environment, **options)
        if check and result.returncode != 0:
            raise RuntimeError(f"muster {' '.join(map(str, arguments))} exited {result.returncode}\n"
                               f"{result.stdout or ''}{result.stderr or ''}")
        return result

    def json(self, *arguments):
        """The command's JSON, with enum values in their short form ("running", "crash")."""
        return json.loads(self.run(*arguments, "-o", "json").stdout, object_hook=shorten)

    def up(self):
        return self.run("local", "up", "--workers", self.workers, "--slots", self.slots)

    def down(self):
        return self.run("local", "down", check=False)

    def status(self):
        return self.json("local", "status")

    def job(self, name):
        return self.json("get", "job", name)

    def wait_for(self, name, what, condition, seconds=120):
        """Polls the job until condition(job) holds; the job is returned."""
        return self.poll(what, lambda: self.job(name), condition, seconds)

    def poll(self, what, read, condition, seconds=120):
        deadline = time.monotonic() + seconds
        value = None
        while time.monotonic() < deadline:
            try:
                value = read()
                if condition(value):
                    return value
            except (RuntimeError, json.JSONDecodeError):
                pass  # the coordinator may just be down; the deadline decides
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {what}; last seen: {json.dumps(value)}")

    def finish(self, name, seconds=300):
        return self.wait_for(name, f"{name} ended", is_final, seconds)


def shorten(item):
    for key in ("state", "cause", "kind"):
        if isinstance(item.get(key), str):
            item[key] = re.sub(r"^(JOB_STATE|WORKER_STATE|RANK_STATE|CAUSE|EVENT_KIND)_", "",
                               item[key]).lower()
    return item


def is_final(job):
    return job["state"] in ("succeeded", "failed", "cancelled")


def kill(pid):
    try:
        os.kill(int(pid), signal.SIGKILL)
    except ProcessLookupError:
        pass  # ended by itself just now, as ranks do whose peer was killed a moment before


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in ("Z", "X")
