"""The Debian packages in a clean Debian 12 root: installed, started with the flags of their units, a job trained, upgraded
over an edited configuration file, removed and purged without a trace. Units are checked by systemd-analyze where the
root has it. Skipped (77) without root, debootstrap and chroot."""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/deploy"))
from processes import Process, poll  # noqa: E402

BIN = None
PACKAGES = ("muster", "muster-coordinator", "muster-worker")
JOB = """
name: first
engine:
  model: {family: gpt2, layers: 1, hidden: 32, heads: 2, vocab: 256, sequence_length: 32}
  data: {train: [{path: /usr/lib/muster/share/test/tokens}]}
  training: {steps: 20, global_batch: 8, micro_batch: 4, precision: fp32, optimizer: {adamw: {lr: 1.0e-3}}}
  parallel: {data: 2}
resources: {device: cpu, ranks: 2, threads_per_rank: 1}
"""


class Debian(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="muster-debian-")
        cls.addClassCleanup(directory.cleanup)
        cls.home = pathlib.Path(directory.name)
        cls.root = cls.home / "root"
        quiet = dict(check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        subprocess.run(["debootstrap", "--variant=minbase", "--include=adduser,systemd,logrotate", "bookworm", cls.root], **quiet)
        cls.mount("proc", "proc", "-t")
        cls.mount("/dev", "dev", "--bind")
        subprocess.run([ROOT / "dev", "stage", BIN, cls.home / "stage"], **quiet)
        subprocess.run([ROOT / "dev", "debian", cls.home / "stage", cls.root / "packages"], **quiet)

    @classmethod
    def mount(cls, what, where, how):
        arguments = [how, what, what] if how == "-t" else [how, what]
        subprocess.run(["mount", *arguments, cls.root / where], check=True)
        cls.addClassCleanup(lambda: subprocess.run(["umount", "-l", cls.root / where], check=True))

    def inside(self, *command, check=True):
        result = subprocess.run(["chroot", self.root, *command], capture_output=True, text=True,
                                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"})
        if check and result.returncode:
            raise RuntimeError(f"{command}: {result.stdout}{result.stderr}")
        return result.stdout + result.stderr

    def files(self):
        return [f"/packages/{path.name}" for path in sorted((self.root / "packages").glob("*.deb"))]

    def unit(self, service):
        """The command and user of a unit, with its environment file applied as systemd does."""
        text = (self.root / f"lib/systemd/system/{service}.service").read_text()
        field = lambda name: re.search(rf"^{name}=-?(.*)$", text, re.MULTILINE).group(1)  # noqa: E731
        variables = dict(re.findall(r'^(\w+)="(.*)"$', (self.root / field("EnvironmentFile").lstrip("/")).read_text(),
                                    re.MULTILINE))
        words = []
        for word in field("ExecStart").split():
            words += variables[word[1:]].split() if word.startswith("$") else [word]
        return words, field("User")

    def start(self, service):
        words, user = self.unit(service)
        process = Process(["chroot", f"--userspec={user}:{user}", self.root, *words], self.home / f"{service}.log",
                          stdout=subprocess.PIPE)
        self.addCleanup(process.stop)
        process.ready = json.loads(process.process.stdout.readline())
        return process

    def edit(self, name, old, new):
        path = self.root / "etc/muster" / name
        path.write_text(path.read_text().replace(old, new))

    def test_1_fresh_machine_to_a_finished_job(self):
        start = time.monotonic()
        self.inside("dpkg", "-i", *self.files())
        for package in PACKAGES:
            self.assertIn("install ok installed", self.inside("dpkg-query", "-W", "-f", "${Status}", package))
        for folder in ("var/lib/muster", "var/lib/muster-worker"):
            found = (self.root / folder).stat()
            self.assertEqual(oct(found.st_mode & 0o777), "0o750")
            self.assertGreater(found.st_uid, 0)
        # The test's ports are those that the system picks; the rest of the units is as shipped.
        self.edit("coordinator.env", "--listen 127.0.0.1:7600 --metrics 127.0.0.1:9070",
                  "--listen 127.0.0.1:0 --metrics 127.0.0.1:0")
        coordinator = self.start("muster-coordinator")
        self.edit("worker.env", "--coordinator 127.0.0.1:7600 --slots 1 --metrics 127.0.0.1:9071",
                  f"--coordinator {coordinator.ready['address']} --slots 2 --gpus none --metrics 127.0.0.1:0")
        self.start("muster-worker")
        (self.root / "job.yaml").write_text(JOB)
        out = self.inside("muster", "--coordinator", coordinator.ready["address"], "submit", "/job.yaml", "--watch")
        self.assertIn("succeeded", out)
        print(f"\nfrom packages to a finished job: {time.monotonic() - start:.1f} s", file=sys.stderr)

    def test_2_units_are_sound(self):
        for service in PACKAGES[1:]:
            said = self.inside("systemd-analyze", "verify", f"/lib/systemd/system/{service}.service", check=False)
            # Man pages and units of the base system are not what this is about.
            self.assertEqual([line for line in said.splitlines() if service in line], [], said)
        text = (self.root / "lib/systemd/system/muster-worker.service").read_text()
        self.assertIn("KillMode=process", text)

    def test_3_upgrade_keeps_what_the_operator_wrote(self):
        before = (self.root / "etc/muster/worker.env").read_text()
        self.inside("dpkg", "-i", "--force-confold", *self.files())
        self.assertEqual((self.root / "etc/muster/worker.env").read_text(), before)
        self.assertIn("/etc/muster/worker.env", self.inside("dpkg-query", "-W", "-f", "${Conffiles}", "muster-worker"))

    def test_4_logs_that_are_files_rotate_under_the_running_service(self):
        for service in PACKAGES[1:]:
            unit = (self.root / f"usr/share/doc/{service}/log-file.conf").read_text()
            path = re.search(r"^StandardError=append:(/.*)$", unit, re.MULTILINE).group(1)
            self.assertIn(f"{path} {{", (self.root / f"etc/logrotate.d/{service}").read_text())
            self.assertIn(f"/etc/logrotate.d/{service}", self.inside("dpkg-query", "-W", "-f", "${Conffiles}", service))
        log = self.root / "var/log/muster/coordinator.log"
        self.assertEqual(oct(log.parent.stat().st_mode & 0o777), "0o750")
        words, user = self.unit("muster-coordinator")
        # As root and for appending, as systemd opens it.
        with open(log, "ab") as out:
            service = subprocess.Popen(["chroot", f"--userspec={user}:{user}", self.root, *words, "--log-level", "debug"],
                                       stdout=subprocess.PIPE, stderr=out)
        self.addCleanup(service.wait)
        self.addCleanup(service.terminate)
        self.addCleanup(service.stdout.close)
        address = json.loads(service.stdout.readline())["address"]
        poll("the log has lines", log.read_text, lambda text: "\n" in text)
        before = log.read_text().splitlines()
        for rotation in (1, 2):
            # What is refused is a line of the level debug.
            self.inside("muster", "--coordinator", address, "get", "job", f"absent-{rotation}", check=False)
            poll("the refused call is in the log", log.read_text, lambda text: f"absent-{rotation}" in text)
            self.inside("logrotate", "-f", "/etc/logrotate.d/muster-coordinator")
            self.assertNotIn(before[0], log.read_text())
        names = sorted(path.name for path in log.parent.iterdir())
        self.assertEqual(names, ["coordinator.log", "coordinator.log.1", "coordinator.log.2.gz"])
        # No hole where the file was emptied: lines begin at its start again.
        self.assertTrue((log.parent / "coordinator.log.1").read_text().startswith("{"))
        self.assertEqual(service.poll(), None)

    def test_5_purge_leaves_nothing(self):
        self.inside("dpkg", "-r", "muster-worker", "muster-coordinator", "muster")
        self.assertTrue(list((self.root / "var/lib/muster").iterdir()), "what is removed and not purged keeps its state")
        self.inside("dpkg", "-P", *reversed(PACKAGES))
        left = [str(path) for pattern in ("etc/muster*", "var/lib/muster*", "usr/lib/muster*", "usr/bin/muster*", "var/log/muster*",
                                          "etc/logrotate.d/muster*", "usr/share/doc/muster*",
                                          "lib/systemd/system/muster*") for path in self.root.glob(pattern)]
        self.assertEqual(left, [])
        self.assertNotIn("muster:", (self.root / "etc/passwd").read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    options, rest = parser.parse_known_args()
    BIN = options.bin
    if os.geteuid() != 0 or not shutil.which("debootstrap") or not shutil.which("cpack"):
        print("SKIPPED: needs root and debootstrap, which ./dev test --deploy installs", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2, failfast=True)
