"""Jobs across hosts as their users meet them: real processes in network namespaces that have
addresses of their own, with a network between them that is cut, slowed down and made lossy.

Skipped, loudly, where namespaces cannot be made. `--long` adds what takes minutes. Waiting is
polling with a deadline; only how long a cut lasts is fixed.
"""

import atexit
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cluster import Cluster, alive, is_final  # noqa: E402
from hosts import HostsCluster  # noqa: E402
from network import Network, why_not  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
BIN = pathlib.Path(sys.argv[sys.argv.index("--bin") + 1]).resolve()
LONG = "--long" in sys.argv
SKIPPED = 77  # ctest's SKIP_RETURN_CODE

# A job that runs long enough for a test to disturb it before its end.
SPEC = """\
name: {name}
engine:
  model: {{family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 256, sequence_length: 64}}
  data:
    train: [{{path: data/kjv.train}}]
    validation: [{{path: data/kjv.validation}}]
  training:
    steps: {steps}
    global_batch: {batch}
    micro_batch: 4
    seed: 7
    optimizer: {{adamw: {{lr: 1.0e-3}}}}
    schedule: {{cosine: {{warmup_steps: 10, min_lr: 1.0e-4}}}}
    evaluate_samples: 64
  parallel: {parallel}
resources: {{device: cpu, ranks: {ranks}, threads_per_rank: 1}}
checkpoint: {{path: checkpoints/{name}, every_steps: 50, keep: 2{checkpoint}}}
restart: {{max_failures: {failures}, backoff: {{initial: 100ms, max: 1s}}}}
"""
# Shortens the jobs of examples/*.yaml.
SHORT = ["--set", "engine.training.steps=20", "--set", "engine.training.evaluate_samples=64",
         "--set", "engine.training.schedule.cosine.warmup_steps=5"]


def long_form(test):
    return unittest.skipUnless(LONG, "takes long: hosts_test.py --long")(test)


@functools.cache
def data_directory():
    """Holds kjv.train and kjv.validation, the King James Bible as bytes."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-hosts-data-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True)
    (directory / "kjv.txt").write_bytes(text.stdout)
    tokenize(directory)
    return directory


def tokenize(directory):
    subprocess.run([BIN / "muster", "data", "tokenize", "--input", directory / "kjv.txt",
                    "--output", directory / "kjv", "--tokenizer", "bytes", "--split",
                    "train=0.9,validation=0.1"], check=True, capture_output=True)


@functools.cache
def one_host():
    """`muster local` with a worker of seven slots: what jobs across hosts are compared with."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-hosts-one-"))
    (directory / "data").symlink_to(data_directory())
    cluster = Cluster(BIN, directory / "home", cwd=directory, workers=1, slots=7)
    cluster.up()

    def end():
        cluster.down()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    return cluster


@functools.cache
def on_one_host(text, *arguments):
    """The job of this spec after it has trained on one host."""
    cluster = one_host()
    path = pathlib.Path(cluster.cwd) / "spec.yaml"
    path.write_text(text)
    name = re.search(r"^name: (\S+)", text, re.M)[1]
    cluster.run("submit", path, *arguments)
    job = cluster.finish(name)
    if job["state"] != "succeeded":
        raise AssertionError(f"on one host: {json.dumps(job, indent=1)}")
    return job


def curve(job):
    return {point["step"]: point["trainLoss"] for point in job["losses"]}


class Scene(unittest.TestCase):
    """A fresh network, cluster and directory per test."""

    names = "hab"  # of hosts; the coordinator is on the first, daemons on the others
    kind = "switch"
    ipv6 = False
    slots = 1
    coordinator_flags = ()
    worker_flags = ()

    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-hosts-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        (self.directory / "data").symlink_to(data_directory())
        self.network = Network(self.names, kind=self.kind, ipv6=self.ipv6)
        self.addCleanup(self.network.close)
        self.cluster = HostsCluster(
            BIN, self.network, self.directory, self.names[0],
            {name: {"slots": self.slots, "flags": list(self.worker_flags)}
             for name in self.names[1:]}, self.coordinator_flags)
        self.addCleanup(self.cluster.down)
        self.addCleanup(self.show_logs, self.troubles())
        self.prepare()
        self.cluster.up()

    def prepare(self):
        """Sets up what differs between hosts; runs before anything is started."""

    def run(self, result=None):
        self.result = result
        return super().run(result)

    def troubles(self):
        return len(self.result.failures) + len(self.result.errors)

    def show_logs(self, before):
        if self.troubles() > before:
            print(self.cluster.logs(), file=sys.stderr)

    def spec(self, name="tiny", steps=400, ranks=2, parallel="{data: 2}", failures=5,
             checkpoint="", batch=8):
        return SPEC.format(name=name, steps=steps, ranks=ranks, parallel=parallel,
                           failures=failures, checkpoint=checkpoint, batch=batch)

    def submit(self, **options):
        self.text = self.spec(**options)
        path = self.directory / "spec.yaml"
        path.write_text(self.text)
        self.cluster.run("submit", path)

    def training(self, step=20):
        """Waits until the job is past the step and returns it."""
        job = self.cluster.wait_for("tiny", f"past step {step}",
                                    lambda job: job["step"] >= step or is_final(job))
        self.assertEqual(job["state"], "running", json.dumps(job["causes"], indent=1))
        return job

    def assert_same(self, job, attempts=1):
        """Checks that the job has ended with the losses that it has on one host."""
        self.assertEqual(job["state"], "succeeded", json.dumps(job["causes"], indent=1))
        if attempts is not None:
            self.assertEqual(job["attempts"], attempts, json.dumps(job["causes"], indent=1))
        expected = on_one_host(self.text)
        self.assertEqual((job["trainLoss"], job["validationLoss"]),
                         (expected["trainLoss"], expected["validationLoss"]))
        here, there = curve(job), curve(expected)
        common = set(here) & set(there)
        self.assertTrue(common)
        self.assertEqual({step: here[step] for step in common},
                         {step: there[step] for step in common})

    def ends(self):
        return self.cluster.job("tiny")["causes"]

    def during(self, seconds, watch):
        """Calls watch() again and again for `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            watch()
            time.sleep(0.1)


class TheNetwork(unittest.TestCase):
    """Tests the harness itself, with plain sockets."""

    def talk(self, network, one, other):
        """Whether a TCP connection from one host to the other carries a message and its echo."""
        host = network[other]
        family = "AF_INET6" if network.ipv6 else "AF_INET"
        server = host.start(
            sys.executable, "-c", f"import socket; s = socket.socket(socket.{family}); "
            f"s.bind(('{host.address}', 0)); s.listen(); s.settimeout(10); "
            "print(s.getsockname()[1], flush=True); c, _ = s.accept(); c.sendall(c.recv(5))",
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            port = server.stdout.readline().strip()
            said = network[one].run(
                sys.executable, "-c", f"import socket; c = socket.create_connection("
                f"('{host.address}', {port}), timeout=0.7); c.sendall(b'hello'); "
                "print(c.recv(5).decode())", check=False)
            return said.stdout.strip() == "hello"
        finally:
            server.kill()
            server.wait()
            server.stdout.close()

    def test_both_kinds_of_link_carry_cut_and_mend_either_way(self):
        for kind, ipv6 in (("switch", False), ("switch", True), ("veth", False), ("veth", True)):
            with self.subTest(kind=kind, ipv6=ipv6), Network("ab", kind=kind, ipv6=ipv6) as network:
                self.assertTrue(self.talk(network, "a", "b"))
                self.assertEqual(network["a"].run("hostname").stdout.strip(), "a")
                for cut in (("a", "b"), ("b", "a")):
                    network.cut(*cut, both=False)
                    self.assertFalse(self.talk(network, "a", "b"))
                    network.mend("a", "b")
                self.assertTrue(self.talk(network, "b", "a"))

    def test_slow_lossy_and_filtered_links_behave_so(self):
        with Network("ab") as network:
            network.shape("a", "b", both=False, delay=0.1)
            started = time.monotonic()
            self.assertTrue(self.talk(network, "a", "b"))
            self.assertGreater(time.monotonic() - started, 0.2, "SYN and message took a delay each")
            network.shape("a", "b", delay=0.0, loss=1.0)
            self.assertFalse(self.talk(network, "a", "b"))
            network.shape("a", "b", loss=0.0)
            network["b"].nft("meta l4proto tcp reject with tcp reset")
            self.assertFalse(self.talk(network, "a", "b"))
            network["b"].clear_nft()
            self.assertTrue(self.talk(network, "a", "b"))

    def test_killed_host_comes_back_under_another_address(self):
        for kind in ("switch", "veth"):
            with self.subTest(kind=kind), Network("ab", kind=kind) as network:
                process = network["b"].start("sleep", "1000")
                network["b"].kill()
                self.assertEqual(process.wait(timeout=10), -9)
                network.plug(network["b"], number=40)
                self.assertEqual(network["b"].address, "10.77.0.40")
                self.assertTrue(self.talk(network, "a", "b"))

    def test_host_sees_other_files_where_they_are_hidden(self):
        with Network("ab") as network, tempfile.TemporaryDirectory() as directory:
            seen, other = pathlib.Path(directory) / "seen", pathlib.Path(directory) / "other 'one'"
            seen.mkdir()
            other.mkdir()
            (seen / "file").write_text("shared")
            network["b"].hidden = {seen: other}
            self.assertEqual(network["a"].run("ls", seen).stdout.strip(), "file")
            self.assertEqual(network["b"].run("ls", seen).stdout.strip(), "")

    def test_nothing_is_left_of_a_test_that_is_killed(self):
        program = ("import sys; sys.path.insert(0, sys.argv[1]); from network import Network; "
                   "n = Network('ab'); p = n['a'].start('sleep', '1000'); "
                   "print(n['a'].namespace, p.pid, flush=True); sys.stdin.read()")
        victim = subprocess.Popen(
            [sys.executable, "-c", program, str(pathlib.Path(__file__).parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            namespace, pid = victim.stdout.readline().split()
        finally:
            victim.kill()
            victim.communicate()
        deadline = time.monotonic() + 20
        while pathlib.Path("/var/run/netns", namespace).exists() or alive(pid):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)


class Layouts(Scene):
    """Three hosts of unlike size, as an operator would set them up."""

    names = "habc"
    worker_flags = ("--rank-ports", "21000-21019", "--metrics", "0.0.0.0:0")

    def prepare(self):
        for host, slots in (("a", 3), ("b", 2), ("c", 2)):
            self.cluster.worker_options[host]["slots"] = slots

    def example(self, name, *settings):
        text = (ROOT / "examples" / f"{name}.yaml").read_text()
        self.cluster.run("submit", ROOT / "examples" / f"{name}.yaml", *SHORT, *settings)
        return text, self.cluster.finish(name)

    def test_examples_train_over_hosts_as_on_one(self):
        text, job = self.example("llama-kjv")
        self.assertEqual(job["state"], "succeeded", job["causes"])
        self.assertEqual(curve(job), curve(on_one_host(text, *SHORT)))
        alone = on_one_host(text, *SHORT, "--set", "name=alone", "--set", "resources.ranks=1",
                            "--set", "engine.parallel={}") if LONG else None
        if alone:
            for step, loss in curve(alone).items():
                self.assertAlmostEqual(curve(job)[step] / loss, 1, delta=1e-5)
        # Each tensor group is on one host, also on the host that has more slots than it needs.
        workers = [rank["worker"] for rank in job["ranks"]]
        self.assertEqual(workers[0], workers[1])
        self.assertEqual(workers[2], workers[3])
        self.assertNotEqual(workers[0], workers[2])
        self.assert_map_is_shown("llama-kjv", job)

        seven = ["--set", "engine.parallel.data=7", "--set", "resources.ranks=7", "--set",
                 "engine.training.global_batch=28", "--set", "engine.training.micro_batch=4"]
        text, job = self.example("gpt-kjv", *seven)
        self.assertEqual(job["state"], "succeeded", job["causes"])
        self.assertEqual({rank["host"] for rank in job["ranks"]}, set("abc"))
        self.assertEqual(curve(job), curve(on_one_host(text, *SHORT, *seven)))

    def assert_map_is_shown(self, name, job):
        described = self.cluster.run("describe", "job", name).stdout
        for rank in job["ranks"]:
            address = self.network[rank["host"]].address
            self.assertEqual(rank["worker"], f"worker-{rank['host']}")
            self.assertEqual(rank["address"], address)
            self.assertRegex(described, rf"worker-{rank['host']} +{rank['host']} +{address} ")
        shown = self.cluster.run("get", "workers").stdout
        for host in "abc":
            self.assertIn(self.network[host].address, shown)

    def test_every_port_and_address_is_one_that_others_reach(self):
        self.submit(steps=100000, ranks=6, parallel="{data: 6}",
                    batch=24)
        job = self.training(step=1)
        for host in "abc":
            ports = self.network[host].listening("muster-rank")
            self.assertTrue(ports)
            self.assertLessEqual(ports, set(range(21000, 21020)), host)
        workers = self.cluster.json("get", "workers")
        addresses = [worker["metricsAddress"] for worker in workers]
        addresses += [rank["metricsAddress"] for rank in job["ranks"]]
        addresses += [line["metrics"] for line in self.cluster.ready.values()]
        for address in addresses:
            self.assertNotIn("0.0.0.0", address)
            fetched = self.network["h"].run(
                sys.executable, "-c", "import sys, urllib.request as u; print(len("
                "u.urlopen(f'http://{sys.argv[1]}/metrics', timeout=10).read()))", address)
            self.assertGreater(int(fetched.stdout), 100, address)
        self.cluster.run("cancel", "tiny")
        self.assertEqual(self.cluster.finish("tiny")["state"], "cancelled")


class HybridSharding(Scene):
    """Two hosts of two slots: ZeRO-3 shards inside each host, and the hosts hold replicas."""

    slots = 2

    def test_job_trains_as_on_one_host(self):
        self.submit(steps=100, ranks=4, parallel="{data: 4, zero: 3, zero_shards: 2}", batch=16)
        job = self.cluster.finish("tiny")
        self.assert_same(job)
        self.assertEqual([rank["host"] for rank in job["ranks"]], ["a", "a", "b", "b"])


class IPv6Only(Scene):
    ipv6 = True
    worker_flags = ("--rank-ports", "21000-21019", "--metrics", "[::]:0")

    def test_job_trains_as_on_one_host(self):
        self.submit(steps=100)
        job = self.cluster.finish("tiny")
        self.assert_same(job)
        self.assertEqual({rank["address"] for rank in job["ranks"]}, {"fd77::2", "fd77::3"})
        for worker in self.cluster.json("get", "workers"):
            self.assertRegex(worker["metricsAddress"], r"^\[fd77::[23]\]:\d+$")
        self.assertTrue(self.cluster.ready["coordinator"]["address"].startswith("[fd77::1]:"))


class Deaths(Scene):
    names = "habc"
    coordinator_flags = ("--lost-after", "5s")

    def test_coordinator_and_daemons_come_back_to_a_job_that_never_stopped(self):
        self.submit()
        before = self.training()
        self.cluster.kill("coordinator")
        self.cluster.start_coordinator()
        self.training(before["step"] + 30)
        home = before["ranks"][1]["worker"]
        self.cluster.kill(home)
        self.cluster.start_worker(home.removeprefix("worker-"))
        self.assert_same(self.cluster.finish("tiny"))

    def test_job_of_a_lost_host_goes_on_elsewhere_and_the_host_returns_with_another_address(self):
        self.submit()
        before = self.training(step=60)
        lost = before["ranks"][1]["host"]
        spare = (set("abc") - {rank["host"] for rank in before["ranks"]}).pop()
        self.network[lost].kill()
        job = self.cluster.wait_for("tiny", "the next attempt",
                                    lambda j: j["epoch"] > before["epoch"] and j["ranks"])
        self.assertEqual({rank["host"] for rank in job["ranks"]}, set("abc") - {lost})
        job = self.cluster.finish("tiny")
        self.assert_same(job, attempts=2)
        self.assertEqual(job["causes"][0]["cause"], "worker_lost")
        self.assertIn(f"worker-{lost}", job["causes"][0]["message"])
        self.assertFalse(job["causes"][0].get("counted"))
        self.assertIn(spare, {rank["host"] for rank in job["ranks"]})

        self.network.plug(self.network[lost], number=40)
        self.cluster.start_worker(lost)
        path = self.directory / "spec.yaml"
        path.write_text(self.spec(name="three", steps=10, ranks=3, parallel="{data: 3}",
                                  batch=12))
        self.cluster.run("submit", path)
        job = self.cluster.finish("three")
        self.assertEqual(job["state"], "succeeded", job["causes"])
        self.assertIn((lost, "10.77.0.40"),
                      {(rank["host"], rank["address"]) for rank in job["ranks"]})


class Cuts(Scene):
    """The network is cut between the hosts of the ranks; the coordinator reaches both."""

    def cut(self, seconds, parallel="{data: 2}", both=True):
        """Cuts the network during training: the job keeps its losses and its attempt, and goes on
        soon after the cut."""
        self.submit(parallel=parallel)
        self.training()
        for left in (1, 0):
            self.network.cut("a", "b", both=both)
            reached = self.settled()
            seen = []
            self.during(seconds, lambda: seen.append(self.cluster.job("tiny")))
            self.assertEqual({(job["state"], job["epoch"]) for job in seen}, {("running", 1)})
            self.assertEqual(seen[-1]["step"], reached, "the cut was none")
            self.network.mend("a", "b")
            took = self.cluster.step_after("tiny", reached, 15)
            print(f"cut of {seconds} s: next step {took:.2f} s after the link was back",
                  file=sys.stderr)
            # On a busy machine one of the cuts may take longer to get over.
            if took < 2.0:
                break
            self.assertTrue(left, "twice in a row not within 2 s")
        job = self.cluster.finish("tiny")
        self.assert_same(job)
        self.assertEqual(job.get("failures", 0), 0)

    def settled(self):
        """Waits until the job makes no more steps and returns the last one."""
        last = [None]

        def still(job):
            same, last[0] = job["step"] == last[0], job["step"]
            time.sleep(0.7)  # longer than a daemon takes between two reports
            return same

        return self.cluster.wait_for("tiny", "no more steps", still, 30)["step"]

    def test_of_five_seconds_costs_no_attempt(self):
        self.cut(5)

    @long_form
    def test_of_fifteen_seconds_costs_no_attempt(self):
        self.cut(15)

    @long_form
    def test_of_one_direction_costs_no_attempt(self):
        self.cut(6, both=False)

    @long_form
    def test_between_pipeline_stages_costs_no_attempt(self):
        self.cut(6, parallel="{pipeline: 2}")

    @long_form
    def test_of_a_host_from_all_others_costs_no_attempt(self):
        self.submit()
        self.training()
        self.network.isolate("b")
        reached = self.settled()
        self.during(18, lambda: self.assertEqual(self.cluster.job("tiny")["epoch"], 1))
        self.network.rejoin("b")
        took = self.cluster.step_after("tiny", reached, 15)
        print(f"host cut off for 18 s: next step {took:.2f} s after it was back", file=sys.stderr)
        self.assert_same(self.cluster.finish("tiny"))

    @long_form
    def test_rank_that_is_stopped_for_longer_than_a_cut_is_waited_for(self):
        self.submit()
        pid = int(self.training()["ranks"][1]["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            self.during(35, lambda: self.assertEqual(self.cluster.job("tiny")["epoch"], 1))
        finally:
            os.kill(pid, signal.SIGCONT)
        self.assert_same(self.cluster.finish("tiny"))

    @long_form
    def test_of_a_minute_ends_as_network_between_two_workers_and_recovers(self):
        self.submit()
        self.training(step=60)
        self.network.cut("a", "b")
        started = time.monotonic()
        ends = self.cluster.poll("the end of the attempt", self.ends, bool, 60)
        took = time.monotonic() - started
        self.assertGreater(took, 20, "bridged for so long at least")
        self.assertEqual(ends[0]["cause"], "network", ends)
        self.assertEqual(ends[0]["between"], ["worker-a", "worker-b"])
        self.assertFalse(ends[0]["counted"])
        for word in ("worker-a (host a, 10.77.0.2)", "worker-b (host b, 10.77.0.3)"):
            self.assertIn(word, ends[0]["message"])
        self.assertIn("worker-a", self.cluster.run("describe", "job", "tiny").stdout)
        self.during(60 - took, lambda: self.assertFalse(is_final(self.cluster.job("tiny"))))
        self.network.mend("a", "b")
        job = self.cluster.finish("tiny")
        self.assert_same(job, attempts=None)
        self.assertLessEqual({end["cause"] for end in job["causes"]},
                             {"network", "launch", "completed"})
        for end in job["causes"][:-1]:
            self.assertEqual(end["between"], ["worker-a", "worker-b"])

    @long_form
    def test_network_that_loses_five_in_a_hundred_packets_is_only_slower(self):
        self.rough(loss=0.05)

    @long_form
    def test_network_with_delay_is_only_slower(self):
        self.rough(delay=0.1)

    @long_form
    def test_network_that_reorders_is_only_slower(self):
        self.rough(delay=0.002, jitter=0.01)

    def rough(self, **how):
        self.network.shape("a", "b", **how)
        self.submit(steps=40)
        self.assert_same(self.cluster.finish("tiny"))


class Preflight(Scene):
    worker_flags = ("--rank-ports", "21000-21019")

    def assert_told(self, end, *words):
        self.assertEqual(end["cause"], "launch", end)
        self.assertEqual(end["between"], ["worker-a", "worker-b"])
        for word in ("worker-a (host a, ", "worker-b (host b, ", *words):
            self.assertIn(word, end["message"])

    def test_rejected_ports_are_told_and_count_from_the_second_time_on(self):
        self.network["b"].nft("tcp dport 21000-21019 reject with tcp reset")
        self.submit(steps=60)
        ends = self.cluster.poll("two ends", self.ends, lambda ends: len(ends) >= 2, 60)
        for end in ends[:2]:
            self.assert_told(end, "refused", "10.77.0.2", "10.77.0.3", "firewall")
        self.assertEqual([end["counted"] for end in ends[:2]], [False, True])
        shown = self.cluster.run("describe", "job", "tiny").stdout
        self.assertIn("between worker-a (host a, 10.77.0.2) and worker-b", shown)
        self.network["b"].clear_nft()
        self.assert_same(self.cluster.finish("tiny"), attempts=None)

    @long_form
    def test_dropped_ports_are_told_as_a_firewall_and_end_the_job_without_budget(self):
        self.network["b"].nft("tcp dport 21000-21019 drop")
        self.submit(steps=60, failures=0)
        job = self.cluster.finish("tiny", 120)
        self.assertEqual((job["state"], job["attempts"]), ("failed", 2))
        for end in job["causes"]:
            self.assert_told(end, "time out", "firewall", "--rank-ports")

    def test_lost_large_packets_are_told_as_mtu(self):
        # A tunnel with a smaller MTU whose ICMP messages are dropped behaves like this.
        self.network["b"].nft("tcp dport 21000-21019 meta length > 1400 drop")
        self.submit(steps=60)
        end = self.cluster.poll("an end", self.ends, bool, 60)[0]
        self.assert_told(end, "MTU")
        self.network["b"].clear_nft()
        self.assert_same(self.cluster.finish("tiny"), attempts=None)


class WrongInterface(Scene):
    def test_daemon_refuses_one_that_it_does_not_have_and_says_what_there_is(self):
        self.cluster.kill("worker-b")
        with self.assertRaisesRegex(RuntimeError, "eth7.*10.77.0.3"):
            self.cluster.start_worker("b", flags=["--interface", "eth7"])

    def prepare(self):
        host = self.network["b"]
        self.network.second_interface(host, "10.99.0.2/24")
        self.cluster.worker_options["b"]["flags"] = ["--interface", "side0"]

    def test_it_is_told_with_both_hosts_and_the_right_one_mends_it(self):
        self.submit(steps=60)
        end = self.cluster.poll("an end", self.ends, bool, 60)[0]
        self.assertEqual((end["cause"], end["counted"]), ("launch", False))
        self.assertEqual(end["between"], ["worker-a", "worker-b"])
        for word in ("worker-a (host a, 10.77.0.2)", "worker-b (host b, 10.99.0.2)", "--interface"):
            self.assertIn(word, end["message"])
        self.cluster.kill("worker-b")
        self.cluster.start_worker("b", flags=["--interface", "10.77.0.0/24"])
        self.assert_same(self.cluster.finish("tiny"), attempts=None)


class Files(Scene):
    """Hosts that do not see the same files."""

    def hide(self, host, path):
        """Gives the host an empty directory of its own instead of the shared one at `path`."""
        own = self.directory / f"own-{host}-{path}"
        own.mkdir()
        (self.directory / path).mkdir(exist_ok=True)
        self.network[host].hidden[self.directory / path] = own
        return own

    def assert_fails_at_once(self, cause, *words):
        job = self.cluster.finish("tiny")
        self.assertEqual((job["state"], job["attempts"]), ("failed", 1))
        self.assertEqual(job["causes"][0]["cause"], cause, job["causes"])
        for word in words:
            self.assertIn(word, job["message"])


class MissingData(Files):
    def prepare(self):
        self.hide("b", "data")

    def test_worker_without_it_is_named_and_nothing_is_retried(self):
        self.submit(steps=60)
        self.assert_fails_at_once("data", "worker-b", "data/kjv.train")


class OtherData(Files):
    def prepare(self):
        own = self.hide("b", "data")
        shutil.copy(data_directory() / "kjv.txt", own)
        with (own / "kjv.txt").open("a") as file:
            file.write("And so on.\n")
        tokenize(own)

    def test_both_workers_and_the_field_are_named(self):
        self.submit(steps=60)
        self.assert_fails_at_once("data", "engine.data.", "not the same", "worker-a", "worker-b")


class OtherCheckpointDirectory(Files):
    def prepare(self):
        self.hide("b", "checkpoints")

    def test_it_is_refused_before_training(self):
        self.submit(steps=60)
        self.assert_fails_at_once("storage", "checkpoint.path", "worker-a", "worker-b",
                                  "checkpoint.storage")


class LocalCheckpoints(Files):
    names = "habc"
    coordinator_flags = ("--lost-after", "5s")

    def prepare(self):
        self.own = {host: self.hide(host, "checkpoints") for host in "abc"}

    def lose(self, parallel):
        """Submits the job and, once it has checkpoints, kills the host of rank 1."""
        self.submit(parallel=parallel, checkpoint=", storage: local")
        before = self.training(step=120)
        self.assertGreaterEqual(before["lastCommittedStep"], 50)
        for rank in before["ranks"]:
            self.assertTrue(list(self.own[rank["host"]].glob("tiny/*/step-*/manifest.json")),
                            rank["host"])
        lost = before["ranks"][1]["host"]
        self.network[lost].kill()
        return before, lost

    @long_form
    def test_restart_of_a_host_loses_nothing(self):
        # The lost host must be back before the third one can take over.
        self.cluster.kill("worker-c")
        self.cluster.poll("c is away", lambda: self.cluster.json("get", "workers"),
                          lambda workers: any(w["state"] != "ready" for w in workers))
        before, lost = self.lose("{pipeline: 2}")
        self.network.plug(self.network[lost])
        self.cluster.start_worker(lost)
        job = self.cluster.finish("tiny")
        self.assert_same(job, attempts=2)
        self.assertIn("restored step", self.cluster.run("logs", "tiny").stdout)
        self.assertGreaterEqual(job["causes"][0]["step"], before["lastCommittedStep"])

    @long_form
    def test_another_host_has_no_part_of_a_stage_and_the_job_says_so_and_starts_over(self):
        _, lost = self.lose("{pipeline: 2}")
        job = self.cluster.finish("tiny")
        self.assert_same(job, attempts=2)
        self.assertNotIn(lost, {rank["host"] for rank in job["ranks"]})
        log = self.cluster.run("logs", "tiny").stdout
        self.assertIn("cannot be restored here: rank 1 does not find its part", log)
        self.assertIn("the job starts over", log)


class Page(unittest.TestCase):
    """docs/clusters.md, command by command, on two machines with nothing installed."""

    BLOCK = re.compile(r"(?:<!-- (variables|on: [a-z, ]+) -->\n)?```sh\n(.*?)```", re.S)

    def blocks(self):
        for tag, text in self.BLOCK.findall((ROOT / "docs/clusters.md").read_text()):
            self.assertTrue(tag, f"nobody says where this runs:\n{text}")
            yield tag, text

    def package(self, shared):
        """What `./dev package` makes, of these binaries."""
        version = re.search(r"^project\(muster VERSION ([\d.]+)",
                            (ROOT / "CMakeLists.txt").read_text(), re.M)[1]
        name = f"muster-{version}-linux-x86_64"
        stage = self.directory / "stage" / name
        (stage / "bin").mkdir(parents=True)
        for program in ("muster", "muster-coordinator", "muster-worker", "muster-rank"):
            (stage / "bin" / program).symlink_to(BIN / program)
        (stage / "share").mkdir()
        (stage / "share/examples").symlink_to(ROOT / "examples")
        subprocess.run(["tar", "-C", stage.parent, "-I", "zstd -1 -T0", "-chf",
                        shared / f"{name}.tar.zst", name], check=True)
        return name

    def test_its_commands_make_a_cluster_that_trains_across_hosts_behind_a_firewall(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-hosts-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        shared = self.directory / "shared"
        shared.mkdir()
        shutil.copy(data_directory() / "kjv.txt", shared / "text.txt")
        network = Network("ab")
        self.addCleanup(network.close)
        for host in network.hosts.values():
            for path in ("/opt", "/var/lib"):
                host.hidden[path] = self.directory / host.name / path.strip("/")
                host.hidden[path].mkdir(parents=True)
        values = {"A": network["a"].address, "SHARED": shared, "PACKAGE": self.package(shared),
                  "CLUSTER": "10.77.0.0/24"}
        given = set()

        def with_value(match):
            given.add(match[1])
            return f"{match[1]}={values.get(match[1], match[2])}"

        variables, said, hosts = "", "", set()
        for tag, text in self.blocks():
            if tag == "variables":
                variables += re.sub(r"^(\w+)=(\S+).*$", with_value, text, flags=re.M)
                continue
            for host in tag.removeprefix("on: ").split(", "):
                hosts.add(host)
                ran = network[host].run("sh", "-euc", variables + text, check=False,
                                        stdin=subprocess.DEVNULL)
                self.assertEqual(ran.returncode, 0, f"{host}: {text}\n{ran.stdout}\n{ran.stderr}")
                said += ran.stdout
            if "nohup muster-worker" in text:
                self.wait_for_workers(network, variables)
        self.assertEqual(given - {"PATH"}, set(values))
        self.assertEqual(hosts, {"a", "b"})
        # The page shows what `muster describe job` prints for both jobs.
        jobs = {name: json.loads(network["b"].run("sh", "-euc", variables + "muster get job "
                                                  f"{name} -o json").stdout)
                for name in ("gpt-kjv", "behind-firewall")}
        for name, job in jobs.items():
            self.assertEqual((job["state"], job["attempts"]), ("JOB_STATE_SUCCEEDED", 1), name)
            self.assertEqual({rank["host"] for rank in job["ranks"]}, {"a", "b"})
        for host in network.hosts.values():
            self.assertRegex(said, rf"worker-{host.name} +{host.name} +{host.address} ")

    def wait_for_workers(self, network, variables):
        """Asks again and again, as a person would, until the daemons are listed."""
        deadline = time.monotonic() + 30
        while network["a"].run("sh", "-euc", variables + "muster get workers",
                               check=False).stdout.count(" ready ") < 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)


def main():
    reason = why_not()
    if reason:
        print(f"SKIPPED, NOT TESTED: {reason}", file=sys.stderr)
        sys.exit(SKIPPED)
    at = sys.argv.index("--bin")
    del sys.argv[at:at + 2]
    sys.argv = [argument for argument in sys.argv if argument != "--long"]
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
