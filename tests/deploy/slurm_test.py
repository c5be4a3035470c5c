"""deploy/slurm/muster.sbatch under a real slurmctld and two slurmd on this machine. Skipped (77) without root or
Slurm."""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/deploy"))
from processes import Cluster, poll  # noqa: E402
from slurm_cluster import Slurm  # noqa: E402

BIN = None


SETTINGS = ["KillWait=10", "MinJobAge=300", "JobRequeue=1", "SchedulerParameters=sched_interval=1,bf_interval=1"]


class Sbatch(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="muster-slurm-", ignore_cleanup_errors=True)
        cls.addClassCleanup(directory.cleanup)
        cls.home = pathlib.Path(directory.name)
        cls.slurm = Slurm(cls.home, nodes=2, cpus=2, settings=SETTINGS)
        cls.addClassCleanup(cls.slurm.close)
        poll("nodes are idle", cls.slurm.idle, bool)
        cls.cluster = Cluster(BIN, cls.home)  # its data and specs alone
        cls.cluster.make_data()

    def slurm_job(self, number):
        """scontrol's fields of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm("scontrol", "show", "job", number)))

    def sbatch(self, spec, nodes=2):
        out = self.slurm("sbatch", "--parsable", "-N", nodes, "-o", self.home / "job-%j.out",
                         ROOT / "deploy/slurm/muster.sbatch", spec, MUSTER_BIN=str(pathlib.Path(BIN).resolve()),
                         MUSTER_FLAGS="--gpus none --address 127.0.0.1",
                         MUSTER_SLOTS="1", MUSTER_LEAD_SECONDS="60", TMPDIR=str(self.home))
        return out.strip()

    def output(self, number):
        return (self.home / f"job-{number}.out").read_text()

    def muster(self, number, name):
        state = f"{self.home}/.muster-{number}"
        self.cluster.environment.update({
            "MUSTER_COORDINATOR": f"file:{state}/coordinator/address", "MUSTER_TLS_SERVER_NAME": "localhost",
            "MUSTER_TLS_CA": f"{state}/pki/ca.crt", "MUSTER_TLS_CERT": f"{state}/pki/user-slurm.crt",
            "MUSTER_TLS_KEY": f"{state}/pki/user-slurm.key"})
        return self.cluster.job(name)

    def test_1_job_that_ends_completes_its_allocation(self):
        number = self.sbatch(self.cluster.spec("short", steps=60))
        ended = poll("the allocation ends", lambda: self.slurm_job(number),
                     lambda job: job["JobState"] in ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED"), 120)
        self.assertEqual((ended["JobState"], ended["ExitCode"]), ("COMPLETED", "0:0"), self.output(number))
        self.assertIn("succeeded", self.output(number))

    def test_2_job_that_cannot_run_fails_its_allocation(self):
        spec = self.cluster.spec("wild", steps=1000, lr=1e30)
        number = self.sbatch(spec)
        ended = poll("the allocation ends", lambda: self.slurm_job(number),
                     lambda job: job["JobState"] in ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED"), 120)
        self.assertEqual((ended["JobState"], ended["ExitCode"], ended["Restarts"]), ("FAILED", "1:0", "0"),
                         self.output(number))

    def test_3_signal_before_the_time_limit_saves_requeues_and_goes_on(self):
        number = self.sbatch(self.cluster.spec("long", every=40))
        before = poll("it trains on both nodes", lambda: self.muster(number, "long"),
                      lambda job: job["lastCommittedStep"] > 0, 120)
        self.assertEqual({rank["worker"] for rank in before["ranks"]}, {"n0", "n1"})
        # What --signal=B:USR1@300 and preemption do: the batch script alone gets the signal.
        self.slurm("scancel", "--batch", "--signal=USR1", number)
        requeued = poll("it is in the queue again", lambda: self.slurm_job(number),
                        lambda job: job["JobState"] == "PENDING", 90)
        self.assertEqual(requeued["Restarts"], "1", self.output(number))
        stopped = int(re.search(r"stopping at the checkpoint of step (\d+)", self.output(number)).group(1))
        self.assertGreater(stopped, before["lastCommittedStep"])
        # Slurm holds a requeued job back for two minutes, in which its nodes are cleared and its credential is renewed.
        poll("nodes are idle", self.slurm.idle, bool)
        self.slurm("scontrol", "update", f"JobId={number}", "StartTime=now+3")
        poll("it runs again", lambda: self.slurm_job(number), lambda job: job["JobState"] == "RUNNING", 150)
        after = poll("it goes on", lambda: self.muster(number, "long"),
                     lambda job: job["state"] == "JOB_STATE_RUNNING" and job["attempts"] > before["attempts"]
                     and job["lastCommittedStep"] > stopped, 120)
        self.assertEqual(after["id"], before["id"])
        self.assertEqual(after["failures"], 0, after["causes"])
        self.assertIn("run 2", self.output(number))
        self.slurm("scancel", number)
        # What a user cancels stays so.
        poll("it is gone", lambda: self.slurm_job(number), lambda job: job["JobState"] == "CANCELLED", 60)
        self.assertEqual(self.slurm_job(number)["Restarts"], "1")

    def test_4_allocation_joins_a_coordinator_that_runs(self):
        with Cluster(BIN, self.home / "outside") as outside:
            address = (self.home / "outside/coordinator/address").read_text().strip()
            number = self.slurm("sbatch", "--parsable", "-N", 2, "-o", self.home / "job-%j.out",
                                ROOT / "deploy/slurm/muster.sbatch", MUSTER_BIN=str(pathlib.Path(BIN).resolve()),
                                MUSTER_COORDINATOR=address, MUSTER_FLAGS="--gpus none", MUSTER_SLOTS="1",
                                TMPDIR=str(self.home)).strip()
            workers = poll("workers join", lambda: json.loads(outside.run("get", "workers", "-o", "json").stdout),
                           lambda found: len(found) == 2, 60)
            self.assertEqual([worker["name"] for worker in workers], ["n0", "n1"])
            self.slurm("scancel", "--batch", "--signal=USR1", number)
            ended = poll("it ends", lambda: self.slurm_job(number), lambda job: job["JobState"] != "RUNNING", 60)
            self.assertIn(ended["JobState"], ("COMPLETED", "COMPLETING"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    options, rest = parser.parse_known_args()
    BIN = options.bin
    if os.geteuid() != 0 or not (shutil.which("slurmctld") and shutil.which("slurmd")):
        print("SKIPPED: needs root and Slurm, which ./dev test --deploy installs", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2, failfast=True)
