"""A command for Muster with Python's standard library alone: ranks agree on the mean of their numbers
in every step, over TCP to rank 0, as a training script would on its gradients. It reports progress,
saves checkpoints on rank 0 and goes on from the newest one.

usage: average.py DIRECTORY STEPS EVERY
It leaves DIRECTORY/env-<attempt>-<rank>.json, and on rank 0 DIRECTORY/result. Before step PAUSE_AT
of the first attempt (if the variable is set) it waits to be killed.
"""

import json
import os
import pathlib
import socket
import sys
import time

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def report(**fields):
    with open(os.environ["MUSTER_PROGRESS_FILE"], "a") as file:
        file.write(json.dumps(fields) + "\n")


def connect():
    """Files of the sockets: on rank 0 of all other ranks, elsewhere of rank 0."""
    if RANK == 0:
        server = socket.create_server(ADDRESS, backlog=WORLD)
        return [server.accept()[0].makefile("rw") for _ in range(WORLD - 1)]
    deadline = time.monotonic() + 60
    while True:
        try:
            return [socket.create_connection(ADDRESS, timeout=60).makefile("rw")]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def send(file, value):
    file.write(f"{value!r}\n")
    file.flush()


def receive(file):
    line = file.readline()
    if not line:
        raise ConnectionError("a peer is gone")
    return float(line)


def mean(value, links):
    if RANK == 0:
        total = sum([value] + [receive(link) for link in links])
        for link in links:
            send(link, total / WORLD)
        return total / WORLD
    send(links[0], value)
    return receive(links[0])


def main():
    directory, steps, every = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    attempt = int(os.environ["MUSTER_ATTEMPT"])
    (directory / f"env-{attempt}-{RANK}.json").write_text(json.dumps(dict(os.environ)))
    state = {"step": 0, "value": 100.0}
    if "MUSTER_RESTORE_PATH" in os.environ:
        state = json.loads(pathlib.Path(os.environ["MUSTER_RESTORE_PATH"]).read_text())
        print(f"rank {RANK} goes on from step {state['step']}")
    links = connect()
    for step in range(state["step"] + 1, steps + 1):
        if attempt == 1 and step == int(os.environ.get("PAUSE_AT", 0)):
            report(phase="waiting")
            time.sleep(600)
        state = {"step": step, "value": mean(state["value"] * 0.9 + RANK, links)}
        if RANK == 0:
            report(step=step, steps=steps, loss=state["value"], tokens=100 * step, phase="averaging")
            if step % every == 0:
                path = directory / f"checkpoint-{step}.json"
                path.write_text(json.dumps(state))
                report(checkpoint={"step": step, "path": str(path)})
    if RANK == 0:
        (directory / "result").write_text(repr(state["value"]))
    print(f"rank {RANK} is done")


main()
