"""Rules, alerts, dashboards and runbooks without a cluster: promtool's checks and unit tests, what must be there for
each alert, and the shape of the dashboards. Skipped (77) without promtool."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "deploy/grafana"))
import dashboards  # noqa: E402

PROMETHEUS = ROOT / "deploy/prometheus"
ALERTS = re.findall(r"^ *- alert: (\w+)$", (PROMETHEUS / "alerts.yml").read_text(), re.MULTILINE)
RECORDED = set(re.findall(r"^ *- record: ([\w:]+)$", (PROMETHEUS / "rules.yml").read_text(), re.MULTILINE))
# Names of metrics in PromQL: they are all ours, but for these of Prometheus itself.
METRIC = re.compile(r"\b(muster[_:][\w:]+|up|ALERTS)\b(?!\s*=)")
UNITS = {"none", "s", "bytes", "Bps", "percentunit", "reqps", "watt", "celsius", "hertz"}


def families():
    """name -> (type, labels) from the catalogue in docs/metrics.md."""
    found = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        match = re.match(r"\| `(\w+)` \| (\w+) \| ([^|]*) \|", line)
        if match:
            name, kind, labels = match.groups()
            found[name] = (kind, {label.strip() for label in labels.split(",") if label.strip()})
    return found


def family_of(name, known):
    """The family that a series belongs to: a histogram has three series."""
    if name in known:
        return name
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if base in known and known[base][0] == "histogram" else None


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    return result.returncode, result.stdout + result.stderr


def expressions():
    """(where, PromQL) of every panel, alert and rule."""
    for name, title, _, expr, _, _ in dashboards.specs():
        yield f"{name}: {title}", expr
    for file in ("rules.yml", "alerts.yml"):
        text = (PROMETHEUS / file).read_text()
        for match in re.finditer(r"^( *)(?:- )?expr: (\|\n(?:\1 +.*\n| *\n)+|.*\n)", text, re.MULTILINE):
            yield file, match.group(2)


class Rules(unittest.TestCase):
    def test_promtool_accepts_them(self):
        for command in (("promtool", "check", "rules", "--lint=all", PROMETHEUS / "rules.yml", PROMETHEUS / "alerts.yml"),
                        ("promtool", "check", "config", PROMETHEUS / "prometheus.yml")):
            code, output = run(*command)
            self.assertEqual(code, 0, output)

    def test_unit_tests_of_the_alerts_pass(self):
        code, output = run("promtool", "test", "rules", PROMETHEUS / "tests/alerts.yml")
        self.assertEqual(code, 0, output)

    def test_every_alert_has_a_case_that_fires_and_one_that_does_not(self):
        cases = (PROMETHEUS / "tests/alerts.yml").read_text()
        for alert in ALERTS:
            self.assertIn(f'alertname="{alert}"', cases, f"{alert} has no unit test")

    def test_every_alert_has_a_runbook_with_four_parts_and_no_runbook_is_left_over(self):
        pages = ROOT / "docs/runbooks"
        self.assertEqual(sorted(ALERTS), sorted(page.stem for page in pages.glob("*.md")))
        for alert in ALERTS:
            headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", (pages / f"{alert}.md").read_text(), flags=re.S),
                                  re.MULTILINE)
            self.assertEqual(headings, [alert, "Meaning", "Impact", "Diagnosis", "Mitigation"])
            self.assertIn(f"runbook_url: docs/runbooks/{alert}.md\n", (PROMETHEUS / "alerts.yml").read_text())

    def test_every_metric_is_one_that_muster_has(self):
        known = families()
        for where, expr in expressions():
            for name in METRIC.findall(expr):
                if name in ("up", "ALERTS") or name in RECORDED:
                    continue
                self.assertIsNotNone(family_of(name, known), f"{where}: there is no metric {name}")

    def test_counters_are_read_as_rates_and_gauges_are_not(self):
        known = families()
        for where, expr in expressions():
            for function, name in re.findall(r"\b(rate|increase|irate)\((\w+)", expr):
                kind = known[family_of(name, known)][0]
                self.assertNotEqual(kind, "gauge", f"{where}: {function} of the gauge {name}")
            for function, name in re.findall(r"\b(delta|deriv)\((\w+)", expr):
                self.assertEqual(known[family_of(name, known)][0], "gauge", f"{where}: {function} of {name}")
            if "histogram_quantile" in expr:
                self.assertRegex(expr, r"\ble\b", where)

    def test_labels_that_selectors_name_exist(self):
        known = families()
        target = {"cluster", "component", "worker", "instance", "job"}
        for where, expr in expressions():
            for name, selector in re.findall(r"\b(muster_\w+)\{([^}]*)\}", expr):
                family = family_of(name, known)
                for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector):
                    allowed = target | known[family][1] | {"le"}
                    self.assertIn(label, allowed, f"{where}: {name} has no label {label}")

    def test_routes_of_alertmanager_lead_somewhere(self):
        if not shutil.which("amtool"):
            self.skipTest("amtool is not installed")
        config = PROMETHEUS / "alertmanager.yml"
        self.assertEqual(run("amtool", "check-config", config)[0], 0)
        for labels, receiver in ((("alertname=MusterWatchdog", "severity=none"), "dead-mans-switch"),
                                 (("alertname=MusterCoordinatorDown", "severity=critical"), "on-call"),
                                 (("alertname=MusterWorkerLost", "severity=warning"), "operators")):
            code, output = run("amtool", "config", "routes", "test", f"--config.file={config}", *labels)
            self.assertEqual((code, output.splitlines()[0]), (0, receiver))


class Dashboards(unittest.TestCase):
    def test_files_are_what_the_source_writes(self):
        code, output = run(sys.executable, "-B", ROOT / "deploy/grafana/dashboards.py", "--check")
        self.assertEqual(code, 0, output)

    def test_each_is_a_dashboard_that_grafana_reads(self):
        uids = set()
        for name in dashboards.DASHBOARDS:
            board = json.loads((ROOT / f"deploy/grafana/{name}.json").read_text())
            self.assertFalse(board["editable"])
            self.assertNotIn(board["uid"], uids)
            self.assertRegex(board["uid"], r"^[a-z0-9-]{1,40}$")
            uids.add(board["uid"])
            variables = {v["name"] for v in board["templating"]["list"]}
            ids, cells = set(), {}
            for panel in board["panels"]:
                where = f"{name}: {panel['title']}"
                self.assertNotIn(panel["id"], ids, where)
                ids.add(panel["id"])
                at = panel["gridPos"]
                self.assertLessEqual(at["x"] + at["w"], 24, where)
                for x in range(at["x"], at["x"] + at["w"]):
                    for y in range(at["y"], at["y"] + at["h"]):
                        self.assertNotIn((x, y), cells, f"{where} lies over {cells.get((x, y))}")
                        cells[x, y] = panel["title"]
                if panel["type"] == "row":
                    continue
                self.assertIn(panel["type"], {"timeseries", "stat", "table", "state-timeline", "heatmap"}, where)
                self.assertTrue(panel["description"], where)
                self.assertIn(panel["fieldConfig"]["defaults"]["unit"], UNITS, where)
                self.assertEqual(panel["datasource"]["uid"], "${datasource}", where)
                self.assertTrue(panel["targets"], where)
                refs = [target["refId"] for target in panel["targets"]]
                self.assertEqual(len(refs), len(set(refs)), where)
                for target in panel["targets"]:
                    used = set(re.findall(r"\$(\w+)", target["expr"]))
                    self.assertLessEqual(used, variables | {"__rate_interval", "__range"}, where)
                    if "rate_interval" not in target["expr"] and re.search(r"\[\d+[smh]\]", target["expr"]):
                        self.fail(f"{where}: a fixed window in {target['expr']}")


if __name__ == "__main__":
    if not shutil.which("promtool"):
        print("SKIPPED: promtool is not installed; ./dev setup installs it", file=sys.stderr)
        sys.exit(77)
    unittest.main(verbosity=1)
