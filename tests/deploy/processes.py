"""Processes of these tests: a Muster cluster whose limits the test chooses, Prometheus, Alertmanager and a receiver of
its notifications. All listen on loopback, on ports that the system picks, and end with their `with` block."""

import contextlib
import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]


def poll(what, read, condition=bool, seconds=60):
    """The first value of read() for which condition holds. Errors of read count as not yet."""
    deadline = time.monotonic() + seconds
    value = error = None
    while time.monotonic() < deadline:
        try:
            value, error = read(), None
            if condition(value):
                return value
        except (OSError, ValueError, KeyError, IndexError, RuntimeError) as failure:
            error = failure
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}; last seen: {value!r} {error or ''}")


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def listening_port(pid):
    """The port on which the process listens; of several the lowest."""
    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(link))
            if match:
                inodes.add(match.group(1))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    return min(ports)


class Process:
    """A program whose stderr goes to a file."""

    def __init__(self, command, log, environment=None, stdout=None):
        self.log = pathlib.Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen([str(part) for part in command], stdout=stdout or out, stderr=out,
                                            env=environment)

    @property
    def pid(self):
        return self.process.pid

    def stop(self, with_signal=signal.SIGTERM, seconds=20):
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


class Cluster:
    """A coordinator and daemons, each with the flags given."""

    def __init__(self, binaries, directory, coordinator_flags=()):
        self.bin = pathlib.Path(binaries).resolve()
        self.directory = pathlib.Path(directory)
        self.coordinator_flags = list(coordinator_flags)
        self.members = {}
        self.coordinator = None
        self.metrics = None
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}
        self.environment["MUSTER_COORDINATOR"] = f"file:{self.directory}/coordinator/address"

    def __enter__(self):
        self.start_coordinator()
        return self

    def __exit__(self, *_):
        for worker in list(self.members):
            self.stop_worker(worker)
        if self.coordinator:
            self.coordinator.stop()

    def start_coordinator(self):
        # The same address for its metrics after a restart, as in a deployment.
        self.coordinator = Process(
            [self.bin / "muster-coordinator", "--listen", "127.0.0.1:0", "--metrics", self.metrics or "127.0.0.1:0",
             "--data-dir", self.directory / "coordinator", *self.coordinator_flags],
            self.directory / "logs/coordinator.log", stdout=subprocess.PIPE)
        self.metrics = json.loads(self.coordinator.process.stdout.readline())["metrics"]

    def start_worker(self, name, slots=2, *flags, environment=None):
        worker = Process(
            [self.bin / "muster-worker", "--coordinator", self.environment["MUSTER_COORDINATOR"], "--name", name,
             "--state-dir", self.directory / name, "--slots", slots, "--gpus", "none", "--metrics", "127.0.0.1:0",
             "--stop-ranks-on-exit", *flags],
            self.directory / f"logs/{name}.log", environment={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE)
        worker.metrics = json.loads(worker.process.stdout.readline())["metrics"]
        self.members[name] = worker

    def stop_worker(self, name, with_signal=signal.SIGTERM):
        self.members.pop(name).stop(with_signal)

    def run(self, *arguments, check=True):
        result = subprocess.run([str(self.bin / "muster"), *map(str, arguments)], env=self.environment,
                                capture_output=True, text=True, cwd=self.directory)
        if check and result.returncode:
            raise RuntimeError(f"muster {' '.join(map(str, arguments))}: {result.stdout}{result.stderr}")
        return result

    def job(self, name):
        return json.loads(self.run("get", "job", name, "-o", "json").stdout)

    def wait_for(self, name, what, condition, seconds=90):
        return poll(f"job {name}: {what}", lambda: self.job(name), condition, seconds)

    def make_data(self, documents=400):
        """A data set of repeated sentences, so that a loss falls."""
        text = self.directory / "text.txt"
        text.write_text("".join(f"the {word} ran over the {other} hill.\n" for word in ("dog", "cat", "fox", "hen")
                                for other in ("green", "far", "old", "low", "next")) * (documents // 20))
        self.run("data", "tokenize", "--input", text, "--output", self.directory / "data", "--documents", "line",
                 "--split", "train=0.9,validation=0.1")

    def spec(self, name, steps=100000, every=20, ranks=2, lr=1e-3, failures=50, evaluate=50):
        """A job that a CPU core does in tens of steps a second."""
        path = self.directory / f"{name}.yaml"
        path.write_text(f"""
name: {name}
engine:
  model: {{family: gpt2, layers: 1, hidden: 32, heads: 2, vocab: 256, sequence_length: 32}}
  data:
    train: [{{path: {self.directory}/data.train}}]
    validation: [{{path: {self.directory}/data.validation}}]
  training:
    steps: {steps}
    global_batch: {4 * ranks}
    micro_batch: 4
    precision: fp32
    optimizer: {{adamw: {{lr: {lr}}}}}
    schedule: {{cosine: {{warmup_steps: 1, min_lr: {lr}}}}}
    evaluate_every: {evaluate}
  parallel: {{data: {ranks}}}
resources: {{device: cpu, ranks: {ranks}, threads_per_rank: 1}}
checkpoint: {{path: {self.directory}/checkpoints, every_steps: {every}, keep: 2}}
restart: {{max_failures: {failures}, backoff: {{initial: 0.1s, max: 0.2s}}}}
""")
        return path


class Receiver:
    """Takes Alertmanager's notifications."""

    def __init__(self):
        self.notified = []
        self.lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.notified += body["alerts"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()

    def alerts(self, name, status):
        with self.lock:
            return [alert for alert in self.notified
                    if alert["labels"]["alertname"] == name and alert["status"] == status]

    def wait_for(self, name, status, seconds=60, **labels):
        def fits(alerts):
            return [a for a in alerts if all(a["labels"].get(k) == v for k, v in labels.items())]
        return fits(poll(f"alert {name} {status} {labels}", lambda: self.alerts(name, status), fits, seconds))[-1]


class Collector:
    """Takes traces, and keeps none of them."""

    def __init__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Alertmanager(Process):
    def __init__(self, directory, receiver):
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = (ROOT / "deploy/prometheus/alertmanager.yml").read_text()
        # The routes as shipped; only where they lead and how long they wait is the test's.
        for name in ("operators", "on-call", "dead-mans-switch"):
            config = config.replace(f"  - name: {name}\n",
                                    f"  - name: {name}\n    webhook_configs: [{{url: '{receiver.url}'}}]\n")
        config = config.replace("group_wait: 30s", "group_wait: 0s").replace("group_interval: 5m",
                                                                             "group_interval: 1s")
        (directory / "alertmanager.yml").write_text(config)
        super().__init__(["prometheus-alertmanager", f"--config.file={directory}/alertmanager.yml",
                          f"--storage.path={directory}/data", "--web.listen-address=127.0.0.1:0",
                          "--cluster.listen-address="], directory / "alertmanager.log")
        self.address = f"127.0.0.1:{poll('Alertmanager listens', lambda: listening_port(self.pid))}"


FACTOR = 60  # how much faster time passes for the rules of a test


def scaled(text):
    """Rules with each duration divided by FACTOR: minutes become seconds."""
    units = {"s": 1, "m": 60, "h": 3600}

    def shorter(match):
        return f"{max(1, int(match.group(1)) * units[match.group(2)] // FACTOR)}s"
    text = re.sub(r"(?<=\[)(\d+)([smh])(?=\])", lambda m: shorter(m), text)
    text = re.sub(r"(?<=offset )(\d+)([smh])\b", lambda m: shorter(m), text)
    text = re.sub(r"(?<=for: )(\d+)([smh])\b", lambda m: shorter(m), text)
    return re.sub(r"\b(\d+) \* 60\b", r"\1", text)  # seconds that are written as minutes


class Prometheus(Process):
    """With the rules as they are shipped, FACTOR times faster; with the shipped configuration, or one of the test's."""

    def __init__(self, directory, coordinator_metrics="", alertmanager="", config=None):
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        source = ROOT / "deploy/prometheus"
        for name in ("rules.yml", "alerts.yml"):
            (directory / name).write_text(scaled((source / name).read_text()))
        if config is None:
            config = (source / "prometheus.yml").read_text()
            config = config.replace("muster-coordinator:9070", coordinator_metrics)
            config = config.replace("alertmanager:9093", alertmanager)
            config = config.replace("_interval: 15s", "_interval: 1s")
        (directory / "prometheus.yml").write_text(config)
        super().__init__(["prometheus", f"--config.file={directory}/prometheus.yml",
                          f"--storage.tsdb.path={directory}/data", "--web.listen-address=127.0.0.1:0"],
                         directory / "prometheus.log")
        self.address = f"127.0.0.1:{poll('Prometheus listens', lambda: listening_port(self.pid))}"
        poll("Prometheus is ready", lambda: fetch(f"http://{self.address}/-/ready"))

    def get(self, path, **parameters):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            answer = json.loads(fetch(url))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {error.read().decode()}") from error
        return answer["data"]

    def query(self, expr):
        return self.get("query", query=expr)["result"]
