#!/usr/bin/env python3
"""Writes Muster's Grafana dashboards, fleet.json, job.json, worker.json and coordinator.json, beside this file.

A dashboard is a list of rows, a row a list of panels, a panel one line or two of this file. Every query is
run against a Prometheus that scrapes a real cluster by tests/deploy/monitoring_test.py; a panel that can have
data only where there are GPUs says so with needs_gpu=True.

  dashboards.py            writes the files
  dashboards.py --check    fails when a file is not what this one writes
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24

STATES = {1: "pending", 2: "queued", 3: "placing", 4: "starting", 5: "running", 6: "recovering",
          7: "preempting", 8: "resizing", 9: "held", 10: "stopping", 11: "succeeded", 12: "failed",
          13: "cancelled"}
COLOURS = {1: "blue", 2: "blue", 3: "purple", 4: "purple", 5: "green", 6: "orange", 7: "orange",
           8: "orange", 9: "text", 10: "orange", 11: "green", 12: "red", 13: "text"}


def panel(title, description, unit, queries, kind="timeseries", width=8, height=8, needs_gpu=False, **more):
    """queries: {legend: PromQL}. kind: timeseries, stat, table, state-timeline or heatmap."""
    return dict(title=title, description=description, unit=unit, queries=queries, kind=kind, width=width,
                height=height, needs_gpu=needs_gpu, **more)


C = 'cluster="$cluster"'
J = 'cluster="$cluster", job_name="$job"'
W = 'cluster="$cluster", worker=~"$worker"'


def p(quantile, metric, by="", selector=C, window="$__rate_interval"):
    labels = ", ".join(filter(None, [by, "le"]))
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[{window}])))"


FLEET = [
    ("Now", [
        panel("Workers", "Workers by state. Lost ones stay until they return or are removed.", "none",
              {"{{state}}": f"muster_coordinator_workers{{{C}}}"}, "stat", 6, 4),
        panel("Devices", "Devices that ranks can have, by kind, and how many attempts hold.", "none",
              {"usable {{device}}": f'muster_coordinator_devices{{{C}, state="usable"}}',
               "allocated {{device}}": f"muster_coordinator_slots_allocated{{{C}}}"}, "stat", 6, 4),
        panel("Waiting", "Jobs in the queue, and how long the first of them has waited.", "none",
              {"queued": f'sum(muster_coordinator_jobs{{{C}, state="queued"}})'}, "stat", 3, 4),
        panel("Longest wait", "How long the job that has waited longest has waited.", "s",
              {"longest wait": f"muster_coordinator_queue_oldest_seconds{{{C}}}"}, "stat", 3, 4),
        panel("Goodput", "Share of the time of devices in use, over the last hour, that went into new steps: without "
              "starts, checkpoints, hangs, releases and steps trained twice.", "percentunit",
              {"goodput": f"muster:goodput:ratio_rate1h{{{C}}}"}, "stat", 6, 4),
    ]),
    ("Use", [
        panel("Devices by state", "Usable, unusable (errors that need a reset), unreachable and lost devices.", "none",
              {"{{device}} {{state}}": f"sum by (device, state) (muster_coordinator_devices{{{C}}}) > 0"}, stack=True),
        panel("Wanted and allocated", "Devices that unfinished jobs want, whole gangs, and those that they hold. What "
              "is wanted above what is usable waits.", "none",
              {"wanted {{device}}": f"muster_coordinator_slots_wanted{{{C}}}",
               "allocated {{device}}": f"muster_coordinator_slots_allocated{{{C}}}",
               "usable {{device}}": f'sum by (device) (muster_coordinator_devices{{{C}, state="usable"}})'}),
        panel("In use but not productive", "Devices held by attempts that are launched or initialised, wait for a save, "
              "train steps once more, hang, or are released.", "none",
              {"{{class}}": f'sum by (class) (rate(muster_device_seconds_total{{{C}, class!~"productive|idle|spare|away"}}[$__rate_interval]))'},
              stack=True),
        panel("What devices are used for", "All devices, each in exactly one class.", "none",
              {"{{class}}": f"sum by (class) (rate(muster_device_seconds_total{{{C}}}[$__rate_interval]))"},
              stack=True),
        panel("Goodput over time", "Over one and over six hours.", "percentunit",
              {"1 h": f"muster:goodput:ratio_rate1h{{{C}}}", "6 h": f"muster:goodput:ratio_rate6h{{{C}}}"}, max=1),
        panel("Goodput of each queue", "Over six hours. Below 0.8 for the whole fleet an alert fires.", "percentunit",
              {"{{queue}}": f"muster:goodput_of_queue:ratio_rate6h{{{C}}}"}, max=1),
        panel("Steps trained twice", "Device seconds in which steps were trained once more that an earlier attempt had "
              "finished behind its last checkpoint.", "s",
              {"{{queue}}": f'sum by (queue) (increase(muster_device_seconds_total{{{C}, class="replayed"}}[$__range]))'}),
    ]),
    ("Jobs and queue", [
        panel("Jobs by state", "Jobs that the coordinator keeps, by state.", "none",
              {"{{state}}": f"sum by (state) (muster_coordinator_jobs{{{C}}}) > 0"}, stack=True),
        panel("Wait until placed", "From submission, or the end of the attempt before, until devices were allocated.", "s",
              {"median": p(0.5, "muster_coordinator_queue_wait_seconds", window="$__range"),
               "95 %": p(0.95, "muster_coordinator_queue_wait_seconds", window="$__range")}),
        panel("Ended attempts by cause", "In the shown range.", "none",
              {"{{cause}}": f"sum by (cause) (increase(muster_coordinator_attempts_ended_total{{{C}}}[$__range])) > 0"},
              "table"),
        panel("Jobs", "State of each job that runs or ran some minutes ago.", "none",
              {"{{job_name}}": f"topk(50, muster_job_state{{{C}}})"}, "state-timeline", 16, states=True),
        panel("Longest jobs by devices", "Ranks of each job.", "none",
              {"{{job_name}}": f"topk(20, muster_job_ranks{{{C}}})"}, "table"),
        panel("Recovery", "From the last sign of life to the decision, and from the end of an attempt until the next trains.", "s",
              {"detection, 95 %": p(0.95, "muster_coordinator_failure_detection_seconds", window="$__range"),
               "recovery, 95 %": p(0.95, "muster_coordinator_job_recovery_seconds", window="$__range")}, faults=True),
    ]),
]

JOB = [
    ("Now", [
        panel("State", "What the job is at.", "none", {"state": f"muster_job_state{{{J}}}"}, "stat", 4, 4, states=True),
        panel("Step", "Last step finished, of all.", "none",
              {"step": f"muster_job_step{{{J}}}", "of": f"muster_job_steps{{{J}}}"}, "stat", 5, 4),
        panel("Time left", "At the current time of a step.", "s",
              {"left": f"(muster_job_steps{{{J}}} - muster_job_step{{{J}}}) * muster_job_step_seconds{{{J}}}"}, "stat", 4, 4),
        panel("Checkpoint age", "Since the newest checkpoint was committed.", "s",
              {"age": f"time() - (muster_job_last_checkpoint_timestamp_seconds{{{J}}} > 0)"}, "stat", 4, 4),
        panel("Attempts", "Attempts started so far.", "none", {"attempts": f"muster_job_attempts{{{J}}}"}, "stat", 3, 4),
        panel("Ranks", "Ranks of the job.", "none", {"ranks": f"muster_job_ranks{{{J}}}"}, "stat", 4, 4),
    ]),
    ("Learning", [
        panel("Loss", "Of the last step and of the last evaluation, nats per token.", "none",
              {"training": f"muster_job_train_loss{{{J}}}", "validation": f"muster_job_validation_loss{{{J}}} > 0"}, width=12),
        panel("Gradient norm", "Before clipping.", "none", {"norm": f'muster_rank_gradient_norm{{{J}, rank="0"}}'}, width=6),
        panel("Learning rate", "Of the last step.", "none", {"rate": f'muster_rank_learning_rate{{{J}, rank="0"}}'}, width=6),
    ]),
    ("Speed", [
        panel("Tokens", "Of all ranks together.", "none", {"tokens/s": f"muster_job_tokens_per_second{{{J}}}"}),
        panel("Model FLOPs utilization", "Arithmetic of the model as a share of what the devices could do at best; 0 "
              "where that is not known, as on CPUs.", "percentunit",
              {"MFU": f"muster_job_model_flops_utilization{{{J}}}"}, max=1),
        panel("Time of a step", "By rank: median of the last steps.", "s",
              {"rank {{rank}}": f"topk(20, histogram_quantile(0.5, sum by (rank, le) (rate(muster_rank_step_duration_seconds_bucket{{{J}}}[$__rate_interval]))))"}),
        panel("Where a step goes", "Seconds of each second, mean over ranks: computing, and waiting by what for.", "percentunit",
              {"computing": f"avg(muster:rank_compute:ratio_rate5m{{{J}}})",
               "{{kind}}": f"avg by (kind) (sum by (rank, kind) (rate(muster_rank_exposed_seconds_total{{{J}}}[$__rate_interval])))"},
              stack=True),
        panel("Exposed communication by axis and collective", "Seconds of each second in which devices computed nothing.",
              "percentunit",
              {"{{kind}} {{collective}}": f"avg by (kind, collective) (rate(muster_rank_exposed_seconds_total{{{J}}}[$__rate_interval]))"},
              stack=True),
        panel("Slowest ranks", "How long a rank computes, over the median rank. Above 1.2 the others wait for it.", "none",
              {"rank {{rank}} on {{worker}}": f"topk(10, muster:rank_compute_over_median:ratio{{{J}}})"}),
    ]),
    ("Checkpoints and failures", [
        panel("Time of a save", "From its start until all is durable.", "s",
              {"mean": f"sum(rate(muster_rank_checkpoint_save_duration_seconds_sum{{{J}}}[$__range])) / (sum(rate(muster_rank_checkpoint_save_duration_seconds_count{{{J}}}[$__range])) > 0)"}),
        panel("Checkpoint size and space", "Of the last checkpoint, and what is free where it was written.", "bytes",
              {"size": f"max(muster_rank_checkpoint_bytes{{{J}}})",
               "free": f"min(muster_rank_checkpoint_disk_free_bytes{{{J}}})"}),
        panel("Steps behind the checkpoint", "What a failure now would cost.", "none",
              {"steps": f"muster_job_step{{{J}}} - muster_job_last_committed_step{{{J}}}"}),
        panel("Ended attempts", "By cause, since the job was submitted.", "none",
              {"{{cause}}": f"muster_job_attempts_ended{{{J}}}"}, "table", 8, faults=True),
        panel("State over time", "Attempts begin where it is placing.", "none",
              {"state": f"muster_job_state{{{J}}}"}, "state-timeline", 16, states=True),
    ]),
    ("Memory", [
        panel("Device memory", "That the engine has taken, by rank.", "bytes",
              {"rank {{rank}}": f"topk(20, muster_rank_device_memory_bytes{{{J}}})"}, width=12),
        panel("Host memory", "That the engine has taken beside its device's.", "bytes",
              {"rank {{rank}}": f"topk(20, muster_rank_host_memory_bytes{{{J}}})"}, width=12),
    ]),
]

WORKER = [
    ("Workers", [
        panel("Session", "1 while the coordinator has welcomed the worker.", "none",
              {"{{worker}}": f"topk(50, muster_worker_session_up{{{W}}})"}, "state-timeline", 8, max=1),
        panel("Slots", "Devices offered, and those given to ranks.", "none",
              {"offered": f"sum(muster_worker_slots{{{W}}})", "used": f"sum(muster_worker_slots_used{{{W}}})"}),
        panel("Ranks", "By state.", "none",
              {"{{state}}": f"sum by (state) (muster_worker_ranks{{{W}}}) > 0"}, stack=True),
        panel("Ends of ranks", "By cause, in the shown range.", "none",
              {"{{worker}} {{cause}}": f"sum by (worker, cause) (increase(muster_worker_rank_exits_total{{{W}}}[$__range])) > 0"},
              "table", faults=True),
        panel("Disk", "Share of the file system of the state directory that is free.", "percentunit",
              {"{{worker}}": f"bottomk(20, muster_worker_state_disk_free_bytes{{{W}}} / muster_worker_state_disk_bytes{{{W}}})"}, max=1),
        panel("Logs of ranks", "Bytes on disk.", "bytes", {"{{worker}}": f"topk(20, muster_worker_rank_log_bytes{{{W}}})"}),
        panel("Writes of the daemon's state", "Time until durable.", "s",
              {"99 %": p(0.99, "muster_worker_persist_seconds", selector=W)}),
        panel("Waiting for the coordinator", "Commits and bootstrap calls without an answer.", "none",
              {"commits": f"sum(muster_worker_checkpoint_commits_pending{{{W}}})",
               "key-value calls": f"sum(muster_worker_key_value_calls_pending{{{W}}})"}),
        panel("Dials", "Attempts to open a session with the coordinator.", "none",
              {"{{worker}}": f"topk(20, increase(muster_worker_dials_total{{{W}}}[$__range]))"}),
    ]),
    ("GPUs", [
        panel("Power", "What each GPU draws.", "watt", {"{{worker}} {{gpu}}": f"muster_worker_gpu_power_watts{{{W}}}"}, needs_gpu=True),
        panel("Temperature", "Of each GPU.", "celsius",
              {"{{worker}} {{gpu}}": f"muster_worker_gpu_temperature_celsius{{{W}}}"}, needs_gpu=True),
        panel("Clock", "Of the multiprocessors.", "hertz",
              {"{{worker}} {{gpu}}": f"muster_worker_gpu_sm_clock_hertz{{{W}}}"}, needs_gpu=True),
        panel("Memory", "In use, by every process.", "bytes",
              {"{{worker}} {{gpu}}": f"muster_worker_gpu_memory_used_bytes{{{W}}}"}, needs_gpu=True),
        panel("Some kernel ran", "Share of the time; no measure of how well the GPU is used. Compare with MFU on the "
              "job's dashboard.", "percentunit",
              {"{{worker}} {{gpu}}": f"muster_worker_gpu_busy_ratio{{{W}}}"}, max=1, needs_gpu=True),
        panel("Lowered clocks", "Share of the time, by reason.", "percentunit",
              {"{{worker}} {{gpu}} {{reason}}": f"rate(muster_worker_gpu_throttled_seconds_total{{{W}}}[$__rate_interval]) > 0"},
              needs_gpu=True, max=1, faults=True),
        panel("Errors of the driver", "Xids in the shown range.", "none",
              {"{{worker}} {{gpu}} {{xid}}": f"increase(muster_worker_gpu_errors_total{{{W}}}[$__range]) > 0"}, "table",
              needs_gpu=True, faults=True),
        panel("Memory errors", "Since the driver was loaded.", "none",
              {"{{worker}} {{gpu}} {{kind}}": f"muster_worker_gpu_ecc_errors{{{W}}}"}, "table", needs_gpu=True),
        panel("Replaced rows of memory", "Pending ones wait for a reset, failed ones for a new GPU.", "none",
              {"{{worker}} {{gpu}} {{kind}}": f"muster_worker_gpu_remapped_rows{{{W}}}"}, "table", needs_gpu=True),
    ]),
]

COORDINATOR = [
    ("Coordinator", [
        panel("Up", "1 while it answers scrapes.", "none", {"up": f'up{{{C}, component="coordinator"}}'}, "stat", 4, 4),
        panel("Version", "Of the program.", "none", {"{{version}}": f"muster_coordinator_build_info{{{C}}}"}, "stat", 4, 4),
        panel("Starts", "On this data directory.", "none", {"leader term": f"muster_coordinator_leader_term{{{C}}}"}, "stat", 4, 4),
        panel("Start took", "To rebuild the state from the store.", "s",
              {"recovery": f"muster_coordinator_recovery_seconds{{{C}}}"}, "stat", 4, 4),
        panel("Sessions", "Open streams of daemons.", "none", {"sessions": f"muster_coordinator_sessions{{{C}}}"}, "stat", 4, 4),
        panel("Watchers", "Open watch and log streams of clients.", "none",
              {"watchers": f"muster_coordinator_watchers{{{C}}}"}, "stat", 4, 4),
    ]),
    ("Calls", [
        panel("Calls", "By method, per second.", "reqps",
              {"{{method}}": f"sum by (method) (rate(muster_coordinator_rpcs_total{{{C}}}[$__rate_interval]))"}),
        panel("Calls that failed", "By method and code, per second.", "reqps",
              {"{{method}} {{code}}": f'sum by (method, code) (rate(muster_coordinator_rpcs_total{{{C}, code!="OK"}}[$__rate_interval]))'},
              faults=True),
        panel("Latency of calls", "One in a hundred takes longer.", "s",
              {"{{method}}": p(0.99, "muster_coordinator_rpc_duration_seconds", "method", window="$__range")}),
    ]),
    ("Loop and store", [
        panel("Delay of the event loop", "How late work that was due ran.", "s",
              {"median": p(0.5, "muster_coordinator_loop_delay_seconds"),
               "99 %": p(0.99, "muster_coordinator_loop_delay_seconds")}),
        panel("Synced writes", "Time of each.", "s",
              {"median": p(0.5, "muster_coordinator_store_write_seconds", window="$__range"),
               "99 %": p(0.99, "muster_coordinator_store_write_seconds", window="$__range")}),
        panel("Transitions in one write", "Group commit.", "none",
              {"mean": f"rate(muster_coordinator_store_write_batches_sum{{{C}}}[$__range]) / (rate(muster_coordinator_store_write_batches_count{{{C}}}[$__range]) > 0)"}),
        panel("Written", "Bytes of keys and values.", "Bps",
              {"bytes/s": f"rate(muster_coordinator_store_written_bytes_total{{{C}}}[$__rate_interval])"}),
        panel("Size of the state", "Of its files.", "bytes", {"state": f"muster_coordinator_state_bytes{{{C}}}"}),
        panel("Free disk", "Share of the file system of the data directory.", "percentunit",
              {"free": f"muster_coordinator_state_disk_free_bytes{{{C}}} / muster_coordinator_state_disk_bytes{{{C}}}"}, max=1),
        panel("Events", "Per second.", "none",
              {"events/s": f"deriv(muster_coordinator_event_sequence{{{C}}}[$__range])"}),
        panel("Checkpoints", "Committed and refused, in the shown range.", "none",
              {"committed": f"increase(muster_coordinator_checkpoints_committed_total{{{C}}}[$__range])",
               "refused": f"increase(muster_coordinator_checkpoints_refused_total{{{C}}}[$__range])"}),
        panel("Placement", "From the allocation of devices until every daemon has accepted.", "s",
              {"95 %": p(0.95, "muster_coordinator_placement_seconds", window="$__range")}),
        panel("Spans that were dropped", "Of traces, in the shown range and by reason: what the collector will not get. Empty "
              "without --otlp-endpoint.", "none",
              {"{{reason}}": f"sum by (reason) (increase(muster_coordinator_trace_spans_dropped_total{{{C}}}[$__range]))"}),
    ]),
]

CLUSTER = ("cluster", "muster_coordinator_build_info", "cluster", False)
DASHBOARDS = {
    "fleet": ("Muster fleet", FLEET, [CLUSTER]),
    "job": ("Muster job", JOB, [CLUSTER, ("job", 'muster_job_state{cluster="$cluster"}', "job_name", False)]),
    "worker": ("Muster workers and GPUs", WORKER,
               [CLUSTER, ("worker", 'muster_worker_slots{cluster="$cluster"}', "worker", True)]),
    "coordinator": ("Muster coordinator", COORDINATOR, [CLUSTER]),
}


def variable(name, metric, label, several):
    return {"name": name, "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 1,
            "query": {"query": f"label_values({metric}, {label})", "refId": name},
            "definition": f"label_values({metric}, {label})", "multi": several, "includeAll": several,
            **({"allValue": ".*"} if several else {}), "current": {}, "options": [], "hide": 0}


def rendered(spec, number, x, y):
    kind = spec["kind"]
    defaults = {"unit": spec["unit"], "color": {"mode": "palette-classic"}, "mappings": [], "custom": {}}
    if spec["unit"] in ("percentunit", "bytes", "s", "none", "watt", "reqps", "Bps"):
        defaults["min"] = 0
    if "max" in spec:
        defaults["max"] = spec["max"]
    if spec.get("states"):
        defaults["mappings"] = [{"type": "value", "options": {
            str(state): {"text": text, "color": COLOURS[state], "index": state} for state, text in STATES.items()}}]
    if spec.get("stack"):
        defaults["custom"] = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    options = {"timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
               "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "auto", "colorMode": "value"},
               "table": {"showHeader": True},
               "state-timeline": {"mergeValues": True, "showValue": "auto"}}[kind]
    targets = [{"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend,
                **({"instant": True, "range": False, "format": "table"} if kind == "table" else {"range": True})}
               for i, (legend, expr) in enumerate(spec["queries"].items())]
    return {"id": number, "type": kind, "title": spec["title"], "description": spec["description"],
            "datasource": DATASOURCE, "gridPos": {"x": x, "y": y, "w": spec["width"], "h": spec["height"]},
            "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options, "targets": targets}


def dashboard(name):
    title, rows, variables = DASHBOARDS[name]
    panels, y = [], 0
    for heading, specs in rows:
        panels.append({"id": len(panels) + 1, "type": "row", "title": heading, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y += 1
        x, lowest = 0, 0
        for spec in specs:
            if x + spec["width"] > WIDTH:
                x, y, lowest = 0, y + lowest, 0
            panels.append(rendered(spec, len(panels) + 1, x, y))
            x, lowest = x + spec["width"], max(lowest, spec["height"])
        y += lowest
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source",
                  "current": {}, "options": [], "hide": 0, "refresh": 1}
    links = [{"title": "Muster", "type": "dashboards", "tags": ["muster"], "asDropdown": True, "includeVars": True,
              "keepTime": True}]
    return {"uid": f"muster-{name}", "title": title, "tags": ["muster"], "schemaVersion": 39, "version": 1,
            "editable": False, "timezone": "browser", "refresh": "30s", "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [datasource] + [variable(*v) for v in variables]}, "links": links,
            "annotations": {"list": []}, "panels": panels}


def text(name):
    return json.dumps(dashboard(name), indent=1, sort_keys=True) + "\n"


def specs():
    """(dashboard, panel, legend, PromQL, needs_gpu, faults) of every query."""
    for name, (_, rows, _) in DASHBOARDS.items():
        for _, panels in rows:
            for spec in panels:
                for legend, expr in spec["queries"].items():
                    yield name, spec["title"], legend, expr, spec["needs_gpu"], spec.get("faults", False)


def main():
    stale = [name for name in DASHBOARDS
             if not (HERE / f"{name}.json").exists() or (HERE / f"{name}.json").read_text() != text(name)]
    if sys.argv[1:] == ["--check"]:
        if stale:
            sys.exit(f"run deploy/grafana/dashboards.py: {', '.join(stale)} not as it writes them")
        return
    for name in DASHBOARDS:
        (HERE / f"{name}.json").write_text(text(name))


if __name__ == "__main__":
    main()
