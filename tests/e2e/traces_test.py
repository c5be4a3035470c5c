"""A job's trace at a collector of OpenTelemetry: `muster-coordinator --otlp-endpoint`, with a collector that is away at first.
Waiting is polling with a deadline."""

import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

from waiting import poll

BIN = None


class Collector:
    """Takes what is sent to /v1/traces once it is told to; answers with another status before: 503, for the time being."""

    def __init__(self):
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
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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

    def start(self, *command):
        process = subprocess.Popen(command, cwd=self.directory, env=self.environment, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL)
        self.running.append(process)
        return json.loads(process.stdout.readline())

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
        spec = self.directory / "job.yaml"
        spec.write_text("name: untraced\ncommand: ['true']\nresources: {device: cpu, ranks: 1}\n")
        for words in (["submit", spec], ["cancel", "untraced"]):
            subprocess.run([f"{BIN}/muster", "--coordinator", ready["address"], *words], cwd=self.directory, check=True,
                           capture_output=True, env=self.environment)
        poll("spans were dropped", lambda: dropped("refused"), lambda count: count >= 2)
        self.assertEqual(dropped("queue_full"), 0)

    def test_a_collector_that_is_none_is_refused_by_name(self):
        ran = subprocess.run([f"{BIN}/muster-coordinator", "--data-dir", "coordinator", "--otlp-endpoint", "collector:4318"],
                             cwd=self.directory, text=True, capture_output=True, env=self.environment)
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("--otlp-endpoint: 'collector:4318' is not http://HOST:PORT", ran.stderr)


if __name__ == "__main__":
    index = sys.argv.index("--bin")
    BIN = os.path.abspath(sys.argv[index + 1])
    del sys.argv[index:index + 2]
    unittest.main(verbosity=2)
