"""Commands as their users meet them: shell lines, scripts and PyTorch under a real cluster.

Every test drives the CLI alone. Waiting is polling with a deadline; nothing sleeps for a fixed time.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from cluster import Cluster, alive, is_final, kill

BIN = None
SCRIPTS = pathlib.Path(__file__).parent / "commands"
# A Python with torch, if there is one: this one, or Debian's.
PYTHONS = [sys.executable, "/usr/bin/python3"]


def python_with_torch():
    for python in PYTHONS:
        if shutil.which(python) and subprocess.run(
                [python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"],
                capture_output=True).returncode == 0:
            return python
    return None


class Scene(unittest.TestCase):
    workers = 2
    slots = 2

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-e2e-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.cluster = Cluster(BIN, self.directory / "home", cwd=self.directory,
                               workers=self.workers, slots=self.slots)
        self.cluster.up()
        self.addCleanup(self.cluster.down)

    def submit(self, name, command, ranks=1, **fields):
        spec = {"name": name, "command": command, "resources": {"ranks": ranks},
                "restart": {"max_failures": 2, "backoff": {"initial": "10ms"}}, **fields}
        path = self.directory / f"{name}.json"
        path.write_text(json.dumps(spec))
        self.cluster.run("submit", path)
        return name

    def finish(self, name, state):
        job = self.cluster.finish(name)
        self.assertEqual(job["state"], state, json.dumps(job, indent=1))
        return job

    def logs(self, name, rank=0, **options):
        more = [word for key, value in options.items() for word in (f"--{key}", value)]
        return self.cluster.run("logs", name, "--rank", rank, *more).stdout


class Shell(Scene):
    def test_line_of_the_shell_succeeds_and_no_view_shows_a_zero_that_means_nothing(self):
        self.submit("hello", ["sh", "-c", "echo rank $RANK of $WORLD_SIZE in $PWD"], ranks=4)
        job = self.finish("hello", "succeeded")
        self.assertEqual([end["cause"] for end in job["causes"]], ["completed"])
        self.assertEqual({rank["worker"] for rank in job["ranks"]}, {"worker-1", "worker-2"})
        for rank in range(4):
            self.assertEqual(self.logs("hello", rank), f"rank {rank} of 4 in {self.directory}\n")
        row = self.cluster.run("get", "jobs").stdout.splitlines()[1].split()
        self.assertEqual(row[:7], ["hello", "succeeded", "-", "-", "-", "-", "1"])
        described = self.cluster.run("describe", "job", "hello").stdout
        self.assertNotIn("0/0", described)
        self.assertRegex(described, r"step: +-\n")
        self.assertIn("every rank exited with status 0", described)
        self.assertRegex(self.cluster.run("submit", "--watch", self.directory / "hello.json").stdout,
                         r"hello succeeded: in \w+, 1 attempt")
        for verb in (["sample", "hello", "--prompt", "x"], ["debug", "hello"], ["profile", "hello"],
                     ["plan", self.directory / "hello.json"]):
            refused = self.cluster.run(*verb, check=False)
            self.assertEqual(refused.returncode, 1, verb)
        planned = self.cluster.run("plan", self.directory / "hello.json", "--cluster").stdout
        self.assertIn("worker-1", planned)

    def test_failing_line_is_tried_again_and_its_last_words_are_quoted(self):
        self.submit("failing", ["sh", "-c", "echo begin; echo 'no such tensor' >&2; exit 7"])
        job = self.finish("failing", "failed")
        self.assertEqual(job["attempts"], 3)
        end = job["causes"][-1]
        self.assertEqual(end["cause"], "crash")
        self.assertIn("exited with status 7: no such tensor", end["message"])
        self.assertIn("no such tensor", self.cluster.run("describe", "job", "failing").stdout)

    def test_program_that_cannot_run_fails_at_once_by_name(self):
        plain = self.directory / "plain"
        plain.write_text("no program")
        text = self.directory / "text"
        text.write_text("echo hi\n")
        text.chmod(0o755)
        for name, command, why in [
                ("absent", ["nonesuch-program", "1"], "no program nonesuch-program in PATH"),
                ("missing", ["./nonesuch"], "no file ./nonesuch"),
                ("plain", ["./plain"], "not executable"),
                ("text", [str(text)], "#!")]:
            self.submit(name, command, ranks=2)
            job = self.finish(name, "failed")
            self.assertEqual([end["cause"] for end in job["causes"]], ["user_error"])
            self.assertIn(why, job["causes"][0]["message"])

    def test_cancelled_command_gets_sigterm_and_leaves_nothing(self):
        marker = self.directory / "ended"
        ready = self.directory / "ready"
        self.submit("long", ["sh", "-c",
                             f"trap 'touch {marker}; exit 0' TERM; sleep 1000 & touch {ready}; wait"])
        job = self.cluster.wait_for("long", "it runs", lambda job: job["state"] == "running")
        self.cluster.poll("it has begun", ready.exists, bool, 30)
        pid = job["ranks"][0]["pid"]
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        self.assertTrue(children, "the pid is the shell's own")
        self.cluster.run("cancel", "long")
        self.finish("long", "cancelled")
        self.assertTrue(marker.exists())
        self.assertFalse([process for process in [pid, *children] if alive(process)])

    def test_jobs_that_depend_on_others_start_in_order_or_fail_with_the_reason(self):
        order = self.directory / "order"
        go = self.directory / "go"
        wait = f"while ! test -e {go}; do sleep 0.05; done; echo first >>{order}"
        self.submit("first", ["sh", "-c", wait], labels={"stage": "prepare"})
        self.submit("second", ["sh", "-c", f"echo second >>{order}"], after=["first:succeeded"],
                    labels={"stage": "train"}, notes="made by a test")
        self.submit("never", ["true"], after=["first:failed"])
        waiting = self.cluster.job("second")
        self.assertEqual(waiting["state"], "queued")
        self.assertIn("starts after job first (first-", self.cluster.run("get", "job", "second").stdout)
        self.assertIn("starts after job first (first-", self.cluster.run("explain", "second").stdout)
        self.assertIn("made by a test", self.cluster.run("describe", "job", "second").stdout)
        for selector, names in [("stage=train", ["second"]), ("stage", ["second", "first"]),
                                ("!stage", ["never"])]:
            listed = self.cluster.json("get", "jobs", "-l", selector)
            self.assertEqual([job["name"] for job in listed], names)
        go.touch()
        self.finish("second", "succeeded")
        self.assertEqual(order.read_text(), "first\nsecond\n")
        self.assertIn("which has succeeded", self.finish("never", "failed")["message"])
        refused = self.cluster.run("submit", self.directory / "never.json", check=False)
        self.assertIn("after[0]: it was to start after first", refused.stderr)

    def test_time_limit_stops_a_job(self):
        self.submit("slow", ["sleep", "1000"], time_limit="2s")
        job = self.finish("slow", "failed")
        self.assertEqual([end["cause"] for end in job["causes"]], ["time_limit"])
        self.assertIn("it has run for its time_limit, 2s", job["message"])
        self.assertRegex(self.cluster.run("describe", "job", "slow").stdout, r"ran: +2s of 2s")

    def test_spec_problems_name_line_and_field(self):
        (self.directory / "bad.yaml").write_text(
            "name: bad\ncommand: python3 train.py\nenv: {RANK: 3, lr: 1e-3}\nresources: {ranks: 1}\n")
        refused = self.cluster.run("submit", self.directory / "bad.yaml", check=False).stderr
        self.assertIn("bad.yaml:2:10: command: expected a list, got 'python3 train.py'", refused)
        (self.directory / "bad.yaml").write_text(
            "name: bad\ncommand: [python3]\nenv: {RANK: 3, lr: 1e-3}\nresources: {ranks: 1}\n")
        refused = self.cluster.run("submit", self.directory / "bad.yaml", check=False).stderr
        self.assertIn("env.RANK: Muster sets this variable itself", refused)
        self.assertNotIn("lr", refused)


class Recovery(Scene):
    steps, every, pause = 60, 10, 35

    def train(self, name, **fields):
        place = self.directory / name
        place.mkdir()
        return self.submit(name, [sys.executable, str(SCRIPTS / "average.py"), str(place),
                                  self.steps, self.every], ranks=2, **fields)

    def value(self, name):
        return (self.directory / name / "result").read_text()

    def environments(self, name, attempt):
        return [json.loads((self.directory / name / f"env-{attempt}-{rank}.json").read_text())
                for rank in range(2)]

    def test_killed_rank_goes_on_from_the_checkpoint_that_it_reported(self):
        self.train("calm")
        calm = self.finish("calm", "succeeded")
        self.assertEqual((calm["step"], calm["steps"], calm["attempts"]), (self.steps, self.steps, 1))
        self.assertEqual(calm["consumedTokens"], 100 * self.steps)
        self.assertEqual([point["step"] for point in calm["losses"]][-1], self.steps)

        self.train("killed", env={"PAUSE_AT": self.pause})
        before = self.cluster.wait_for(
            "killed", "both ranks wait before the step",
            lambda job: job["step"] == self.pause - 1 and job["phase"] == "waiting" and
            job["lastCommittedStep"] == 30)
        kill(before["ranks"][1]["pid"])
        job = self.finish("killed", "succeeded")
        self.assertEqual((job["attempts"], job["failures"], job["step"]), (2, 0, self.steps))
        self.assertEqual(job["causes"][0]["cause"], "crash")
        self.assertIn("signal 9", job["causes"][0]["message"])
        self.assertEqual(self.value("killed"), self.value("calm"))
        self.assertEqual([c["step"] for c in job["checkpoints"]], [10, 20, 30, 40, 50, 60])
        for rank in range(2):
            self.assertIn(f"rank {rank} goes on from step 30", self.logs("killed", rank))

        first, second = self.environments("killed", 1), self.environments("killed", 2)
        for rank in range(2):
            for attempt, environment in ((1, first[rank]), (2, second[rank])):
                expected = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                    "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "NODE_RANK": 0, "ROLE_RANK": rank,
                    "ROLE_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
                    "TORCHELASTIC_RESTART_COUNT": attempt - 1, "TORCHELASTIC_MAX_RESTARTS": 2,
                    "TORCHELASTIC_RUN_ID": job["id"], "MUSTER_JOB_ID": job["id"],
                    "MUSTER_EPOCH": attempt, "MUSTER_ATTEMPT": attempt, "CUDA_VISIBLE_DEVICES": "",
                    "PAUSE_AT": self.pause}
                self.assertEqual({key: environment[key] for key in expected},
                                 {key: str(value) for key, value in expected.items()})
                self.assertTrue(environment["OMP_NUM_THREADS"].isdigit())
                self.assertEqual(environment["MASTER_PORT"], (first, second)[attempt - 1][0]["MASTER_PORT"])
            self.assertNotIn("MUSTER_RESTORE_PATH", first[rank])
            self.assertEqual(second[rank]["MUSTER_RESTORE_STEP"], "30")
            self.assertEqual(second[rank]["MUSTER_RESTORE_PATH"],
                             str(self.directory / "killed/checkpoint-30.json"))

    def test_killed_daemon_and_coordinator_cost_no_attempt(self):
        self.train("kept", env={"PAUSE_AT": self.pause})
        at_pause = lambda job: job["step"] == self.pause - 1 and job["phase"] == "waiting"
        before = self.cluster.wait_for("kept", "both ranks wait before the step", at_pause)
        kill(self.cluster.status()["coordinator"]["pid"])
        servers = []
        for worker in self.cluster.status()["workers"]:
            servers += subprocess.run(["pgrep", "-P", str(worker["pid"])], capture_output=True, text=True).stdout.split()
            kill(worker["pid"])
        self.assertEqual(len(servers), 2, "each daemon has one that forks its shims")
        self.cluster.poll("they end with their daemons", lambda: [pid for pid in servers if alive(pid)], lambda left: not left)
        self.assertTrue(all(alive(rank["pid"]) for rank in before["ranks"]))
        self.cluster.up()
        after = self.cluster.wait_for("kept", "it is seen again",
                                      lambda job: job.get("phase") == "waiting" and
                                      all(rank.get("pid") for rank in job["ranks"]))
        self.assertEqual(after["epoch"], 1)
        self.assertEqual([rank["pid"] for rank in after["ranks"]],
                         [rank["pid"] for rank in before["ranks"]])
        self.cluster.run("cancel", "kept")
        self.finish("kept", "cancelled")
        self.assertFalse([rank for rank in before["ranks"] if alive(rank["pid"])])


class Elastic(Scene):
    workers = 1
    slots = 4

    def elastic(self, name, largest, each=10, steps=1000, **fields):
        place = self.directory / name
        place.mkdir()
        return self.submit(name, [sys.executable, str(SCRIPTS / "elastic.py"), str(place), each, steps],
                           ranks={"min": 1, "max": largest, "resumes": True}, preemption={"min_runtime": "0s"}, **fields)

    def stepping(self, name, ranks, step):
        return self.cluster.wait_for(
            name, f"{ranks} ranks wait after step {step}",
            lambda job: job["state"] == "running" and len(job["ranks"]) == ranks and job["step"] == step)

    def seen(self, name, attempt, ranks):
        """What every rank of the attempt saw, which has to be the same."""
        files = sorted((self.directory / name).glob(f"seen-{attempt}-*.json"))
        self.assertEqual(len(files), ranks)
        seen = [json.loads(file.read_text()) for file in files]
        self.assertTrue(all(one == seen[0] for one in seen), seen)
        return seen[0]

    def test_resized_command_sees_its_new_world_and_goes_on_from_its_checkpoint(self):
        self.elastic("job", 4, steps=30)
        before = self.stepping("job", 4, 10)
        self.assertEqual(before["sizes"], [1, 2, 3, 4])
        self.cluster.run("resize", "job", 2)
        self.stepping("job", 2, 20)
        # Across a restart of the coordinator between the wish and its end.
        self.cluster.run("resize", "job", 3)
        kill(self.cluster.status()["coordinator"]["pid"])
        self.cluster.up()
        job = self.finish("job", "succeeded")
        self.assertEqual([end["cause"] for end in job["causes"]], ["resized", "resized", "completed"])
        self.assertEqual((job["attempts"], job["failures"], job["step"]), (3, 0, 30))
        self.assertEqual([c["step"] for c in job["checkpoints"]], [10, 20])
        self.assertEqual(self.seen("job", 1, 4), {"world": 4, "from": 0, "worlds": [], "step": 0})
        self.assertEqual(self.seen("job", 2, 2), {"world": 2, "from": 10, "worlds": [4], "step": 10})
        self.assertEqual(self.seen("job", 3, 3), {"world": 3, "from": 20, "worlds": [4, 2], "step": 20})
        refused = self.cluster.run("resize", "job", 9, check=False)
        self.assertEqual(refused.returncode, 1)

    def test_devices_that_were_borrowed_are_given_back_by_shrinking(self):
        policy = self.directory / "queues.yaml"
        policy.write_text("queues:\n- {name: owner, guaranteed: {cpu: 2}}\n- {name: borrower, guaranteed: {cpu: 2}}\n")
        self.cluster.run("admin", "queues", "apply", policy)
        self.submit("rigid", ["sleep", "1000"], queue="borrower", preemption={"min_runtime": "0s"})
        self.cluster.wait_for("rigid", "it runs", lambda job: job["state"] == "running")
        self.elastic("job", 3, queue="borrower", priority=900)
        self.stepping("job", 3, 10)
        self.submit("owned", ["true"], ranks=2, queue="owner", priority=1)
        self.finish("owned", "succeeded")
        job = self.stepping("job", 1, 20)
        self.assertEqual([end["cause"] for end in job["causes"]], ["resized"])
        self.assertEqual(self.seen("job", 2, 1), {"world": 1, "from": 10, "worlds": [3], "step": 10})
        rigid = self.cluster.job("rigid")
        self.assertEqual((rigid["state"], rigid["attempts"]), ("running", 1), "it was left alone")


class Arrays(Scene):
    workers = 1
    slots = 4

    def test_tasks_see_their_values_and_no_more_run_than_may(self):
        running = self.directory / "running"
        running.mkdir()
        go = self.directory / "go"
        line = (f"touch {running}/$RANK-$MUSTER_ARRAY_INDEX; ls {running} | wc -l >{self.directory}/beside-$MUSTER_ARRAY_INDEX; "
                f"while ! test -e {go}; do sleep 0.05; done; "
                f'echo "$MUSTER_ARRAY_COLOR $MUSTER_ARRAY_LAYER_COUNT $0 $1 $2 $TAG" >{self.directory}/values-$MUSTER_ARRAY_INDEX; '
                f"rm {running}/$RANK-$MUSTER_ARRAY_INDEX")
        spec = {"name": "sweep", "array": {"color": ["red", "dark green"], "layer_count": [1, 2, 3]}, "max_running": 2,
                "command": ["sh", "-c", line, "${array.color}", "${array.layer_count}", "${array.index}"],
                "env": {"TAG": "tag-${array.layer_count}-${array.color}"},
                "resources": {"ranks": 1}}
        (self.directory / "sweep.json").write_text(json.dumps(spec))
        self.cluster.run("submit", self.directory / "sweep.json")
        self.cluster.poll("two tasks run", lambda: len(list(running.iterdir())), lambda count: count == 2)
        tasks = {job["name"]: job for job in self.cluster.json("get", "jobs", "--tasks")}
        self.assertEqual(sorted(tasks), [f"sweep-{index}" for index in range(6)])
        for index in range(2, 6):  # two slots are free
            task = tasks[f"sweep-{index}"]
            self.assertEqual((task["state"], task["waiting"]["code"]), ("queued", "WAIT_CODE_ARRAY"), task)
        self.assertIn("at most 2 tasks", self.cluster.run("explain", "sweep-5").stdout)
        go.touch()
        for index in range(6):
            self.finish(f"sweep-{index}", "succeeded")
            color, layers = ("red", "dark green")[index // 3], index % 3 + 1
            self.assertEqual((self.directory / f"values-{index}").read_text(),
                             f"{color} {layers} {color} {layers} {index} tag-{layers}-{color}\n")
            self.assertLessEqual(int((self.directory / f"beside-{index}").read_text()), 2)
        self.assertIn("6 succeeded", self.cluster.run("get", "jobs").stdout)


@unittest.skipUnless(python_with_torch(), "no Python with PyTorch; `apt-get install python3-torch`")
class Torch(Scene):
    def test_script_for_torchrun_trains_unmodified_and_survives_a_kill(self):
        python = python_with_torch()
        losses = {}
        for name, steps in (("calm", 600), ("killed", 600)):
            snapshot = self.directory / f"{name}.pt"
            self.submit(name, [python, str(SCRIPTS / "ddp.py"), str(snapshot), steps, 20], ranks=2)
            if name == "killed":
                self.cluster.poll("a snapshot", snapshot.exists, bool)
                job = self.cluster.job(name)
                self.assertEqual(job["state"], "running", job)
                kill(job["ranks"][1]["pid"])
            job = self.finish(name, "succeeded")
            log = self.logs(name)
            losses[name] = re.search(r"loss (\S+) after step", log).group(1)
        self.assertEqual(job["attempts"], 2)
        self.assertIn("rank 0 goes on from step", log)
        self.assertEqual(losses["killed"], losses["calm"])


if __name__ == "__main__":
    if "--bin" in sys.argv:
        at = sys.argv.index("--bin")
        BIN = pathlib.Path(sys.argv[at + 1]).resolve()
        del sys.argv[at:at + 2]
    if not python_with_torch():
        print("SKIPPED: no Python with PyTorch, so that no real DDP script is run", file=sys.stderr)
    unittest.main(verbosity=2)
