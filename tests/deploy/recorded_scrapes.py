"""Which queries that need GPUs return data on scrapes that were recorded where there are some.

  recorded_scrapes.py FOLDER [--faults]

FOLDER has the pages of /metrics as files COMPONENT-NAME.N.prom: COMPONENT is coordinator, worker or rank, NAME that of the
worker (of a rank WORKER@RANK, of the coordinator anything), N = 0, 1, 2, ... one after the other at a fixed interval. Each
series of files is a target on loopback that moves on with each scrape; a real Prometheus with the rules of
deploy/prometheus scrapes it every second, under the labels that the coordinator's /targets would give. Then every query of
the dashboards that needs a GPU, and every metric of GPUs that a rule reads, is looked up over the whole time. Those that
show faults alone may be empty on sound GPUs, unless --faults says that there were some. Exits with 1 when another one is
empty or a rule cannot be evaluated, with 2 when the folder is not as it should be, with 77 without prometheus."""

import argparse
import collections
import contextlib
import http.server
import json
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/deploy"), str(ROOT / "deploy/grafana")]
import dashboards  # noqa: E402
from monitoring_test import NEEDS_GPU  # noqa: E402
from processes import Prometheus, poll  # noqa: E402

CLUSTER = "recorded"
# A series begins with the first error of its number; all other metrics of GPUs are there from the start.
ONLY_AFTER_A_FAULT = {"muster_worker_gpu_errors_total"}
NAME = re.compile(r"(coordinator|worker|rank)-([A-Za-z0-9._-]+)(?:@(\d+))?\.(\d+)\.prom")


class BadRecording(ValueError):
    """What is wrong with the folder, and how to mend it."""


def series(folder):
    """{(component, name, rank): [page, ...]} in the order of their numbers."""
    found = collections.defaultdict(dict)
    if not folder.is_dir():
        raise BadRecording(f"{folder} is no folder")
    for path in sorted(folder.iterdir()):
        match = NAME.fullmatch(path.name)
        if not match or (match.group(1) == "rank") != (match.group(3) is not None):
            raise BadRecording(f"{path.name} is not named as coordinator-NAME.N.prom, worker-WORKER.N.prom or "
                               "rank-WORKER@RANK.N.prom")
        component, name, rank, number = match.groups()
        found[component, name, rank][int(number)] = path.read_text()
    if not found:
        raise BadRecording(f"{folder} has no recording")
    for (component, name, _), pages in found.items():
        missing = sorted(set(range(len(pages))) - pages.keys())
        if missing:
            raise BadRecording(f"{component}-{name}.{missing[0]}.prom is missing: numbers go from 0 without a gap")
        if len(pages) < 2:
            raise BadRecording(f"{component}-{name} was recorded once: rates need it twice")
    return {key: [pages[number] for number in range(len(pages))] for key, pages in found.items()}


class Target:
    """A page of /metrics that is the next recording with each request, in the end the last."""

    def __init__(self, key, pages):
        self.component, self.name, _ = key
        self.served = 0
        self.pages = pages
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                page = outer.pages[min(outer.served, len(outer.pages) - 1)].encode()
                outer.served += 1
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def config(self):
        labels = {"cluster": CLUSTER, "component": self.component}
        if self.component != "coordinator":
            labels["worker"] = self.name
        return {"targets": [f"127.0.0.1:{self.server.server_port}"], "labels": labels}

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def wanted():
    """(where, PromQL, whether it shows faults alone) of all that the tests without GPUs leave out."""
    for name, title, legend, expr, needs_gpu, faults in dashboards.specs():
        if needs_gpu:
            yield f"{name}: {title}: {legend}", expr, faults
    rules = "".join((ROOT / "deploy/prometheus" / file).read_text() for file in ("rules.yml", "alerts.yml"))
    for metric in sorted({name for name in re.findall(r"\bmuster_\w+", rules) if NEEDS_GPU.match(name)}):
        yield f"rules: {metric}", metric, metric in ONLY_AFTER_A_FAULT


def check(folder, faults_too=False, out=sys.stdout):
    """0 when all return data, else 1; raises BadRecording."""
    recorded = series(pathlib.Path(folder))
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(contextlib.closing(Target(key, pages))) for key, pages in recorded.items()]
        home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-recorded-")))
        begin = time.time()
        # JSON is YAML.
        prometheus = Prometheus(home, config=json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml", "alerts.yml"],
            "scrape_configs": [{"job_name": "muster", "static_configs": [target.config for target in targets]}]}))
        stack.callback(prometheus.stop)
        length = max(len(pages) for pages in recorded.values())
        # One more than there are: then the last one is stored.
        poll("every recording was scraped", lambda: [target.served - len(target.pages) for target in targets],
             lambda left: all(count > 0 for count in left), length + 60)
        end = time.time()
        print(f"{sum(map(len, recorded.values()))} recordings of {len(targets)} targets in {end - begin:.0f} s", file=out)
        groups = poll("rules were evaluated", lambda: prometheus.get("rules")["groups"],
                      lambda found: all(rule["health"] != "unknown" for group in found for rule in group["rules"]))
        bad = [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"]
        for rule in bad:
            print(f"error  rule {rule['name']}: {rule.get('lastError', '')}", file=out)
        empty = 0
        for where, expr, faults in wanted():
            for variable, value in (("$cluster", CLUSTER), ("$worker", ".*"), ("$__rate_interval", "10s"),
                                    ("$__range", f"{int(end - begin) + 1}s")):
                expr = expr.replace(variable, value)
            found = prometheus.get("query_range", query=expr, start=begin, end=end, step=1)["result"]
            may = faults and not faults_too
            empty += not found and not may
            print(f"{'data ' if found else 'none, a fault would show' if may else 'EMPTY'}  {where}", file=out)
    return 1 if bad or empty else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--faults", action="store_true", help="what shows faults alone has to return data, too")
    options = parser.parse_args()
    if not shutil.which("prometheus"):
        print("SKIPPED: prometheus is not installed; ./dev test --deploy installs it", file=sys.stderr)
        sys.exit(77)
    try:
        sys.exit(check(options.folder, options.faults))
    except BadRecording as bad:
        print(f"recorded_scrapes.py: {bad}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
