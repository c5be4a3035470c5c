"""recorded_scrapes.py on made-up recordings: complete ones pass, what is left out is named, folders that are not as they
should be are refused by name. Skipped (77) without prometheus."""

import io
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/deploy"))
import recorded_scrapes  # noqa: E402
from processes import fetch  # noqa: E402

METRICS = sorted({metric for _, expr, _ in recorded_scrapes.wanted() for metric in re.findall(r"\bmuster_worker_gpu_\w+", expr)})


class RecordedScrapes(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="muster-recorded-test-")
        self.addCleanup(directory.cleanup)
        self.folder = pathlib.Path(directory.name)

    def record(self, name, count=4, without=()):
        for number in range(count):
            self.folder.joinpath(f"{name}.{number}.prom").write_text("".join(
                f'{metric}{{gpu="G{gpu}",kind="k",reason="r",xid="79"}} {1 + 2 * number}\n'
                for metric in METRICS if metric not in without for gpu in (0, 1)))

    def check(self, **more):
        out = io.StringIO()
        return recorded_scrapes.check(self.folder, out=out, **more), out.getvalue()

    def test_complete_recordings_return_data_everywhere(self):
        self.record("worker-gpu-1.example.org")
        self.record("worker-w2")
        self.folder.joinpath("coordinator-head.0.prom").write_text("muster_coordinator_leader_term 1\n")
        self.folder.joinpath("coordinator-head.1.prom").write_text("muster_coordinator_leader_term 1\n")
        self.folder.joinpath("rank-w2@0.0.prom").write_text('muster_rank_gradient_norm{job_name="j",rank="0"} 1\n')
        self.folder.joinpath("rank-w2@0.1.prom").write_text('muster_rank_gradient_norm{job_name="j",rank="0"} 2\n')
        code, said = self.check(faults_too=True)
        self.assertEqual(code, 0, said)
        self.assertIn("12 recordings of 4 targets", said)
        self.assertEqual(len(re.findall(r"^data ", said, re.MULTILINE)), len(list(recorded_scrapes.wanted())), said)
        self.assertIn("worker: Power: ", said)

    def test_what_returns_nothing_is_named(self):
        self.record("worker-w1", without=["muster_worker_gpu_power_watts"])
        code, said = self.check()
        self.assertEqual(code, 1)
        self.assertEqual(re.findall(r"^EMPTY +(.*)$", said, re.MULTILINE), ["worker: Power: {{worker}} {{gpu}}"])

    def test_sound_gpus_have_no_faults_to_show(self):
        self.record("worker-w1", without=["muster_worker_gpu_errors_total"])
        code, said = self.check()
        self.assertEqual(code, 0, said)
        self.assertIn("none, a fault would show  worker: Errors of the driver", said)
        self.assertIn("none, a fault would show  rules: muster_worker_gpu_errors_total", said)
        self.assertEqual(self.check(faults_too=True)[0], 1)

    def test_a_target_moves_on_with_each_scrape_and_stays_at_the_last(self):
        target = recorded_scrapes.Target(("worker", "w1", None), ["a 1\n", "a 2\n"])
        self.addCleanup(target.close)
        address = target.config["targets"][0]
        self.assertEqual([fetch(f"http://{address}/metrics") for _ in range(3)], ["a 1\n", "a 2\n", "a 2\n"])
        self.assertEqual(target.config["labels"], {"cluster": "recorded", "component": "worker", "worker": "w1"})

    def test_folders_that_are_not_as_they_should_be_are_refused_by_name(self):
        def refused():
            ran = subprocess.run([sys.executable, ROOT / "tests/deploy/recorded_scrapes.py", self.folder], capture_output=True,
                                 text=True)
            self.assertEqual((ran.returncode, ran.stdout), (2, ""))
            return ran.stderr
        self.assertIn("has no recording", refused())
        page = self.folder / "worker-w1.0.prom"
        page.write_text("a 1\n")
        self.assertIn("worker-w1 was recorded once", refused())
        self.folder.joinpath("worker-w1.2.prom").write_text("a 1\n")
        self.assertIn("worker-w1.1.prom is missing", refused())
        for name in ("rank-w1.0.prom", "worker-w1@0.0.prom", "notes.txt", "daemon-w1.0.prom"):
            wrong = self.folder / name
            wrong.write_text("a 1\n")
            self.assertIn(f"{name} is not named as", refused())
            wrong.unlink()


if __name__ == "__main__":
    if not shutil.which("prometheus"):
        print("SKIPPED: prometheus is not installed; ./dev test --deploy installs it", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=sys.argv[:1], verbosity=2)
