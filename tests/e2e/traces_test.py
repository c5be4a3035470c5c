"""A job's trace at a collector of OpenTelemetry, over HTTP and TLS: `muster-coordinator --otlp-endpoint`, with a collector that is
away at first; and what logs say of calls. Waiting is polling with a deadline."""

import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

from waiting import poll

BIN = None

TRAIN = """\
name: train
engine:
  model: {family: gpt2, layers: 1, hidden: 32, heads: 2, vocab: 256, sequence_length: 32}
  data: {train: [{path: data/text.train}], validation: [{path: data/text.validation}]}
  training:
    steps: 2
    global_batch: 2
    micro_batch: 2
    optimizer: {adamw: {lr: 1.0e-3}}
resources: {device: cpu, ranks: 1}
checkpoint: {path: checkpoints/train, every_steps: 2}
"""


class Collector:
    """Takes what is sent to /v1/traces once it is told to; answers with another status before: 503, for the time being."""

    def __init__(self, certificate=None):
        self.spans, self.refused, self.ready, self.status = [], 0, False, 503
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/json":
                    code = 400
                elif not collector.ready:
                    collector.refused += 1
                    code = collector.status
                else:
                    for resource in body["resourceSpans"]:
                        for scope in resource["scopeSpans"]:
                            collector.spans += scope["spans"]
                    code = 200
                self.send_response(code)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass
            def handle(self):
                try:
                    super().handle()
                except (ConnectionError, ssl.SSLError):  # a client that does not trust the certificate
                    pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            # The handshake is the handler's, so that one that fails ends no more than itself.
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Traces(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="muster-traces-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.collector = Collector()
        self.addCleanup(self.collector.close)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        self.environment["HOME"] = str(self.directory)
        self.running = []
        self.addCleanup(self.stop)

    def start(self, *command, **environment):
        self.log = self.directory / f"{len(self.running)}.log"
        with open(self.log, "w") as log:
            process = subprocess.Popen(command, cwd=self.directory, env={**self.environment, **environment}, text=True,
                                       stdout=subprocess.PIPE, stderr=log)
        self.running.append(process)
        return json.loads(process.stdout.readline())

    def coordinate(self, *flags, **environment):
        """Starts a coordinator; its address."""
        data = f"coordinator-{len(self.running)}"
        return self.start(f"{BIN}/muster-coordinator", "--listen", "127.0.0.1:0", "--data-dir", data, *flags,
                          **environment)["address"]

    def muster(self, address, *words, check=True, **environment):
        return subprocess.run([f"{BIN}/muster", "--coordinator", address, *words], cwd=self.directory, check=check, text=True,
                              capture_output=True, env={**self.environment, **environment})

    def run_job(self, address, name):
        """A job that is submitted and cancelled: a whole life, without a worker."""
        spec = self.directory / f"{name}.yaml"
        spec.write_text(f"name: {name}\ncommand: ['true']\nresources: {{device: cpu, ranks: 1}}\n")
        self.muster(address, "submit", spec)
        self.muster(address, "cancel", name)

    def make_certificates(self, names):
        """An authority and a certificate of it for `names`: the authority's file, and certificate and key."""
        if not shutil.which("openssl"):
            self.skipTest("openssl makes the certificates of this test")
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.directory))

        def openssl(*arguments):
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "ca.key", "-out", folder / "ca.crt",
                "-subj", "/CN=test authority", "-days", "2")
        openssl("req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "tls.key", "-out", folder / "tls.csr",
                "-subj", "/CN=collector")
        (folder / "names").write_text(f"subjectAltName={names}\n")
        openssl("x509", "-req", "-in", folder / "tls.csr", "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
                "-CAcreateserial", "-out", folder / "tls.crt", "-days", "2", "-extfile", folder / "names")
        return folder / "ca.crt", (folder / "tls.crt", folder / "tls.key")

    def jobs_of(self, collector):
        return [attribute["value"]["stringValue"] for span in list(collector.spans) if span["name"] == "job"
                for attribute in span["attributes"] if attribute["key"] == "muster.job.name"]

    def stop(self):
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()

    def test_a_jobs_life_arrives_also_when_the_collector_was_away(self):
        address = self.start(f"{BIN}/muster-coordinator", "--listen", "127.0.0.1:0", "--data-dir", "coordinator",
                             "--otlp-endpoint", f"http://127.0.0.1:{self.collector.server.server_port}")["address"]
        self.start(f"{BIN}/muster-worker", "--coordinator", address, "--name", "w0", "--state-dir", "w0", "--gpus", "none",
                   "--stop-ranks-on-exit")
        spec = self.directory / "job.yaml"
        spec.write_text("name: traced\ncommand: [sh, -c, 'test -e failed || { touch failed; exit 3; }']\n"
                        "resources: {device: cpu, ranks: 1}\n")
        out = subprocess.run([f"{BIN}/muster", "--coordinator", address, "submit", spec, "--watch"], cwd=self.directory, text=True,
                             capture_output=True, env=self.environment)
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        poll("a request was refused", lambda: self.collector.refused, lambda refused: refused > 0)
        self.collector.ready = True
        spans = poll("the whole trace", lambda: list(self.collector.spans),
                          lambda spans: any(span["name"] == "job" for span in spans))
        names = [span["name"] for span in spans]
        for name in ("queue", "place", "launch", "attempt ended", "restart", "job"):
            self.assertIn(name, names)
        self.assertEqual(names.count("launch"), 2)
        root = next(span for span in spans if span["name"] == "job")
        self.assertNotIn("parentSpanId", root)
        for span in spans:
            self.assertEqual(span["traceId"], root["traceId"])
            self.assertEqual(span.get("parentSpanId", root["spanId"]), root["spanId"])
            self.assertLessEqual(int(root["startTimeUnixNano"]), int(span["startTimeUnixNano"]))
            self.assertLessEqual(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]))
            self.assertLessEqual(int(span["endTimeUnixNano"]), int(root["endTimeUnixNano"]))
        ended = next(span for span in spans if span["name"] == "attempt ended")
        self.assertEqual(ended["status"]["code"], 2)
        self.assertIn({"key": "muster.cause", "value": {"stringValue": "crash"}}, ended["attributes"])
        self.assertEqual(len({span["spanId"] for span in spans}), len(spans))

    def test_spans_that_the_collector_will_not_get_are_counted(self):
        self.collector.status = 400
        ready = self.start(f"{BIN}/muster-coordinator", "--listen", "127.0.0.1:0", "--data-dir", "coordinator",
                           "--otlp-endpoint", f"http://127.0.0.1:{self.collector.server.server_port}")

        def dropped(reason):
            text = urllib.request.urlopen(f"http://{ready['metrics']}/metrics").read().decode()
            series = f'muster_coordinator_trace_spans_dropped_total{{reason="{reason}"}} '
            return next(float(line[len(series):]) for line in text.splitlines() if line.startswith(series))
        self.assertEqual((dropped("refused"), dropped("queue_full")), (0, 0))
        self.run_job(ready["address"], "untraced")
        poll("spans were dropped", lambda: dropped("refused"), lambda count: count >= 2)
        self.assertEqual(dropped("queue_full"), 0)

    def test_a_collector_that_is_none_is_refused_by_name(self):
        for flags, said in ((["--otlp-endpoint", "collector:4318"], "--otlp-endpoint: 'collector:4318' is not http://HOST:PORT or"),
                            (["--otlp-endpoint", "grpc://a:4317"], "'grpc://a:4317' is not http://HOST:PORT or https://HOST:PORT"),
                            (["--otlp-endpoint", "http://a:4318", "--otlp-ca", "ca.crt"], "has no certificate to check"),
                            (["--otlp-endpoint", "https://a:4318", "--otlp-ca", "none.crt"], "--otlp-ca: "),
                            (["--otlp-ca", "ca.crt"], "--otlp-ca needs --otlp-endpoint"),
                            (["--log-format", "xml"], "--log-format"), (["--slow-rpc", "0s"], "--slow-rpc")):
            ran = subprocess.run([f"{BIN}/muster-coordinator", "--data-dir", "coordinator", *flags],
                                 cwd=self.directory, text=True, capture_output=True, env=self.environment)
            self.assertNotEqual(ran.returncode, 0)
            self.assertIn(said, ran.stderr)

    def test_over_tls_a_collector_is_known_by_its_authority(self):
        authority, certificate = self.make_certificates("IP:127.0.0.1")
        collector = Collector(certificate)
        self.addCleanup(collector.close)
        collector.ready = True
        port = collector.server.server_port
        address = self.coordinate("--otlp-endpoint", f"https://127.0.0.1:{port}", "--otlp-ca", authority)
        self.run_job(address, "named")
        poll("the trace by --otlp-ca", lambda: self.jobs_of(collector), lambda jobs: "named" in jobs)
        # The authorities of the system, as OpenSSL's own variable names them.
        address = self.coordinate("--otlp-endpoint", f"https://127.0.0.1:{port}", SSL_CERT_FILE=str(authority))
        self.run_job(address, "system")
        poll("the trace by the system's authorities", lambda: self.jobs_of(collector), lambda jobs: "system" in jobs)

    def test_over_tls_a_stranger_gets_nothing(self):
        authority, certificate = self.make_certificates("IP:127.0.0.1")
        other, _ = self.make_certificates("IP:127.0.0.1")
        collector = Collector(certificate)
        self.addCleanup(collector.close)
        collector.ready = True
        port = collector.server.server_port
        # By its name the same collector is another one.
        address = self.coordinate("--otlp-endpoint", f"https://localhost:{port}", "--otlp-ca", authority)
        self.run_job(address, "misnamed")
        poll("the log says why", self.log.read_text, lambda text: "its certificate is not for localhost" in text)
        address = self.coordinate("--otlp-endpoint", f"https://127.0.0.1:{port}", "--otlp-ca", other)
        self.run_job(address, "late")
        poll("the log says why", self.log.read_text, lambda text: re.search('"why":"its certificate: [a-z ]*issuer', text))
        self.assertEqual(self.jobs_of(collector), [])
        # The file is read again, and nothing was lost.
        shutil.copy(authority, other)
        poll("the trace", lambda: self.jobs_of(collector), lambda jobs: jobs == ["late"])

    def test_a_slow_call_is_logged_with_the_callers_trace(self):
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        address = self.coordinate("--slow-rpc", "1us")
        self.muster(address, "get", "jobs", TRACEPARENT=f"00-{trace}-00f067aa0ba902b7-01")

        def calls():
            lines = [json.loads(line) for line in self.log.read_text().splitlines()]
            return [line for line in lines if line["message"] == "a call was slow"]
        line = poll("the line", calls, lambda lines: any(line["fields"]["trace_id"] == trace for line in lines))[-1]
        self.assertEqual(list(line), ["time", "level", "component", "message", "fields"])
        self.assertEqual(line["level"], "warning")
        self.assertEqual(line["fields"]["code"], "OK")
        self.assertEqual(line["fields"]["parent_id"], "00f067aa0ba902b7")
        self.assertGreater(line["fields"]["seconds"], 0)
        known = len(calls())
        self.muster(address, "get", "jobs", TRACEPARENT="none")
        made = poll("the next line", calls, lambda lines: len(lines) > known)[-1]["fields"]["trace_id"]
        self.assertRegex(made, "^[0-9a-f]{32}$")
        self.assertNotEqual(made, trace)

    def test_logs_are_text_for_people_who_ask(self):
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        address = self.coordinate("--log-format", "text", "--log-level", "debug")
        coordinator = self.log
        self.start(f"{BIN}/muster-worker", "--coordinator", address, "--name", "w0", "--state-dir", "w0", "--gpus", "none",
                   "--stop-ranks-on-exit", "--log-format=text")
        worker = self.log
        ran = self.muster(address, "get", "job", "none", check=False, TRACEPARENT=f"00-{trace}-00f067aa0ba902b7-01")
        self.assertNotEqual(ran.returncode, 0)
        time_of = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
        poll("the call", coordinator.read_text, lambda text: re.search(
            f"(?m)^{time_of} DEBUG coordinator: a call was refused method=\\w+ code=NOT_FOUND .* trace_id={trace} ", text))
        (self.directory / "text").write_text("In the beginning was the word.\n" * 500)
        self.muster(address, "data", "tokenize", "--input", "text", "--output", "data/text", "--tokenizer", "bytes", "--split",
                    "train=0.9,validation=0.1")
        spec = self.directory / "train.yaml"
        spec.write_text(TRAIN)
        done = self.muster(address, "submit", spec, "--watch", check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rank = self.muster(address, "logs", "train").stdout
        self.assertRegex(rank, f"(?m)^{time_of} INFO rank: rank starts job=train-\\w+ epoch=1 rank=0 worker=w0 world_size=1 ")
        for log, who in ((coordinator, "coordinator"), (worker, "worker")):
            for line in log.read_text().splitlines():
                self.assertRegex(line, f"^{time_of} (DEBUG|INFO|WARNING|ERROR) {who}: ")

    def test_the_supervisor_of_a_daemon_logs_as_the_daemon_does(self):
        for flags in ([], ["--log-format", "text"], ["--log-format=text"]):
            name = f"w{len(self.running)}"
            ready = self.start(f"{BIN}/muster-worker", "supervise", "--coordinator", "127.0.0.1:1", "--name", name, "--state-dir",
                               name, "--gpus", "none", *flags)
            os.kill(ready["pid"], signal.SIGKILL)
            said = "the daemon ended; its ranks train on, and it is started again"
            text = poll("the line", self.log.read_text, lambda text: said in text)
            line = next(line for line in text.splitlines() if said in line)
            if flags:
                self.assertRegex(line, fr"^[0-9T:.-]+Z ERROR supervisor: {said} status=137$")
                continue
            parsed = json.loads(line)
            self.assertEqual(list(parsed), ["time", "level", "component", "message", "fields"])
            self.assertEqual((parsed["component"], parsed["level"]), ("supervisor", "error"))
            self.assertEqual(parsed["fields"], {"status": 137})


if __name__ == "__main__":
    index = sys.argv.index("--bin")
    BIN = os.path.abspath(sys.argv[index + 1])
    del sys.argv[index:index + 2]
    unittest.main(verbosity=2)
