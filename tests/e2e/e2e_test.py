"""The whole product as its users meet it: real processes on loopback, killed at will.

Every test drives the CLI alone. Waiting is polling with a deadline; nothing sleeps for a fixed time.
"""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from cluster import Cluster, alive, is_final, kill

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = None
STEPS = 400
LONG = 1000  # steps: enough for a slow test to disturb the job before its end
EVERY = 20

SPEC = """\
name: {name}
priority: {priority}
engine:
  model: {{family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 256, sequence_length: 64}}
  data:
    train: [{{path: data/text.train}}]
    validation: [{{path: data/text.validation}}]
  training:
    steps: {steps}
    global_batch: 16
    micro_batch: 4
    seed: 7
    optimizer: {{adamw: {{lr: 1.0e-3}}}}
    schedule: {{cosine: {{warmup_steps: 10, min_lr: 1.0e-4}}}}
    evaluate_every: 200
    evaluate_samples: 64
resources: {{device: cpu, ranks: {ranks}}}
checkpoint: {{path: checkpoints/{name}, every_steps: {every}, keep: 2}}
restart: {{max_failures: 5, backoff: {{initial: 100ms, max: 1s}}}}
"""


@functools.cache
def prose():
    """Text with structure to learn: the documents of this repository when the tests begin."""
    return b"".join(path.read_bytes()
                    for path in sorted(pathlib.Path(__file__).parents[2].glob("**/*.md"))
                    if "build" not in path.parts)


class Scene(unittest.TestCase):
    """A fresh cluster in a fresh directory per test."""

    workers = 2
    slots = 2

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-e2e-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.cluster = Cluster(BIN, self.directory / "home", cwd=self.directory,
                               workers=self.workers, slots=self.slots)
        (self.directory / "text").write_bytes(prose())
        self.cluster.run("data", "tokenize", "--input", self.directory / "text", "--output",
                         self.directory / "data/text", "--tokenizer", "bytes", "--split",
                         "train=0.9,validation=0.1")
        self.cluster.up()
        self.addCleanup(self.leave_nothing)

    def leave_nothing(self):
        status = self.cluster.status()
        pids = [status["coordinator"]["pid"]] + [worker["pid"] for worker in status["workers"]]
        self.cluster.down()
        self.cluster.poll("nothing is left running",
                          lambda: [pid for pid in pids if pid and alive(pid)] +
                          processes_under(self.directory), lambda left: not left, 15)

    def spec(self, name="tiny", steps=STEPS, ranks=2, priority=50, **replace):
        text = SPEC.format(name=name, steps=steps, ranks=ranks, priority=priority, every=EVERY)
        for old, new in replace.get("edits", []):
            self.assertIn(old, text)
            text = text.replace(old, new)
        path = self.directory / f"{name}.yaml"
        path.write_text(text)
        return path

    def submit(self, name="tiny", **options):
        self.cluster.run("submit", self.spec(name, **options))
        return name

    def training(self, name="tiny", step=EVERY + 5):
        """Waits until the job trains and has a committed checkpoint, and returns it."""
        job = self.cluster.wait_for(
            name, f"{name} past step {step}",
            lambda job: (job["step"] >= step and job["lastCommittedStep"] > 0 and
                         job["state"] == "running" and all(r["pid"] for r in job["ranks"])) or
            is_final(job))
        self.assertEqual(job["state"], "running", "it ended before anything could be done to it")
        return job

    def events(self, name):
        return self.cluster.json("events", name)


def processes_under(directory):
    """Pids of processes with a command line or working directory inside `directory`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            if str(directory) in command and alive(entry.name):
                found.append((entry.name, command.replace("\0", " ")[:200]))
        except OSError:
            pass
    return found


class SharedDevices(Scene):
    workers = 1
    slots = 1

    def test_two_jobs_train_on_one_slot_at_once_with_the_losses_that_each_has_alone(self):
        half = ("ranks: 1}", "ranks: 1, share: 0.5}")
        seeds = {"left": "seed: 7", "right": "seed: 8"}
        alone = {}
        for name, seed in seeds.items():
            self.submit(f"{name}-alone", ranks=1, edits=[("seed: 7", seed)])
            alone[name] = self.cluster.finish(f"{name}-alone")
            self.assertEqual(alone[name]["state"], "succeeded", json.dumps(alone[name]["causes"]))
        for name, seed in seeds.items():
            self.submit(name, ranks=1, edits=[("seed: 7", seed), half])
        self.cluster.poll("both train", lambda: [self.cluster.job(name) for name in seeds],
                          lambda jobs: all(job["state"] == "running" for job in jobs))
        (worker,) = self.cluster.json("get", "workers")
        self.assertEqual(worker["devices"][0]["jobs"], ["left", "right"])
        self.assertEqual(worker["slotsUsed"], 1)
        self.assertIn("1/1", self.cluster.run("get", "workers").stdout)
        self.assertRegex(self.cluster.run("describe", "job", "left").stdout,
                         r"share: +0.5 of each device")
        self.submit("third", ranks=1, edits=[half])
        why = self.cluster.run("explain", "third").stdout
        self.assertIn("needs 0.5 of a cpu slot", why)
        self.cluster.run("cancel", "third")
        for name in seeds:
            job = self.cluster.finish(name)
            self.assertEqual(job["state"], "succeeded", json.dumps(job["causes"]))
            self.assertEqual(job["attempts"], 1)
            self.assertEqual(job["losses"], alone[name]["losses"])
            seconds = sum(time["deviceSeconds"] for time in job["usage"]["times"])
            ran = sum(time["deviceSeconds"] for time in alone[name]["usage"]["times"])
            self.assertGreater(seconds, 0)
            self.assertLess(seconds, 10 * ran)


class MainPath(Scene):
    def test_job_trains_to_the_end_and_every_view_shows_it(self):
        watched = self.cluster.run("submit", self.spec(), "--watch", check=False)
        self.assertEqual(watched.returncode, 0, watched.stdout + watched.stderr)
        job = self.cluster.job("tiny")
        for field in ("name", "state", "epoch", "attempts", "step", "steps", "trainLoss",
                      "validationLoss", "tokensPerSecond", "lastCommittedStep", "causes", "ranks"):
            self.assertIn(field, job)
        self.assertEqual(job["state"], "succeeded")
        self.assertEqual((job["step"], job["steps"], job["attempts"], job["epoch"]),
                         (STEPS, STEPS, 1, 1))
        self.assertEqual(job["lastCommittedStep"], STEPS)
        self.assertLess(job["trainLoss"], 4.5)
        self.assertGreater(job["validationLoss"], 0)
        self.assertEqual([end["cause"] for end in job["causes"]], ["completed"])
        self.assertEqual({(r["rank"], r["worker"]) for r in job["ranks"]},
                         {(0, job["ranks"][0]["worker"]), (1, job["ranks"][0]["worker"])},
                         "a gang of two packs onto one worker of two slots")

        log = self.cluster.run("logs", "tiny", "--rank", 1).stdout
        self.assertIn(str(STEPS), log)
        self.assertIn(" of memory", log)
        for rank in job["ranks"]:
            self.assertGreater(rank["times"]["stepSeconds"], 0)
        described = self.cluster.run("describe", "job", "tiny").stdout
        for word in ("tiny", "data 2", "dp 1", "COMPUTING", "GRADIENTS", "SLOWEST", "ALL-REDUCE",
                     "ENGINE"):
            self.assertIn(word, described)
        self.assertIn("worker-1", self.cluster.run("get", "workers").stdout)
        kept = self.cluster.poll(
            "only the newest two are kept",
            lambda: [c for c in self.cluster.json("checkpoints", "tiny") if not c.get("removed")],
            lambda found: len(found) <= 2, 15)
        self.assertEqual([c["step"] for c in kept], [STEPS - EVERY, STEPS])
        self.assertTrue(all(pathlib.Path(c["path"]).is_dir() for c in kept))
        sample = self.cluster.run("sample", "tiny", "--prompt", "The ", "--tokens", 40, "--seed", 3)
        again = self.cluster.run("sample", "tiny", "--prompt", "The ", "--tokens", 40, "--seed", 3)
        self.assertIn("The ", sample.stdout)
        self.assertEqual(sample.stdout, again.stdout)
        sequences = [event["sequence"] for event in self.events("tiny")]
        self.assertEqual(sequences, sorted(set(sequences)))

    def test_same_seed_gives_the_same_curve_and_one_rank_agrees_with_two(self):
        curves = []
        for name, ranks in (("first", 2), ("second", 2), ("alone", 1)):
            self.submit(name, steps=60, ranks=ranks)
            job = self.cluster.finish(name)
            self.assertEqual(job["state"], "succeeded", job)
            curves.append([(p["step"], p["trainLoss"]) for p in job["losses"]])
        self.assertEqual([step for step, _ in curves[0]], list(range(1, 61)))
        self.assertEqual(curves[0], curves[1])
        for (step, loss), (alone_step, alone) in zip(curves[0], curves[2], strict=True):
            self.assertEqual(step, alone_step)
            self.assertAlmostEqual(loss / alone, 1, delta=1e-6)

    def test_resubmission_with_the_same_request_id_makes_no_second_job(self):
        spec = self.spec(steps=5)
        for _ in range(2):
            self.cluster.run("submit", spec, "--request-id", "once")
        self.cluster.finish("tiny")
        self.assertEqual(len(self.cluster.json("get", "jobs")), 1)


class Failures(Scene):
    calm = None  # losses of an undisturbed run; all tests of the class use the same data and seed

    def disturbed(self):
        """Submits the job to disturb, once an undisturbed one has shown what its losses must be."""
        if Failures.calm is None:
            self.submit("calm", steps=LONG)
            job = self.cluster.finish("calm")
            self.assertEqual(job["state"], "succeeded", json.dumps(job, indent=1))
            Failures.calm = (job["trainLoss"], job["validationLoss"])
        self.submit(steps=LONG)

    def assert_recovered(self, job, attempts):
        self.assertEqual(job["state"], "succeeded", json.dumps(job, indent=1))
        self.assertEqual(job["attempts"], attempts)
        self.assertEqual((job["trainLoss"], job["validationLoss"]), self.calm)
        for end in job["causes"][:-1]:
            resumed = [e for e in self.events("tiny")
                       if e["kind"] == "checkpoint_committed" and e["step"] <= end["step"]]
            self.assertTrue(resumed)
            self.assertLessEqual(end["step"] - resumed[-1]["step"], EVERY)

    def test_killed_rank_is_noticed_at_once_and_costs_at_most_one_interval(self):
        self.disturbed()
        latencies = []
        # On a busy machine one of them may take longer, but hardly all.
        while len(latencies) < 3 and min(latencies, default=1.0) >= 1.0:
            before = self.training(step=len(latencies) * 100 + EVERY + 5)
            known = len(self.exits())
            killed = time.time()
            kill(before["ranks"][1]["pid"])
            exits = self.cluster.poll("the exit event", self.exits, lambda seen: len(seen) > known)
            latencies.append(timestamp(exits[known]["time"]) - killed)
            self.cluster.wait_for("tiny", "the next attempt",
                                  lambda j: j["epoch"] > before["epoch"] or is_final(j))
        self.assertLess(min(latencies), 1.0, "noticed within a second")
        job = self.cluster.finish("tiny")
        self.assert_recovered(job, attempts=1 + len(latencies))
        self.assertEqual(job["causes"][0]["cause"], "crash")
        self.assertEqual(job["causes"][0]["rank"], 1)
        self.assertIn("9", job["causes"][0]["message"])

    def test_device_time_adds_up_over_a_killed_rank_and_a_killed_coordinator(self):
        slots = sum(worker["slots"] for worker in self.cluster.json("get", "workers"))
        before = self.cluster.json("usage")
        self.disturbed()
        kill(self.training()["ranks"][1]["pid"])
        self.cluster.wait_for("tiny", "the next attempt", lambda j: j["epoch"] == 2 and j["step"] > 0)
        kill(self.cluster.status()["coordinator"]["pid"])
        self.cluster.up()
        self.assert_recovered(self.cluster.finish("tiny"), attempts=2)
        after = self.cluster.json("usage")
        passed = timestamp(after["until"]) - timestamp(before["until"])
        spent = after["deviceSeconds"] - before["deviceSeconds"]
        self.assertAlmostEqual(spent / (slots * passed), 1, delta=0.001)
        mine = self.cluster.json("usage", "tiny", "--by", "cause")["rows"]
        classes = {row["usageClass"] for row in mine}
        self.assertIn("USAGE_CLASS_PRODUCTIVE", classes)
        self.assertNotIn("USAGE_CLASS_IDLE", classes)
        self.assertGreater(sum(row["deviceSeconds"] for row in mine if row["cause"] == "crash"), 0)
        self.assertIn("(crash)", self.cluster.run("describe", "job", "tiny").stdout)
        self.assertIn("PRODUCTIVE", self.cluster.run("usage", "tiny", "--by", "cause").stdout)
        self.assertIn("worker-1", self.cluster.run("top", "--once").stdout)
        moved = self.cluster.run("diff-rankmap", "tiny").stdout
        self.assertIn("ranks moved between epoch 1 and 2", moved)

    def test_top_gives_the_terminal_back_however_it_ends(self):
        import pty
        import termios

        def top(end):
            """What `muster top` wrote to a terminal until `end` made it end, its status, and how the terminal was
            before and is after it."""
            terminal, inside = pty.openpty()
            before = termios.tcgetattr(inside)
            process = subprocess.Popen([BIN / "muster", "top", "--interval", "0.5"], stdin=inside, stdout=inside,
                                       stderr=inside, env=self.cluster.environment)
            text = b""
            while b"WORKER" not in text and b"QUEUE" not in text:
                text += os.read(terminal, 65536)
            self.assertNotEqual(termios.tcgetattr(inside)[3], before[3], "keys are read one by one")
            end(process, terminal)
            status = process.wait(20)
            os.set_blocking(terminal, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    text += os.read(terminal, 65536)
            after = termios.tcgetattr(inside)
            os.close(terminal)
            os.close(inside)
            self.assertEqual(after, before)
            self.assertIn(b"\x1b[?1049h", text)
            self.assertTrue(text.endswith(b"\x1b[?25h\x1b[?1049l"), text[-80:])
            return text, status

        text, status = top(lambda process, terminal: os.write(terminal, b"wsrq"))
        self.assertEqual(status, 0)
        self.assertIn(b"sort: name, reversed", text)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            _, status = top(lambda process, terminal, number=number: process.send_signal(number))
            self.assertEqual(status, -number)

    def exits(self):
        return [e for e in self.events("tiny") if e["kind"] == "rank_exited"]

    def test_killed_gang_recovers(self):
        self.disturbed()
        for rank in self.training()["ranks"]:
            kill(rank["pid"])
        self.assert_recovered(self.cluster.finish("tiny"), attempts=2)

    def test_stopped_rank_is_named_by_debug_and_the_other_one_waits_for_it(self):
        self.disturbed()
        job = self.training()
        shown = self.cluster.json("debug", "tiny")
        self.assertEqual({rank["rank"] for rank in shown["ranks"]}, {0, 1})
        for rank in shown["ranks"]:
            operations = {call["operation"] for call in rank["collectives"]}
            self.assertIn("all-reduce", operations)
        stopped = job["ranks"][1]["pid"]
        os.kill(int(stopped), signal.SIGSTOP)
        try:
            waiting = self.cluster.poll(
                "rank 0 waits in a collective",
                lambda: self.cluster.json("debug", "tiny", "--timeout", 1),
                lambda shown: any(group.get("waitingRank") == 0 and group["waitedSeconds"] > 0.5
                                  for group in shown["groups"]), 30)
            self.assertIn("no answer within 1s", next(
                rank["error"] for rank in waiting["ranks"] if rank["rank"] == 1))
            self.assertIn("rank 1: no answer",
                          self.cluster.run("debug", "tiny", "--timeout", 1).stdout)
        finally:
            os.kill(int(stopped), signal.SIGCONT)
        self.assert_recovered(self.cluster.finish("tiny"), attempts=1)
        refused = self.cluster.run("debug", "tiny", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("is succeeded: no rank of it runs", refused.stderr)

    def test_killed_daemon_costs_no_attempt_when_it_returns(self):
        self.disturbed()
        before = self.training()
        name = before["ranks"][0]["worker"]
        killed = time.time()
        kill(next(w["pid"] for w in self.cluster.status()["workers"] if w["name"] == name))
        seen = self.cluster.poll("the worker counts as unreachable",
                                 lambda: [e for e in self.cluster.json("events")
                                          if e["kind"] == "worker_unreachable"], bool, 30)
        self.assertEqual(seen[0]["worker"], name)
        self.assertLess(timestamp(seen[0]["time"]) - killed, 5.0)
        self.cluster.up()
        self.assert_recovered(self.cluster.finish("tiny"), attempts=1)

    def test_killed_coordinator_costs_no_step(self):
        self.disturbed()
        before = self.training()
        kill(self.cluster.status()["coordinator"]["pid"])
        self.assertTrue(all(alive(rank["pid"]) for rank in before["ranks"]))
        refused = self.cluster.run("get", "jobs", check=False)
        self.assertEqual(refused.returncode, 1)
        self.cluster.up()
        # The coordinator learns the ranks' processes from the daemons' next Hello.
        after = self.cluster.wait_for("tiny", "the daemon is back",
                                      lambda j: all(r.get("pid") for r in j["ranks"]))
        self.assertEqual(after["epoch"], before["epoch"])
        self.assertEqual([r["pid"] for r in after["ranks"]], [r["pid"] for r in before["ranks"]])
        self.assert_recovered(self.cluster.finish("tiny"), attempts=1)

    def test_stopped_coordinator_costs_no_attempt(self):
        self.disturbed()
        self.training()
        coordinator = int(self.cluster.status()["coordinator"]["pid"])
        os.kill(coordinator, signal.SIGSTOP)
        time.sleep(33)  # longer than the silence after which a worker is given up
        os.kill(coordinator, signal.SIGCONT)
        self.assert_recovered(self.cluster.finish("tiny"), attempts=1)
        kinds = {event["kind"] for event in self.cluster.json("events")}
        self.assertIn("coordinator_paused", kinds)
        self.assertNotIn("worker_lost", kinds)

    def test_restored_backup_reuses_no_epoch_and_the_job_finishes(self):
        self.disturbed()
        before = self.training()
        backup = self.cluster.json("admin", "backup")["path"]
        verified = self.cluster.json("admin", "verify", backup)
        self.assertEqual((verified["liveJobs"], verified["workers"]), (1, 2))
        # What the backup does not know: a second attempt, which trains when the state is lost.
        kill(before["ranks"][0]["pid"])
        self.cluster.wait_for("tiny", "the second attempt",
                              lambda j: j["epoch"] == 2 and j["state"] == "running")
        kill(self.cluster.status()["coordinator"]["pid"])
        data = self.cluster.home / "local/coordinator"
        refused = self.cluster.run("admin", "restore", backup, "--data-dir", data, check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("never over a state", refused.stderr)
        (data / "store").rename(self.directory / "lost")
        self.cluster.run("admin", "restore", backup, "--data-dir", data)
        self.cluster.up()
        job = self.cluster.finish("tiny")
        self.assertEqual(job["state"], "succeeded", json.dumps(job, indent=1))
        self.assertEqual((job["trainLoss"], job["validationLoss"]), self.calm)
        self.assertGreater(job["epoch"], 10000)
        self.assertIn("state_restored", {event["kind"] for event in self.cluster.json("events")})
        snapshot = self.directory / "snapshot"
        self.cluster.run("admin", "snapshot", snapshot)
        replayed = self.cluster.json("replay", snapshot)
        self.assertEqual(replayed["differences"], [])
        self.assertEqual([job["name"] for job in replayed["jobs"]], ["tiny"])

    def test_removed_worker_gives_its_job_up_at_once_and_joins_again(self):
        self.disturbed()
        name = self.training()["ranks"][0]["worker"]
        self.cluster.run("admin", "remove-worker", name)
        job = self.cluster.finish("tiny")
        self.assertEqual(job["state"], "succeeded", json.dumps(job, indent=1))
        self.assertEqual(job["causes"][0]["cause"], "worker_lost")
        self.assertIn("was removed by an operator", job["causes"][0]["message"])
        self.assertIn(name, {worker["name"] for worker in self.cluster.json("get", "workers")})
        unknown = self.cluster.run("admin", "remove-worker", "nobody", check=False)
        self.assertEqual(unknown.returncode, 1)
        self.assertIn("no worker has the name 'nobody'", unknown.stderr)

    def test_everything_killed_and_started_again_finishes(self):
        self.disturbed()
        before = self.training()
        status = self.cluster.status()
        for pid in ([rank["pid"] for rank in before["ranks"]] + [status["coordinator"]["pid"]] +
                    [worker["pid"] for worker in status["workers"]]):
            kill(pid)
        self.cluster.up()
        self.assert_recovered(self.cluster.finish("tiny"), attempts=2)

    def test_followed_log_goes_on_with_the_next_attempt_and_ends_with_the_job(self):
        self.disturbed()
        self.training()
        path = self.directory / "followed"
        with path.open("wb") as out:
            follower = subprocess.Popen(
                [self.cluster.muster_binary, "logs", "tiny", "-f", "--rank", "1", "-o", "json"],
                stdout=out, stderr=subprocess.STDOUT, env=self.cluster.environment)
        self.addCleanup(follower.wait)
        self.addCleanup(follower.kill)

        def chunks():
            return [json.loads(line) for line in path.read_text().splitlines()]

        self.cluster.poll("the first attempt's log", chunks, bool)
        kill(self.cluster.job("tiny")["ranks"][0]["pid"])
        self.assertEqual(self.cluster.finish("tiny")["attempts"], 2)
        self.assertEqual(follower.wait(timeout=60), 0, path.read_text()[-2000:])
        epochs = [int(chunk["epoch"]) for chunk in chunks()]
        self.assertEqual(epochs, sorted(epochs), "one attempt after the other")
        for epoch in (1, 2):
            followed = "".join(c["text"] for c in chunks() if int(c["epoch"]) == epoch)
            whole = self.cluster.run("logs", "tiny", "--rank", 1, "--epoch", epoch).stdout
            self.assertTrue(whole)
            self.assertEqual(followed, whole, "nothing is missing and nothing twice")

    def test_damaged_checkpoint_is_skipped_for_the_one_before(self):
        # The next attempt begins late enough to damage the checkpoint that it would load, once the
        # verdict on the last commit is known. The newest directory may be incomplete: skip it.
        self.submit(steps=20 * STEPS, edits=[("initial: 100ms, max: 1s", "initial: 12s, max: 12s")])
        self.training(step=3 * EVERY)
        for rank in self.cluster_ranks():
            kill(rank)
        job = self.cluster.wait_for("tiny", "its attempt to end", lambda j: j["causes"])
        name = f"step-{job['lastCommittedStep']:08d}.e*"
        newest = sorted((self.directory / "checkpoints/tiny").glob(f"*/{name}"))[-1]
        shard = sorted(newest.glob("*.safetensors"))[0]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        self.assertEqual(self.cluster.job("tiny")["attempts"], 1, "too late to damage anything")
        events = self.cluster.poll(
            "a damaged checkpoint is reported", lambda: self.events("tiny"),
            lambda events: any(e["kind"] == "checkpoint_damaged" for e in events))
        damaged = next(e for e in events if e["kind"] == "checkpoint_damaged")
        self.assertIn(shard.name, damaged["message"])
        job = self.cluster.wait_for("tiny", "training goes on",
                                    lambda j: j["step"] > damaged["step"] + EVERY)
        self.assertEqual(job["attempts"], 2)
        self.cluster.run("cancel", "tiny")
        self.assertEqual(self.cluster.finish("tiny")["state"], "cancelled")

    def cluster_ranks(self):
        return [pid for pid, command in processes_under(self.directory) if "--assignment" in command
                and "shim" not in command]


class Queueing(Scene):
    workers = 1
    slots = 2

    def test_waiting_jobs_say_why_and_start_by_priority(self):
        self.submit("holder", steps=100 * STEPS, priority=90)
        self.training("holder", step=1)
        self.submit("low", steps=5, priority=10)
        self.submit("high", steps=5, priority=90)
        self.submit("huge", steps=5, ranks=64, priority=1, edits=[("global_batch: 16",
                                                                   "global_batch: 256")])
        waiting = self.cluster.wait_for("huge", "an explanation", lambda j: j.get("waiting"))
        self.assertEqual(waiting["waiting"]["code"], "WAIT_CODE_CLUSTER_TOO_SMALL")
        self.assertEqual(waiting["waiting"]["change"]["slotsAdded"], 62)
        low = self.cluster.wait_for("low", "an explanation", lambda j: j.get("waiting"))["waiting"]
        self.assertEqual(low["blocker"]["jobName"], "high")
        explained = self.cluster.poll("an estimate, once a step was timed",
                                      lambda: self.cluster.json("explain", "high")["waiting"],
                                      lambda reason: "estimatedStart" in reason, 30)
        self.assertEqual(explained["change"]["jobsEnd"][0]["jobName"], "holder")
        self.cluster.run("cancel", "holder")
        high = self.cluster.finish("high")
        low = self.cluster.finish("low")
        self.assertLess(timestamp(high["started"]), timestamp(low["started"]))
        self.assertEqual(self.cluster.job("huge")["state"], "queued")
        self.cluster.run("cancel", "huge")
        self.assertEqual(self.cluster.finish("huge")["state"], "cancelled")


class Preemption(Scene):
    workers = 1
    slots = 2

    def submit_victim(self, steps):
        return self.submit("victim", steps=steps, edits=[
            ("restart:", "preemption: {grace: 60s, min_runtime: 0s}\nrestart:")])

    def assert_nothing_was_lost(self, job, end):
        """What the attempt that ended so had trained was saved before it ended."""
        self.assertEqual((end["cause"], end["counted"]), ("preempted", False), json.dumps(end))
        saved = [e["step"] for e in self.events(job["name"])
                 if e["kind"] == "checkpoint_committed" and e["epoch"] == end["epoch"]]
        self.assertEqual(max(saved), end["step"])
        self.assertEqual(job["failures"], 0)

    def test_larger_priority_gets_the_devices_and_the_victim_resumes_with_the_same_bits(self):
        self.submit("calm", steps=LONG)
        calm = self.cluster.finish("calm")
        self.submit_victim(LONG)
        self.training("victim")
        self.submit("urgent", steps=20, priority=900)
        urgent = self.cluster.finish("urgent")
        self.assertEqual((urgent["state"], urgent["attempts"]), ("succeeded", 1))
        victim = self.cluster.finish("victim")
        self.assertEqual((victim["state"], victim["attempts"]), ("succeeded", 2),
                         json.dumps(victim, indent=1))
        self.assert_nothing_was_lost(victim, victim["causes"][0])
        self.assertEqual((victim["trainLoss"], victim["validationLoss"]),
                         (calm["trainLoss"], calm["validationLoss"]))
        self.assertEqual(victim["losses"], calm["losses"])
        kept = [e for e in self.events("urgent") if e["kind"] == "slots_kept"]
        self.assertIn("stopped for it: job victim (priority 50)", kept[0]["message"])

    def test_suspended_job_goes_on_where_it_stopped_when_it_is_resumed(self):
        self.submit_victim(LONG)
        self.training("victim")
        said = self.cluster.run("suspend", "victim", "--reason", "maintenance").stdout
        self.assertIn("victim is preempting", said)
        held = self.cluster.wait_for("victim", "it is held", lambda j: j["state"] == "held")
        self.assertEqual(held["waiting"]["code"], "WAIT_CODE_HELD")
        self.assert_nothing_was_lost(held, held["causes"][0])
        self.assertIn("held by client", self.cluster.run("explain", "victim").stdout)
        self.cluster.run("resume", "victim")
        job = self.cluster.finish("victim")
        self.assertEqual((job["state"], job["attempts"]), ("succeeded", 2))
        refused = self.cluster.run("preempt", "victim", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("it has ended", refused.stderr)


class Elastic(Scene):
    workers = 1
    slots = 2

    def test_resized_job_has_the_losses_of_one_size(self):
        edits = [("ranks: 2", "ranks: {min: 1, max: 2}")]
        self.submit("calm", steps=LONG)
        calm = self.cluster.finish("calm")
        self.submit("elastic", steps=LONG, edits=edits)
        job = self.training("elastic")
        self.assertEqual((len(job["ranks"]), job["sizes"]), (2, [1, 2]))
        said = self.cluster.run("resize", "elastic", "1").stdout
        self.assertIn("elastic is resizing", said)
        job = self.cluster.wait_for(
            "elastic", "it runs with one rank",
            lambda j: (j["state"] == "running" and len(j["ranks"]) == 1) or is_final(j))
        self.assertEqual(len(job["ranks"]), 1)
        resized = job["step"]
        self.cluster.wait_for("elastic", "it trains on",
                              lambda j: j["step"] > resized + 5 or is_final(j))
        self.cluster.run("resize", "elastic", "2")
        job = self.cluster.finish("elastic")
        self.assertEqual((job["state"], job["attempts"], job["failures"]), ("succeeded", 3, 0),
                         json.dumps(job, indent=1))
        self.assertEqual([end["cause"] for end in job["causes"]],
                         ["resized", "resized", "completed"])
        self.assertEqual(len(job["losses"]), len(calm["losses"]))
        for point, other in zip(job["losses"], calm["losses"], strict=True):
            self.assertEqual(point["step"], other["step"])
            self.assertAlmostEqual(point["trainLoss"] / other["trainLoss"], 1, delta=1e-6)

    def test_sizes_that_a_job_does_not_have_are_refused_with_those_that_it_has(self):
        self.submit("elastic", steps=LONG, edits=[("ranks: 2", "ranks: {min: 1, max: 2}")])
        self.training("elastic")
        refused = self.cluster.run("resize", "elastic", "3", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("it can with 1, 2", refused.stderr)


class Replaced(Scene):
    """Ranks whose worker fails before the attempt trains: others take their place in the same epoch."""

    workers = 2
    slots = 1

    def add_worker(self, name, *arguments):
        """Starts another daemon, of one slot, and returns its process; worker-2 stays free beside it."""
        self.cluster.run("cordon", "worker-2")
        daemon = subprocess.Popen(
            [BIN / "muster-worker", "--coordinator", self.cluster.status()["coordinator"]["address"], "--name", name,
             "--state-dir", self.directory / name, "--slots", "1", "--gpus", "none", *arguments],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self.cluster.environment)
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        self.cluster.poll("it has joined", lambda: self.cluster.json("get", "workers"),
                          lambda workers: any(w["name"] == name and w["slotsFree"] == 1 for w in workers))
        return daemon

    def assert_replaced(self, job, worker, cause):
        self.assertEqual((job["state"], job["epoch"], job["attempts"], job["failures"]), ("succeeded", 1, 1, 0),
                         json.dumps(job, indent=1))
        self.assertEqual([end["cause"] for end in job["causes"]], ["completed"])
        self.assertEqual(job["membership"], 2)
        self.assertEqual({rank["worker"] for rank in job["ranks"]}, {"worker-1", "worker-2"})
        replacement = job["replacements"][0]
        self.assertEqual((replacement["worker"], replacement["cause"], replacement["stayed"]), (worker, cause, 1))
        self.assertEqual([rank["worker"] for rank in replacement["ranks"]], ["worker-2"])
        self.assertEqual([e["worker"] for e in self.events(job["name"]) if e["kind"] == "ranks_replaced"], [worker])
        described = self.cluster.run("describe", "job", job["name"]).stdout
        self.assertRegex(described, r"membership: +2 of attempt 1")
        self.assertIn("ranks that were replaced before it trained", described)
        snapshot = self.directory / "snapshot"
        self.cluster.run("admin", "snapshot", snapshot)
        self.cluster.run("replay", "--strict", snapshot)

    def test_daemon_killed_before_it_has_prepared_is_replaced_in_the_epoch(self):
        self.submit("calm", steps=40)
        calm = self.cluster.finish("calm")
        daemon = self.add_worker("a-worker")
        os.kill(daemon.pid, signal.SIGSTOP)  # it counts as ready for a while, and prepares nothing
        self.submit(steps=40)
        self.cluster.wait_for("tiny", "it is placed there",
                              lambda j: "a-worker" in {rank["worker"] for rank in j["ranks"]})
        self.cluster.wait_for("tiny", "the other rank is prepared",
                              lambda j: any(r["state"] == "prepared" for r in j["ranks"]))
        daemon.kill()
        self.cluster.run("uncordon", "worker-2")
        job = self.cluster.finish("tiny")  # after --lost-after, 30 s
        self.assert_replaced(job, "a-worker", "worker_lost")
        self.assertEqual(job["losses"], calm["losses"])

    def test_rank_that_bootstraps_keeps_its_process_when_its_peer_is_replaced(self):
        self.submit("calm", steps=200)
        calm = self.cluster.finish("calm")
        program = self.directory / "never-joins"
        program.write_text("#!/bin/sh\nexec sleep 1000\n")
        program.chmod(0o755)
        daemon = self.add_worker("a-worker", "--rank-binary", program)
        self.submit(steps=200)
        starting = self.cluster.wait_for(
            "tiny", "both ranks run and wait for each other",
            lambda j: all(r["state"] == "running" and r["pid"] for r in j["ranks"]) and j["ranks"])
        stays = next(rank for rank in starting["ranks"] if rank["worker"] == "worker-1")
        daemon.kill()
        for pid, command in processes_under(self.directory / "a-worker"):
            kill(pid)  # the rank's supervisor, and with it the rank: the whole host is gone
        self.cluster.run("uncordon", "worker-2")
        self.cluster.run("admin", "remove-worker", "a-worker")
        training = self.cluster.wait_for("tiny", "it trains", lambda j: j["step"] > 0 or is_final(j))
        self.assertEqual([rank["pid"] for rank in training["ranks"] if rank["worker"] == "worker-1"],
                         [stays["pid"]])
        job = self.cluster.finish("tiny")
        self.assert_replaced(job, "a-worker", "worker_lost")
        self.assertEqual(job["losses"], calm["losses"])
        self.assertTrue(all(".m2" in c["path"] for c in self.cluster.json("checkpoints", "tiny")))
        self.assertIn("this one starts anew", self.cluster.run("logs", "tiny", "--rank", stays["rank"]).stdout)


class BadInput(Scene):
    def refuse(self, *arguments, code=1):
        result = self.cluster.run(*arguments, check=False)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def test_bad_specs_are_refused_with_field_and_reason_and_make_no_job(self):
        for edits, expected in [
                ([("heads: 2", "heads: 5")], "engine.model.heads"),
                ([("heads: 2", "haeds: 2")], "heads"),
                ([("steps: 400", "steps: -1")], "engine.training.steps"),
                ([("ranks: 2", "ranks: 0")], "resources.ranks"),
                ([("seed: 7", "seed: seven")], "engine.training.seed"),
        ]:
            self.assertIn(expected, self.refuse("submit", self.spec(edits=edits)))
        long_name = self.spec(edits=[("name: tiny\n", f"name: {'x' * 500000}\n")])
        self.assertLess(len(self.refuse("submit", long_name)), 2000)
        self.assertEqual(self.cluster.json("get", "jobs"), [])
        self.refuse("get", "job", "tiny")
        self.refuse("frobnicate", code=2)

    def test_plan_says_what_ranks_take_and_a_job_that_cannot_fit_ends_before_training(self):
        plan = self.cluster.json("plan", self.spec(), "--device-memory", "1TiB")
        self.assertEqual(sum(rank["ranks"] for rank in plan["ranks"]), 2)
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["with"], [])
        self.assertEqual(self.cluster.json("plan", self.spec(), "--set", "engine.parallel={tensor: 2}")["with"],
                         ["tensor_overlap backward"])
        uneven = self.cluster.json("plan", self.spec(), "--set", "engine.parallel={tensor: 2, tensor_shares: [3, 1]}")
        self.assertEqual(uneven["shares"]["MLP columns"], [192, 64])
        self.assertEqual(plan["ranks"][0]["deviceBytes"],
                         sum(plan["ranks"][0]["device"].values()))
        self.assertIn("It fits into 1.0 TiB", self.cluster.run("plan", self.spec(),
                                                               "--device-memory", "1TiB").stdout)
        out = self.refuse("submit", "--watch", self.spec(),
                          "--set", "engine.model.hidden=65536", "--set", "engine.model.layers=100")
        self.assertIn("needs", out)
        self.assertIn("optimizer", out)
        # A job that does not fit is not tried again.
        job = self.cluster.job("tiny")
        self.assertEqual((job["state"], job["attempts"]), ("failed", 1))
        self.assertEqual(job["causes"][0]["cause"], "out_of_memory")

    def test_missing_data_fails_the_job_without_retries(self):
        out = self.refuse("submit", "--watch",
                          self.spec(edits=[("data/text.train", "data/absent")]))
        self.assertIn("absent", out)
        job = self.cluster.job("tiny")
        self.assertEqual((job["state"], job["attempts"]), ("failed", 1))
        self.assertEqual(job["causes"][0]["cause"], "data")

    def test_corrupt_index_and_unwritable_checkpoints_name_the_path(self):
        index = self.directory / "data/text.train.idx"
        good = index.read_bytes()
        index.write_bytes(good[:40])
        self.assertIn("text.train.idx", self.refuse("submit", "--watch", self.spec("corrupt")))
        self.assertEqual(self.cluster.job("corrupt")["causes"][0]["cause"], "data")
        index.write_bytes(good)
        (self.directory / "file").write_text("not a directory")
        spec = self.spec("unwritable", edits=[("path: checkpoints/unwritable", "path: file/x")])
        self.assertIn("file/x", self.refuse("submit", "--watch", spec))
        self.assertEqual(self.cluster.job("unwritable")["causes"][0]["cause"], "storage")

    def test_garbage_on_the_port_kills_nothing(self):
        host, port = self.cluster.status()["coordinator"]["address"].rsplit(":", 1)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(garbage)
        self.submit(steps=5)
        self.assertEqual(self.cluster.finish("tiny")["state"], "succeeded")


class Profiles(Scene):
    def test_profile_has_the_same_steps_of_every_rank(self):
        # Evaluations run between the steps, and their time is not part of any step.
        self.submit(steps=1000 * STEPS, edits=[("evaluate_every: 200", "evaluate_every: 2")])
        self.training()
        path = self.directory / "out.json"
        said = self.cluster.json("profile", "tiny", "--steps", 3, "--output", path)
        events = json.loads(path.read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        wanted = {f"step {said['firstStep'] + i}" for i in range(3)}
        for rank in said["breakdown"]:
            self.assertEqual(list(rank["seconds"]), ["forward", "backward", "update", "data", "other"])
            self.assertAlmostEqual(sum(rank["seconds"].values()), rank["stepSeconds"], 6)
            self.assertGreater(rank["seconds"]["backward"], 0)
        titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.assertEqual({pid: title.split(",")[0] for pid, title in titles.items()},
                         {0: "rank 0", 1: "rank 1"})
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for rank in range(2):
            mine = [span for span in spans if span["pid"] == rank]
            steps = {s["name"]: s for s in mine if s["name"].startswith("step ")}
            self.assertEqual(set(steps), wanted)
            run = [s for s in mine if tracks[rank, s["tid"]] == "steps"]
            self.assertEqual({s["name"] for s in run}, wanted)
            took = run[-1]["ts"] + run[-1]["dur"] - run[0]["ts"]
            self.assertAlmostEqual(said["breakdown"][rank]["stepSeconds"], took * 1e-6 / 3, 6)
            names = [s["name"] for s in mine]
            for name in ("forward", "backward", "wait for data"):
                self.assertEqual(names.count(name), 3 * 2, "two micro-batches in each of three steps")
            self.assertEqual(names.count("update"), 3)
            first = steps[f"step {said['firstStep']}"]
            inside = [s for s in mine if first["ts"] <= s["ts"] and
                      s["ts"] + s["dur"] <= first["ts"] + first["dur"] + 0.001]
            self.assertGreater(len(inside), 5)
            collectives = [s for s in mine if "collectives" in tracks[rank, s["tid"]]]
            self.assertTrue(any(s["name"].startswith("all-reduce F32") for s in collectives), names)
        self.cluster.run("cancel", "tiny")
        self.cluster.finish("tiny")
        refused = self.cluster.run("profile", "tiny", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("job tiny is cancelled; only one that trains has a profile", refused.stderr)
        self.assertIn("tiny", self.cluster.run("profile", "tinny", check=False).stderr)


class BrokenGpu(Scene):
    """A daemon with a GPU that no rank can use, as after an update of the driver."""

    workers = 1

    def setUp(self):
        fakes = sorted(BIN.parent.glob("tests/worker/libfake_nvml.so"))
        if not fakes:
            self.skipTest("SKIPPED, NOT TESTED: the tests' own management library has not been built")
        if pathlib.Path("/dev/nvidia0").exists():
            self.skipTest("SKIPPED, NOT TESTED: this machine has a GPU")
        libraries = pathlib.Path(tempfile.mkdtemp(prefix="muster-e2e-nvml-"))
        self.addCleanup(shutil.rmtree, libraries, ignore_errors=True)
        (libraries / "libnvidia-ml.so.1").symlink_to(fakes[0])
        paths = ":".join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH"))))
        for name, value in (("LD_LIBRARY_PATH", paths), ("FAKE_NVML", "gpus=1 cc=90")):
            before = os.environ.get(name)
            os.environ[name] = value
            self.addCleanup(lambda n=name, b=before: os.environ.pop(n) if b is None
                            else os.environ.__setitem__(n, b))
        super().setUp()

    def test_job_fails_with_the_gpu_named_and_the_daemon_goes_on(self):
        daemon = self.cluster.status()["workers"][0]["pid"]
        (worker,) = self.cluster.json("get", "workers")
        (gpu,) = [d for d in worker["devices"] if d["name"] == "cuda:0"]
        self.assertEqual(gpu["uuid"], "GPU-00000000-aaaa")
        edits = [("device: cpu", "device: cuda"), ("max_failures: 5", "max_failures: 1")]
        if gpu["unusable"]:
            self.assertIn("without CUDA", gpu["unusable"])
            self.submit("broken", ranks=1, edits=edits)
            waiting = self.cluster.wait_for("broken", "the job to wait", lambda job: job.get("waiting"))
            self.assertEqual(waiting["waiting"]["device"], "DEVICE_KIND_CUDA")
            self.cluster.run("cancel", "broken")
            self.cluster.finish("broken")
        else:
            self.submit("broken", ranks=1, edits=edits)
            job = self.cluster.finish("broken")
            self.assertEqual(job["state"], "failed")
            self.assertEqual({end["cause"] for end in job["causes"]}, {"device"})
            for end in job["causes"]:
                self.assertIn("cuda:0", end["message"])
                self.assertIn("GPU-00000000-aaaa", end["message"])
                self.assertIn("driver", end["message"])
        self.submit("healthy", steps=5, ranks=2)
        self.assertEqual(self.cluster.finish("healthy")["state"], "succeeded")
        self.assertEqual(self.cluster.status()["workers"][0]["pid"], daemon)


class FineTuning(Scene):
    def test_job_begins_with_a_hugging_face_model_and_with_its_import(self):
        # The model of the folder, which transformers wrote, has 61 tokens: digits and spaces do.
        peer = pathlib.Path(__file__).parents[1] / "interop/data/llama-tied-scaled"
        (self.directory / "digits").write_text("".join(f"{i * i} {i}" for i in range(5000)))
        self.cluster.run("data", "tokenize", "--input", self.directory / "digits", "--output",
                         self.directory / "data/digits", "--tokenizer", "bytes")
        self.cluster.run("convert", peer, self.directory / "imported")
        model = ("{family: llama, layers: 2, hidden: 24, heads: 6, kv_heads: 2, ffn: 40, vocab: 61, "
                 "sequence_length: 32, tied: true, norm_epsilon: 1.0e-5, rope_theta: 500000, "
                 "rope_scaling: {factor: 8, low_frequency_factor: 1, high_frequency_factor: 4, "
                 "original_context: 16}")
        old = "{family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 256, sequence_length: 64}"
        losses = {}
        for name, ranks, source in [
                ("folder", 2, f", initialize_from: {peer}"),
                ("imported", 1, ", initialize_from: imported/imported/step-00000000.e0"),
                ("random", 1, "")]:
            edits = [(old, model + source + "}"), ("data/text.train", "data/digits"),
                     ("    validation: [{path: data/text.validation}]\n", ""),
                     ("warmup_steps: 10", "warmup_steps: 2")]
            self.submit(name, steps=4, ranks=ranks, edits=edits)
            job = self.cluster.finish(name)
            self.assertEqual(job["state"], "succeeded", job)
            losses[name] = [point["trainLoss"] for point in job["losses"]]
        self.assertEqual(losses["folder"], losses["imported"])
        self.assertGreater(abs(losses["folder"][0] - losses["random"][0]), 0.01)
        self.assertIn("began with the weights of Hugging Face folder",
                      self.cluster.run("logs", "folder").stdout)
        # When the folder has another model than the spec, the message names the fields that differ.
        spec = self.spec("other", edits=[(old, model.replace("rope_theta: 500000", "rope_theta: 10000") +
                                          f", initialize_from: {peer}" + "}"),
                                         ("data/text.train", "data/digits"),
                                         ("    validation: [{path: data/text.validation}]\n", "")])
        refused = self.cluster.run("submit", "--watch", spec, check=False)
        self.assertIn("rope_theta is 10000 in the spec and 500000 there", refused.stdout + refused.stderr)
        self.assertEqual(self.cluster.job("other")["attempts"], 1)


class Examples(Scene):
    def test_mamba2_and_hybrid_examples_train_as_on_one_rank_and_are_sampled_from(self):
        self.cluster.run("data", "tokenize", "--input", self.directory / "text", "--output",
                         self.directory / "data/kjv", "--tokenizer", "bytes", "--split",
                         "train=0.9,validation=0.1")
        few = [f"engine.training.{text}" for text in
               ("steps=12", "evaluate_every=12", "evaluate_samples=32", "schedule.cosine.warmup_steps=3")]
        alone = ["resources.ranks=1", "engine.parallel={}"]
        for name, apart in (("mamba2-kjv", 0), ("hybrid-kjv", 1e-5)):
            losses = []
            for job, settings in ((name, few), (f"{name}-alone", [f"name={name}-alone", *few, *alone])):
                self.cluster.run("submit", ROOT / "examples" / f"{name}.yaml",
                                 *(word for setting in settings for word in ("--set", setting)))
                ended = self.cluster.finish(job)
                self.assertEqual(ended["state"], "succeeded", ended)
                losses.append([point["trainLoss"] for point in ended["losses"]])
            self.assertEqual(len(losses[0]), 12)
            self.assertLess(losses[0][-1], losses[0][0])
            for split, whole in zip(*losses):
                self.assertLessEqual(abs(split / whole - 1), apart)
            sampled = self.cluster.run("sample", name, "--prompt", "In the beginning", "--tokens", 8,
                                       errors="replace").stdout  # any bytes, after so few steps
            self.assertTrue(sampled.startswith("In the beginning"), sampled)


class Metrics(Scene):
    def test_every_process_serves_the_documented_metrics(self):
        import urllib.request
        self.submit(steps=20 * STEPS)
        ranks = self.training()["ranks"]
        status = self.cluster.status()
        for process, address in [("coordinator", status["coordinator"]["metrics"]),
                                 ("rank", ranks[1]["metricsAddress"])] + [
                ("worker", worker["metrics"]) for worker in status["workers"]]:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
                body = reply.read().decode()
            self.assertIn(f"muster_{process}_", body)
        self.cluster.run("cancel", "tiny")
        self.cluster.finish("tiny")


def timestamp(text):
    """Seconds since 1970 of a protobuf JSON timestamp (up to nanoseconds, ends in Z)."""
    from datetime import datetime, timezone
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    return seconds + float("0." + (fraction or "0"))


if __name__ == "__main__":
    if "--bin" in sys.argv:
        at = sys.argv.index("--bin")
        BIN = pathlib.Path(sys.argv[at + 1]).resolve()
        del sys.argv[at:at + 2]
    unittest.main(verbosity=2)
