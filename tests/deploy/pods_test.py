"""The chart as pods, under podman: images are built, the chart is rendered by Helm's library, and its StatefulSets run
as the pods that a cluster would make of them, with this test in the place of the kubelet. Skipped (77) without root,
podman or a Python with Helm's library (./dev test --deploy has all three)."""

import argparse
import copy
import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/deploy"))
from processes import Cluster, fetch, poll  # noqa: E402

BIN = PYTHON = None
CONTAINERS = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4000:4000"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
[network]
network_backend = "netavark"
"""
UID = 7600
NAMESPACE = "muster"


class Podman:
    """Podman with storage and networks of its own."""

    def __init__(self, home):
        self.home = pathlib.Path(home)
        (self.home / "containers.conf").write_text(
            CONTAINERS + f'network_config_dir = "{self.home}/networks"\n')
        tools = self.home / "bin"
        tools.mkdir()
        # Also for build.sh, which calls podman by its name.
        wrapper = tools / "podman"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("podman")} --root {self.home}/storage '
                           f'--runroot {self.home}/run "$@"\n')
        wrapper.chmod(0o755)
        self.environment = {**os.environ, "CONTAINERS_CONF": str(self.home / "containers.conf"),
                            "PATH": f"{tools}:{os.environ['PATH']}"}
        self.network = f"muster-{os.getpid()}"
        self("network", "create", self.network)

    def __call__(self, *arguments, check=True, **options):
        result = subprocess.run(["podman", *map(str, arguments)], env=self.environment, capture_output=True, text=True,
                                **options)
        if check and result.returncode:
            raise RuntimeError(f"podman {' '.join(map(str, arguments))}: {result.stdout}{result.stderr}")
        return result.stdout.strip()

    def close(self):
        self("pod", "rm", "-fa", "-t", "1", check=False)
        self("rm", "-fa", "-t", "1", check=False)
        self("network", "rm", "-f", self.network, check=False)
        self("system", "reset", "-f", check=False)

    def address(self, pod):
        infra = json.loads(self("pod", "inspect", pod))["InfraContainerID"]
        networks = json.loads(self("inspect", infra))[0]["NetworkSettings"]["Networks"]
        return networks[self.network]["IPAddress"]

    def container(self, pod):
        """The first container of the pod that is not its pause container."""
        for one in json.loads(self("pod", "inspect", pod))["Containers"]:
            state = json.loads(self("inspect", one["Id"]))[0]
            if not state.get("IsInfra"):
                return state
        raise RuntimeError(f"pod {pod} has no container")


def owned(path, group_writable=True):
    """A directory as the kubelet makes it for fsGroup."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, 0, UID)
    path.chmod(0o2775 if group_writable else 0o755)
    return path


class Kubelet:
    """Makes pods of rendered objects and keeps their volumes."""

    def __init__(self, podman, home, objects):
        self.podman = podman
        self.home = pathlib.Path(home)
        self.objects = {(item["kind"], item["metadata"]["name"]): item for item in objects}

    def translate(self, name, template, claims=()):
        """What `podman play kube` takes: no probes, ports or scheduling, and fields and volumes resolved."""
        spec = copy.deepcopy(template["spec"])
        for key in ("affinity", "tolerations", "topologySpreadConstraints", "serviceAccountName", "enableServiceLinks",
                    "automountServiceAccountToken", "priorityClassName", "terminationGracePeriodSeconds"):
            spec.pop(key, None)
        spec["restartPolicy"] = "Never"
        fields = {"metadata.name": name, "metadata.uid": f"uid-of-{name}", "spec.nodeName": "node-1"}
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for claim in claims:
            volumes[claim] = {"name": claim, "hostPath": {"path": str(owned(self.home / "claims" / f"{claim}-{name}"))}}
        for volume in volumes.values():
            if "emptyDir" in volume:
                medium = pathlib.Path("/dev/shm") if volume["emptyDir"].get("medium") == "Memory" else self.home
                path = medium / f"muster-test-{os.getpid()}" / name / volume["name"]
                shutil.rmtree(path, ignore_errors=True)  # gone with the pod before
                volume.pop("emptyDir")
                volume["hostPath"] = {"path": str(owned(path))}
            elif "configMap" in volume:
                path = self.home / "maps" / name / volume["name"]
                path.mkdir(parents=True, exist_ok=True)
                for key, text in self.objects["ConfigMap", volume.pop("configMap")["name"]]["data"].items():
                    (path / key).write_text(text)
                volume["hostPath"] = {"path": str(path)}
        spec["volumes"] = list(volumes.values())
        for container in spec["containers"]:
            for key in ("startupProbe", "livenessProbe", "readinessProbe", "ports", "resources"):
                container.pop(key, None)
            values = {}
            for variable in container.get("env", []):
                if "valueFrom" in variable:
                    variable["value"] = fields[variable.pop("valueFrom")["fieldRef"]["fieldPath"]]
                values[variable["name"]] = variable["value"]
            for index, argument in enumerate(container["args"]):
                for key, value in values.items():
                    argument = argument.replace(f"$({key})", value)
                container["args"][index] = argument
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": template["metadata"]["labels"]},
                "spec": spec}

    def start(self, name, template, claims=(), alias=None):
        file = self.home / f"{name}.yaml"
        file.write_text(json.dumps(self.translate(name, template, claims)))
        network = self.podman.network + (f":alias={alias}" if alias else "")
        self.podman("play", "kube", "--network", network, file)

    def start_member(self, stateful_set, ordinal, alias=None):
        item = self.objects["StatefulSet", stateful_set]
        claims = [claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])]
        self.start(f"{stateful_set}-{ordinal}", item["spec"]["template"], claims, alias)

    def delete(self, name, grace):
        """As the kubelet does it; the seconds that the pod took."""
        start = time.monotonic()
        self.podman("pod", "stop", "-t", grace, name)
        seconds = time.monotonic() - start
        self.podman("pod", "rm", "-f", name)
        return seconds


class Pods(Cluster):
    """The cluster in pods, driven by the CLI on this machine."""

    def __init__(self, binaries, directory, podman):
        super().__init__(binaries, directory)
        self.podman = podman

    def run(self, *arguments, check=True):
        if arguments[0] != "data":
            self.environment["MUSTER_COORDINATOR"] = f"{self.podman.address('muster-coordinator-0')}:7600"
        return super().run(*arguments, check=check)


class Chart(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="muster-pods-")
        cls.addClassCleanup(directory.cleanup)
        cls.home = pathlib.Path(directory.name)
        cls.home.chmod(0o755)
        cls.podman = Podman(cls.home)
        cls.addClassCleanup(cls.podman.close)
        cls.addClassCleanup(lambda: shutil.rmtree(f"/dev/shm/muster-test-{os.getpid()}", ignore_errors=True))
        package = cls.home / "package"
        shell = dict(check=True, env=cls.podman.environment, stdout=subprocess.DEVNULL)
        subprocess.run([ROOT / "dev", "stage", BIN, package], cwd=ROOT, **shell)
        subprocess.run([ROOT / "deploy/images/base.sh", cls.home / "base.tar"], **shell)
        cls.podman("import", "-q", cls.home / "base.tar", "localhost/muster-base")
        subprocess.run([ROOT / "deploy/images/build.sh", "--package", package, "--base", "localhost/muster-base"],
                       **shell)
        cls.shared = owned(cls.home / "shared")
        values = {"storage": {"volumes": {"shared": {"mountPath": str(cls.shared), "hostPath": str(cls.shared)}}},
                  "workers": {"cpu": {"replicas": 3}}, "clusterId": "podman"}
        (cls.home / "values.json").write_text(json.dumps(values))
        script = "import sys, json; sys.path.insert(0, sys.argv[1]); import chart; " \
                 "print(json.dumps(chart.render(json.load(open(sys.argv[2])))))"
        rendered = subprocess.run([PYTHON, "-B", "-c", script, ROOT / "tests/deploy", cls.home / "values.json"],
                                  check=True, capture_output=True, text=True).stdout
        cls.kubelet = Kubelet(cls.podman, cls.home, json.loads(rendered))
        start = time.monotonic()
        cls.start_coordinator()
        for ordinal in range(3):
            cls.kubelet.start_member("muster-worker-cpu", ordinal)
        test = cls.kubelet.objects["Pod", "muster-test"]
        cls.kubelet.start("muster-test", {"metadata": test["metadata"], "spec": test["spec"]})
        state = poll("helm test ends", lambda: cls.podman.container("muster-test"),
                     lambda found: found["State"]["Status"] == "exited", 120)
        cls.first_job_seconds = time.monotonic() - start
        cls.test_status = state["State"]["ExitCode"]
        cls.test_log = cls.podman("logs", state["Id"])
        cls.cluster = Pods(BIN, cls.shared, cls.podman)
        cls.cluster.make_data()
        owned(cls.shared / "checkpoints")
        for path in cls.shared.rglob("*"):
            os.chown(path, UID, UID)

    @classmethod
    def start_coordinator(cls):
        cls.kubelet.start_member("muster-coordinator", 0, alias=f"muster-coordinator.{NAMESPACE}.svc")
        poll("the coordinator is ready", lambda: cls.probe("muster-coordinator-0", 9070, "readyz"))

    @classmethod
    def probe(cls, pod, port, path):
        return fetch(f"http://{cls.podman.address(pod)}:{port}/{path}") == "ok\n"

    def test_1_helm_test_trains_a_job(self):
        self.assertEqual(self.test_status, 0, self.test_log)
        print(f"\nfrom images to a finished job by play kube: {self.first_job_seconds:.1f} s", file=sys.stderr)

    def test_2_probes_answer_and_the_processes_have_no_rights(self):
        for pod, port in (("muster-coordinator-0", 9070), ("muster-worker-cpu-0", 9071)):
            for probe in ("livez", "readyz", "startupz"):
                poll(f"{pod} {probe}", lambda: self.probe(pod, port, probe))
            pid = self.podman.container(pod)["State"]["Pid"]
            status = dict(line.split(":\t", 1) for line in
                          pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
            self.assertEqual(status["Uid"].split()[1], str(UID))
            self.assertEqual(int(status["CapEff"], 16), 0)
            self.assertEqual(status["NoNewPrivs"], "1")
            root = [line.split() for line in pathlib.Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
                    if line.split()[4] == "/"][0]
            self.assertIn("ro", root[5].split(","))

    def test_3_images_have_no_shell_no_setuid_and_labels(self):
        for image, size in (("coordinator", 80), ("worker", 120)):
            name = f"localhost/muster-{image}:0.1.0"
            found = json.loads(self.podman("image", "inspect", name))[0]
            self.assertEqual(found["Config"]["User"], f"{UID}:{UID}")
            self.assertLess(found["Size"], size << 20)
            print(f"\n{name}: {found['Size'] / 1e6:.0f} MB", file=sys.stderr)
            for label in ("title", "version", "revision", "licenses"):
                self.assertTrue(found["Labels"][f"org.opencontainers.image.{label}"])
            self.assertTrue(found["HealthCheck" if "HealthCheck" in found else "Healthcheck"] if image == "coordinator"
                            else True)
            mounted = pathlib.Path(self.podman("image", "mount", name))
            programs = [path for path in mounted.rglob("*") if path.is_file() and not path.is_symlink()]
            self.assertEqual([p for p in programs if p.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)], [])
            self.assertEqual([p for p in programs if p.name in ("sh", "bash", "busybox", "dash")], [])
            self.podman("image", "unmount", name)

    def test_4_coordinator_pod_deleted_ten_times_costs_no_step(self):
        self.cluster.run("submit", self.cluster.spec("gpt", every=50))
        before = self.cluster.wait_for("gpt", "trains", lambda job: job["step"] > 20)
        slowest = 0
        for _ in range(10):
            step = self.cluster.job("gpt")["step"]
            slowest = max(slowest, self.kubelet.delete("muster-coordinator-0", 60))
            self.start_coordinator()
            after = self.cluster.wait_for("gpt", "goes on", lambda job: job["step"] > step)
            self.assertEqual(after["attempts"], before["attempts"])
            self.assertEqual(after.get("causes", []), [])
        self.assertLess(slowest, 10, "SIGTERM ends the coordinator promptly")
        print(f"\n10 deletions: {after['step'] - before['step']} steps went on, 0 attempts, slowest stop {slowest:.1f} s",
              file=sys.stderr)

    def test_5_daemon_that_is_killed_in_its_container_costs_no_step(self):
        job = self.cluster.job("gpt")
        pod = job["ranks"][0]["worker"]
        pid1 = self.podman.container(pod)["State"]["Pid"]
        children = pathlib.Path(f"/proc/{pid1}/task/{pid1}/children").read_text().split()
        daemon = [child for child in children
                  if b"--state-dir" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
                  and b"shim" not in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1]]
        self.assertEqual(len(daemon), 1, children)
        os.kill(int(daemon[0]), signal.SIGKILL)
        poll("the daemon is back", lambda: self.probe(pod, 9071, "readyz"))
        after = self.cluster.wait_for("gpt", "goes on", lambda now: now["step"] > job["step"] + 20)
        self.assertEqual(after["attempts"], job["attempts"])
        self.assertEqual(self.podman.container(pod)["State"]["Pid"], pid1)

    def test_6_worker_pod_that_is_deleted_has_its_ranks_restarted_elsewhere(self):
        job = self.cluster.wait_for("gpt", "has a checkpoint", lambda job: job["lastCommittedStep"] > 0)
        pod = job["ranks"][0]["worker"]
        seconds = self.kubelet.delete(pod, 90)
        self.assertLess(seconds, 60)
        after = self.cluster.wait_for("gpt", "trains elsewhere", lambda now: now["attempts"] > job["attempts"] and
                                      now["state"] == "JOB_STATE_RUNNING" and now["step"] > job["step"], 120)
        self.assertNotIn(pod, [rank["worker"] for rank in after["ranks"]])
        self.assertFalse(after["causes"][-1]["counted"], after["causes"])
        # Another pod of the name, with an empty state, joins.
        self.kubelet.start_member("muster-worker-cpu", int(pod.rsplit("-", 1)[1]))
        poll("the new pod joins", lambda: self.probe(pod, 9071, "readyz"), seconds=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--python", default=str(ROOT / ".cache/deploy-python/bin/python"))
    options, rest = parser.parse_known_args()
    BIN, PYTHON = options.bin, options.python
    if os.geteuid() != 0 or not shutil.which("podman") or not os.access(PYTHON, os.X_OK):
        print("SKIPPED: needs root, podman and ./dev test --deploy, which installs what is missing", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2, failfast=True)
