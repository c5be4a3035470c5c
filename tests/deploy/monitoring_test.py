"""A real Prometheus finds a real cluster through the coordinator's /targets, loads the rules and alerts as they are
shipped (60 times faster), and tells a real Alertmanager. Every query of every panel and rule must return data, and
faults that are made here must raise their alerts and end them once they are mended. Skipped (77) without prometheus
and prometheus-alertmanager."""

import argparse
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/deploy"), str(ROOT / "deploy/grafana")]
import dashboards  # noqa: E402
from processes import Alertmanager, Cluster, Collector, Prometheus, Receiver, fetch, poll  # noqa: E402

BIN = None
# Metrics that only machines with GPUs have, those of clusters with TLS (which tests/e2e/security reads, and
# promtool's cases put through the rules), and those that need what this test does not do.
NEEDS_GPU = re.compile(r"^muster_worker_gpu_")
NEEDS_TLS = re.compile(r"^muster_(coordinator|worker)_certificate_")
NEVER_HERE = {"muster_rank_damaged_checkpoints_total"}


class Monitoring(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="muster-monitoring-")
        home = pathlib.Path(cls.directory.name)
        cls.collector = Collector()
        cls.addClassCleanup(cls.collector.close)
        cls.cluster = Cluster(BIN, home / "cluster", ["--heartbeat-interval", "200ms", "--unreachable-after", "1s", "--lost-after",
                                                      "3s", "--otlp-endpoint", cls.collector.url]).__enter__()
        cls.addClassCleanup(cls.directory.cleanup)
        cls.addClassCleanup(cls.cluster.__exit__)
        for name in ("w1", "w2", "w3"):
            cls.cluster.start_worker(name)
        cls.cluster.make_data()
        cls.receiver = Receiver()
        cls.addClassCleanup(cls.receiver.__exit__)
        cls.alertmanager = Alertmanager(home / "alertmanager", cls.receiver)
        cls.addClassCleanup(cls.alertmanager.stop)
        cls.prometheus = Prometheus(home / "prometheus", cls.cluster.metrics, cls.alertmanager.address)
        cls.addClassCleanup(cls.prometheus.stop)
        cls.cluster.run("submit", cls.cluster.spec("gpt"))
        cls.cluster.wait_for("gpt", "trains", lambda job: job["step"] > 50)

    def kill_rank(self, job, rank=0, with_signal=signal.SIGKILL):
        os.kill(self.cluster.job(job)["ranks"][rank]["pid"], with_signal)

    def test_1_ranks_are_found_without_configuration(self):
        targets = poll("every process is scraped",
                       lambda: self.prometheus.get("targets", state="active")["activeTargets"],
                       lambda found: len(found) == 6 and all(t["health"] == "up" for t in found))
        kinds = sorted(target["labels"]["component"] for target in targets)
        self.assertEqual(kinds, ["coordinator", "rank", "rank", "worker", "worker", "worker"])
        # The label `job` stays Prometheus' own, and nothing collides with it.
        self.assertEqual(self.prometheus.query('{exported_job!=""}'), [])
        self.assertEqual({s["metric"]["job_name"] for s in self.prometheus.query("muster_job_step")}, {"gpt"})

    def test_2_every_query_returns_data(self):
        # Attempts that end, recoveries and refused calls have panels too.
        before = self.cluster.job("gpt")["attempts"]
        self.kill_rank("gpt")
        self.cluster.wait_for("gpt", "trains again", lambda job: job["attempts"] > before and
                              job["state"] == "JOB_STATE_RUNNING" and job["lastCommittedStep"] > 0)
        self.cluster.run("get", "job", "absent", check=False)
        cluster = self.prometheus.query("muster_coordinator_build_info")[0]["metric"]["cluster"]

        def empty():
            missing = []
            for name, title, legend, expr, needs_gpu, _ in dashboards.specs():
                for variable, value in (("$cluster", cluster), ("$job", "gpt"), ("$worker", ".*"),
                                        ("$__rate_interval", "10s"), ("$__range", "2m")):
                    expr = expr.replace(variable, value)
                found = self.prometheus.query(expr)  # raises where Prometheus refuses it
                if not needs_gpu and not found:
                    missing.append(f"{name}: {title}: {legend}: {expr}")
            return missing
        poll("every panel has data", empty, lambda found: not found, 90)

    def test_3_every_rule_is_evaluated_and_knows_its_metrics(self):
        groups = poll("rules are evaluated", lambda: self.prometheus.get("rules")["groups"],
                      lambda groups: all(rule["health"] == "ok" for group in groups for rule in group["rules"]))
        names = set(self.prometheus.get("label/__name__/values"))
        for group in groups:
            for rule in group["rules"]:
                metrics = re.findall(r"\bmuster_\w+", rule["query"])
                if rule["type"] == "recording" and not (metrics and all(map(NEEDS_TLS.match, metrics))):
                    def value(name=rule["name"]):
                        self.cluster.run("get", "jobs")  # rates of calls have values while there are some
                        return self.prometheus.query(name)
                    poll(f"{rule['name']} has data", value, seconds=30)
                for metric in metrics:
                    if not (NEEDS_GPU.match(metric) or NEEDS_TLS.match(metric) or metric in NEVER_HERE):
                        self.assertTrue(metric in names, f"{rule['name']} reads {metric}, which nobody has")

    def test_4_hang_raises_no_progress_and_an_old_checkpoint(self):
        attempts = self.cluster.job("gpt")["attempts"]
        self.kill_rank("gpt", 1, signal.SIGSTOP)
        try:
            self.receiver.wait_for("MusterJobNoProgress", "firing", 40, job_name="gpt", severity="critical")
            self.receiver.wait_for("MusterCheckpointTooOld", "firing", 40, job_name="gpt")
        finally:
            self.kill_rank("gpt", 1, signal.SIGCONT)
        self.receiver.wait_for("MusterJobNoProgress", "resolved", 60, job_name="gpt")
        self.receiver.wait_for("MusterCheckpointTooOld", "resolved", 60, job_name="gpt")
        self.assertEqual(self.cluster.job("gpt")["attempts"], attempts)

    def test_5_restarts_without_a_commit_raise_a_loop_by_cause(self):
        self.cluster.run("submit", self.cluster.spec("loops", every=100000))
        for attempt in range(1, 4):
            self.cluster.wait_for("loops", f"attempt {attempt} trains", lambda job: job["attempts"] == attempt and
                                  job["state"] == "JOB_STATE_RUNNING" and job["step"] > 0)
            self.kill_rank("loops")
        self.receiver.wait_for("MusterJobRestartLoop", "firing", 60, job_name="loops", cause="crash")
        self.assertEqual(self.receiver.alerts("MusterJobRestartLoop", "firing")[0]["labels"]["job_name"], "loops")
        self.cluster.run("cancel", "loops")
        self.receiver.wait_for("MusterJobRestartLoop", "resolved", 60, job_name="loops")

    def test_6_loss_that_is_not_finite_is_told(self):
        self.cluster.run("submit", self.cluster.spec("wild", ranks=1, lr=1e30))
        self.cluster.wait_for("wild", "fails", lambda job: job["state"] == "JOB_STATE_FAILED")
        self.receiver.wait_for("MusterLossNotFinite", "firing", 30, job_name="wild", severity="critical")
        self.receiver.wait_for("MusterJobFailed", "firing", 30, job_name="wild", severity="info")

    def test_7_lost_worker_is_told_until_it_is_removed(self):
        idle = set(self.cluster.members) - {rank["worker"] for rank in self.cluster.job("gpt")["ranks"]}
        worker = sorted(idle)[0]
        self.cluster.stop_worker(worker, signal.SIGKILL)
        self.receiver.wait_for("MusterWorkerLost", "firing", 40, severity="warning")
        # What the runbook says.
        page = (ROOT / "docs/runbooks/MusterWorkerLost.md").read_text()
        command = re.search(r"`muster (admin remove-worker) WORKER`", page).group(1).split()
        self.cluster.run(*command, worker)
        self.receiver.wait_for("MusterWorkerLost", "resolved", 40)

    def test_8_coordinator_that_is_killed_is_told_and_costs_no_attempt(self):
        before = self.cluster.job("gpt")
        self.cluster.coordinator.stop(signal.SIGKILL)
        self.receiver.wait_for("MusterCoordinatorDown", "firing", 40, severity="critical")
        self.cluster.start_coordinator()
        self.assertEqual(fetch(f"http://{self.cluster.metrics}/readyz"), "ok\n")
        self.receiver.wait_for("MusterCoordinatorDown", "resolved", 40)
        after = self.cluster.wait_for("gpt", "goes on", lambda job: job["step"] > before["step"])
        self.assertEqual(after["attempts"], before["attempts"])

    def test_9_watchdog_arrives(self):
        # Prometheus sends what already fires once a minute, should the first time have been too early.
        self.receiver.wait_for("MusterWatchdog", "firing", 90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    options, rest = parser.parse_known_args()
    BIN = options.bin
    if not (shutil.which("prometheus") and shutil.which("prometheus-alertmanager")):
        print("SKIPPED: prometheus and prometheus-alertmanager are not installed; ./dev test --deploy installs them",
              file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2, failfast=True)
