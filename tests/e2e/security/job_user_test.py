"""Ranks as accounts of their owners (`muster-worker --job-user owner`), with real processes of two users of this machine: what
the processes are, what one cannot do to the other or to the daemon, and what a killed daemon finds again. Needs root; the accounts
exist in a mount namespace of the test alone. Waiting is polling with a deadline."""

import json
import os
import pathlib
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from waiting import poll  # noqa: E402

BIN = None
SKIPPED = 77
# The system's, which every account may run.
PYTHON = "/usr/bin/python3"
ACCOUNTS = {"muster-alice": 64101, "muster-bob": 64102, "muster-low": 641}
MAP = "# who runs as whom\nalice muster-alice\nbob muster-bob\ndave root\nerin muster-nobody-knows\nfrank muster-low\n"
SECRET = "v4lu3-0f-a-s3cr3t"
# Waits to be told to end; what it is asked for meanwhile it finds in files of its working directory.
WAITING = r"""
import os, pathlib, subprocess, sys, time
run = pathlib.Path(os.environ["MUSTER_RUN_DIRECTORY"])
(run / "mine").write_text("private to its owner")
open("/dev/stderr", "w").write("through /dev/stderr\n")
print("home", os.environ["HOME"], "user", os.environ["USER"], flush=True)
pathlib.Path("ready-" + sys.argv[1]).write_text(str(os.getpid()))
while not os.path.exists("end-" + sys.argv[1]):
    time.sleep(0.05)
"""
# Tries what a rank of another owner might; prints a line for each thing that it could do, which must be none.
SPY = r"""
import os, pathlib, signal, socket, sys
pid, run, sock, log, secrets, state = sys.argv[1:]

def attempt(what, act):
    try:
        result = act()
    except (OSError, ValueError) as error:
        print("could not", what, type(error).__name__, flush=True)
        return
    print("COULD", what, repr(result)[:200], flush=True)

def connect():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(sock)

attempt("read the environment", lambda: open(f"/proc/{pid}/environ", "rb").read())
attempt("look at its open files", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("list its run directory", lambda: os.listdir(run))
attempt("read its file", lambda: open(f"{run}/mine").read())
attempt("read its assignment", lambda: open(f"{run}/assignment.pb", "rb").read())
attempt("write into its run directory", lambda: open(f"{run}/exit.pb", "wb").write(b"x"))
attempt("connect to its socket", connect)
attempt("read its log", lambda: open(log, "rb").read())
attempt("list the state directory", lambda: os.listdir(state))
attempt("list the attempts", lambda: os.listdir(f"{state}/attempts"))
attempt("read the records", lambda: os.listdir(f"{state}/records"))
attempt("list the secrets", lambda: os.listdir(secrets))
attempt("end its process", lambda: os.kill(int(pid), signal.SIGTERM))
attempt("end its group", lambda: os.killpg(int(pid), signal.SIGKILL))
attempt("become root", lambda: os.setuid(0))
print("asked everything", flush=True)
"""
ENGINE = """\
name: trained
engine:
  model: {{family: gpt2, layers: 1, hidden: 32, heads: 2, vocab: 256, sequence_length: 32}}
  data: {{train: [{{path: {data}}}]}}
  training: {{steps: 6, global_batch: 4, micro_batch: 4, precision: fp32, optimizer: {{adamw: {{lr: 1.0e-3}}}}}}
resources: {{device: cpu, ranks: 1}}
checkpoint: {{path: {directory}/checkpoints, every_steps: 3}}
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def status(pid):
    """/proc/PID/status as a dictionary of words."""
    rows = (line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.split() for name, value in rows}


class JobUser(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-job-user-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.chmod(0o711)
        # Where accounts can reach them, wherever they were built.
        self.bin = self.directory / "bin"
        self.bin.mkdir()
        for name in ("muster-worker", "muster-rank"):
            shutil.copy(f"{BIN}/{name}", self.bin / name)
        self.state = self.directory / "state"
        self.work = {}
        for account in ("muster-alice", "muster-bob"):
            self.work[account] = self.directory / account
            self.work[account].mkdir(mode=0o700)
            os.chown(self.work[account], ACCOUNTS[account], ACCOUNTS[account])
        secrets = self.directory / "secrets"
        secrets.mkdir(mode=0o700)
        (secrets / "token").write_text(SECRET)
        (secrets / "token").chmod(0o400)
        self.map = self.directory / "accounts"
        self.map.write_text(MAP)
        self.map.chmod(0o644)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        self.environment.update(HOME=str(self.directory), MUSTER_TLS_PRETENDED_KEY="of the daemon alone")
        self.port = free_port()
        self.running = []
        self.addCleanup(self.stop)
        self.pki("init", "--host", "localhost")
        self.pki("issue-worker", "w0")
        for user in ("alice", "bob", "carol", "dave", "erin", "frank"):
            self.pki("issue-user", user, "--role", "admin" if user == "alice" else "submitter")
        tls = ("--tls-cert", "pki/coordinator.crt", "--tls-key", "pki/coordinator.key", "--tls-ca", "pki/ca.crt")
        self.start(f"{BIN}/muster-coordinator", "--listen", f"127.0.0.1:{self.port}", "--data-dir", "coordinator", *tls)
        self.daemon = self.start_worker()
        poll("the worker is ready", lambda: self.muster("alice", "get", "workers", check=False).stdout,
                  lambda out: re.search(r"^w0 +ready", out, re.MULTILINE))

    def pki(self, *arguments):
        subprocess.run([f"{BIN}/muster", "admin", "pki", *arguments], cwd=self.directory, check=True, env=self.environment,
                       capture_output=True)

    def start(self, *command, check=True):
        log = open(self.directory / f"{pathlib.Path(command[0]).name}.log", "a", encoding="utf-8")
        process = subprocess.Popen(command, cwd=self.directory, env=self.environment, text=True, stdout=subprocess.PIPE,
                                   stderr=log)
        log.close()
        self.running.append(process)
        line = process.stdout.readline()
        if check:
            self.assertTrue(line, (self.directory / f"{pathlib.Path(command[0]).name}.log").read_text())
        return process

    def start_worker(self, *flags, **options):
        return self.start(str(self.bin / "muster-worker"), "--coordinator", f"localhost:{self.port}", "--name", "w0",
                          "--state-dir", str(self.state), "--slots", "4", "--gpus", "none", "--tls-cert", "pki/worker-w0.crt",
                          "--tls-key", "pki/worker-w0.key", "--tls-ca", "pki/ca.crt", "--secrets",
                          str(self.directory / "secrets"), "--stop-ranks-on-exit", "--job-user", "owner", "--job-user-map",
                          str(self.map), *flags, **options)

    def stop(self):
        for process in reversed(self.running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()

    def muster(self, user, *arguments, check=True, cwd=None):
        pki = self.directory / "pki"
        ran = subprocess.run([f"{BIN}/muster", "--coordinator", f"localhost:{self.port}", "--tls-ca", pki / "ca.crt",
                              "--tls-cert", pki / f"user-{user}.crt", "--tls-key", pki / f"user-{user}.key",
                              *map(str, arguments)], cwd=cwd or self.directory, text=True, capture_output=True,
                             env=self.environment)
        if check:
            self.assertEqual(ran.returncode, 0, f"{arguments}: {ran.stdout}{ran.stderr}")
        return ran

    def submit(self, user, name, command, *, work=None, env=None, extra=""):
        spec = {"name": name, "command": [str(word) for word in command], "env": env or {},
                "resources": {"device": "cpu", "ranks": 1}, "working_directory": str(work or self.work[f"muster-{user}"])}
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps(spec) + extra)
        return self.muster(user, "submit", path)

    def job(self, name, user="alice"):
        job = json.loads(self.muster(user, "get", "job", name, "-o", "json").stdout)
        job["state"] = job["state"].rsplit("_", 1)[-1].lower()
        return job

    def finished(self, name):
        return poll(f"{name} ends", lambda: self.job(name),
                         lambda job: job["state"] in ("succeeded", "failed", "cancelled"))

    def waiting(self, user, name, env=None):
        """Starts the program above as a job; the pid of the command."""
        self.submit(user, name, [PYTHON, "-c", WAITING, name], env=env)
        ready = self.work[f"muster-{user}"] / f"ready-{name}"

        def look():
            job = self.job(name)
            self.assertNotIn(job["state"], ("failed", "cancelled"), self.muster("alice", "logs", name, check=False).stdout)
            return ready.read_text() if ready.exists() else ""
        return int(poll(f"{name} runs", look, bool))

    def end(self, user, name):
        (self.work[f"muster-{user}"] / f"end-{name}").write_text("")
        self.assertEqual(self.finished(name)["state"], "succeeded")

    def test_ranks_are_their_owners_and_cannot_reach_those_of_others(self):
        alices = self.waiting("alice", "of-alice", env={"TOKEN": "${secret:token}"})
        bobs = self.waiting("bob", "of-bob")
        own = {}
        for pid, account in ((alices, "muster-alice"), (bobs, "muster-bob")):
            for process in (pid, int(status(pid)["PPid"][0])):  # the command, and the rank process above it
                now = status(process)
                self.assertEqual(now["Uid"], [str(ACCOUNTS[account])] * 4)
                self.assertEqual(now["Gid"], [str(ACCOUNTS[account])] * 4)
                self.assertEqual((now["NoNewPrivs"], int(now["CapPrm"][0], 16), int(now["CapEff"][0], 16)), (["1"], 0, 0))
            shim = int(status(int(status(pid)["PPid"][0]))["PPid"][0])
            self.assertEqual(status(shim)["Uid"], ["0"] * 4)
            environment = dict(entry.split("=", 1) for entry in
                               pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)
            self.assertEqual((environment["USER"], environment["HOME"]), (account, f"/home/{account}"))
            self.assertNotIn("MUSTER_TLS_PRETENDED_KEY", environment)
            own[account] = run = pathlib.Path(environment["MUSTER_RUN_DIRECTORY"])
            made = run.stat()
            self.assertEqual((made.st_uid, stat.S_IMODE(made.st_mode)), (ACCOUNTS[account], 0o700))
            sock = self.state / f"users/{ACCOUNTS[account]}/rank.sock"
            self.assertEqual((sock.stat().st_uid, stat.S_IMODE(sock.stat().st_mode)), (ACCOUNTS[account], 0o600))
        self.assertIn(SECRET, pathlib.Path(f"/proc/{alices}/environ").read_text())
        log = next(self.state.glob("attempts/*of-alice*/rank-0/log")) if list(self.state.glob("attempts/*of-alice*")) else \
            next(self.state.glob("attempts/*/rank-0/log"))
        alice = ACCOUNTS["muster-alice"]
        self.submit("bob", "spy", [PYTHON, "-c", SPY, alices, own["muster-alice"], self.state / f"users/{alice}/rank.sock",
                                   log, self.directory / "secrets", self.state])
        self.assertEqual(self.finished("spy")["state"], "succeeded")
        told = self.muster("bob", "logs", "spy").stdout
        self.assertIn("asked everything", told)
        self.assertNotIn("COULD", told)
        self.assertEqual(told.count("could not"), 15, told)
        # Nor by a working directory that is another's, of which nothing is told.
        self.submit("bob", "elsewhere", ["true"], work=self.work["muster-alice"] / "of-nobody")
        self.assertEqual(self.finished("elsewhere")["state"], "failed")
        there = self.muster("bob", "describe", "job", "elsewhere").stdout
        self.submit("bob", "elsewhere-2", ["true"], work=self.directory / "secrets")
        self.assertEqual(self.finished("elsewhere-2")["state"], "failed")
        for one in (there, self.muster("bob", "describe", "job", "elsewhere-2").stdout):
            self.assertRegex(one, "is not a directory on worker w0 that user muster-bob can enter")
        self.end("alice", "of-alice")
        self.end("bob", "of-bob")
        said = self.muster("alice", "logs", "of-alice").stdout
        self.assertIn("through /dev/stderr", said)
        self.assertIn("home /home/muster-alice user muster-alice", said)

    def test_owners_without_an_account_are_refused_by_name(self):
        shared = self.directory / "shared"
        shared.mkdir(mode=0o777)
        for user, says in (("carol", "names no account for carol"), ("dave", "its uid 0 is root's"),
                           ("erin", "account muster-nobody-knows of erin: there is no such account"),
                           ("frank", "its uid 641 is below --job-uid-min 1000")):
            self.submit(user, f"of-{user}", ["true"], work=shared)
            self.assertEqual(self.finished(f"of-{user}")["state"], "failed")
            self.assertIn(says, self.muster("alice", "describe", "job", f"of-{user}").stdout)
        # The map is read again.
        self.map.write_text(MAP + "carol muster-bob\n")
        self.submit("carol", "again", ["true"], work=shared)
        self.assertEqual(self.finished("again")["state"], "succeeded")
        # And not believed when somebody else could have written it.
        self.map.chmod(0o666)
        self.submit("carol", "distrusted", ["true"], work=shared)
        self.assertEqual(self.finished("distrusted")["state"], "failed")
        self.assertIn("somebody else may write it", self.muster("alice", "describe", "job", "distrusted").stdout)

    def test_a_killed_daemon_finds_the_ranks_of_accounts_again(self):
        pid = self.waiting("alice", "long")
        before = self.job("long")
        self.daemon.kill()
        self.daemon.wait(60)
        self.daemon = self.start_worker()
        metrics = poll("the rank is found", lambda: self.muster("alice", "get", "workers").stdout,
                            lambda out: re.search(r"^w0 +ready", out, re.MULTILINE))
        self.assertTrue(metrics)
        after = self.job("long")
        self.assertEqual((after["epoch"], after["attempts"], status(pid)["Uid"][0]), (before["epoch"], 1, "64101"))
        self.end("alice", "long")
        # Nothing of it is left, and the slot is free again.
        self.assertFalse(pathlib.Path(f"/proc/{pid}").exists())
        # And its cancellation reaches processes of the account.
        other = self.waiting("alice", "cancelled")
        self.muster("alice", "cancel", "cancelled")
        self.assertEqual(self.finished("cancelled")["state"], "cancelled")
        poll("its process is gone", lambda: pathlib.Path(f"/proc/{other}").exists(), lambda there: not there)

    def test_links_that_a_rank_plants_lead_the_daemon_nowhere(self):
        hidden = self.directory / "hidden"
        hidden.mkdir(mode=0o700)
        (hidden / "9.pb").write_bytes(b"")
        secret = hidden / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        plant = ("import os, pathlib, shutil\nrun = pathlib.Path(os.environ['MUSTER_RUN_DIRECTORY'])\n"
                 f"for name in ('exit.pb', 'error.json', 'progress.json', 'profile.pb', 'collectives-1.pb', 'own'):\n"
                 f"    (run / name).unlink(missing_ok=True)\n    (run / name).symlink_to('{secret}')\n"
                 f"(run / 'commits').symlink_to('{hidden}')\n(run / 'log').symlink_to('{hidden}')\n"
                 "os.mkfifo(run / 'profile-1-1.json')\nprint('planted')\nraise SystemExit(3)\n")
        self.submit("alice", "planter", [PYTHON, "-c", plant])
        self.assertEqual(self.finished("planter")["state"], "failed")
        told = "".join(self.muster("alice", *command).stdout for command in (
            ("describe", "job", "planter"), ("get", "job", "planter", "-o", "json"), ("events",), ("logs", "planter")))
        self.assertIn("planted", self.muster("alice", "logs", "planter").stdout)
        self.assertIn("status 3", told)
        self.assertNotIn(SECRET, told)
        self.assertEqual(secret.read_text(), SECRET)
        self.assertEqual(secret.stat().st_uid, 0)

    def test_checkpoints_belong_to_the_account(self):
        work = self.work["muster-alice"]
        (self.directory / "text.txt").write_text("the dog ran over the green hill.\n" * 2000)
        subprocess.run([f"{BIN}/muster", "data", "tokenize", "--input", "text.txt", "--output", "tokens", "--tokenizer", "bytes"],
                       cwd=self.directory, check=True, capture_output=True, env=self.environment)
        spec = self.directory / "trained.yaml"
        spec.write_text(ENGINE.format(data=self.directory / "tokens", directory=work))
        self.muster("alice", "submit", spec)
        self.assertEqual(self.finished("trained")["state"], "succeeded")
        files = list((work / "checkpoints").rglob("*"))
        self.assertGreater(len(files), 2)
        self.assertEqual({path.stat().st_uid for path in files}, {ACCOUNTS["muster-alice"]})

    def test_a_daemon_that_may_not_become_another_user_says_so(self):
        self.daemon.send_signal(signal.SIGTERM)
        self.daemon.wait(60)
        ran = subprocess.run(["setpriv", "--reuid", str(ACCOUNTS["muster-bob"]), "--clear-groups", self.bin / "muster-worker",
                              "--coordinator", f"localhost:{self.port}", "--state-dir", self.work["muster-bob"] / "state",
                              "--job-user", "muster-alice"], text=True, capture_output=True, cwd="/", env={"PATH": "/usr/bin"})
        self.assertEqual(ran.returncode, 1)
        self.assertIn("it lacks CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE", ran.stderr)


def main():
    global BIN
    index = sys.argv.index("--bin")
    BIN = os.path.abspath(sys.argv[index + 1])
    if os.geteuid() != 0:
        print("SKIPPED: ranks as other users need root", file=sys.stderr)
        return SKIPPED
    if "MUSTER_TEST_MOUNTS" not in os.environ:
        # Accounts of the test: in a mount namespace of its own, so that the machine gets none.
        here = tempfile.mkdtemp(prefix="muster-accounts-")
        script = ("set -e; "
                  f"cp /etc/passwd {here}/passwd; cp /etc/group {here}/group; "
                  + "".join(f"echo '{name}:x:{uid}:{uid}::/home/{name}:/bin/sh' >>{here}/passwd; "
                            f"echo '{name}:x:{uid}:' >>{here}/group; " for name, uid in ACCOUNTS.items())
                  + f"mount --bind {here}/passwd /etc/passwd; mount --bind {here}/group /etc/group; exec \"$@\"")
        try:
            return subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", sys.executable,
                                   *sys.argv], env={**os.environ, "MUSTER_TEST_MOUNTS": "1"}).returncode
        finally:
            shutil.rmtree(here, ignore_errors=True)
    pwd.getpwnam("muster-alice")
    del sys.argv[index:index + 2]
    program = unittest.main(exit=False, verbosity=2)
    return 0 if program.result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
