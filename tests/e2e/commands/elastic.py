"""An elastic command for Muster with Python's standard library alone.

usage: elastic.py DIRECTORY STEPS_EACH STEPS
Every attempt does STEPS_EACH steps from where its checkpoint was. Before it has done STEPS in all it then
waits until it is asked to stop (SIGTERM), whereupon rank 0 saves a checkpoint. A checkpoint has the steps,
and the number of ranks of each attempt so far. Every rank leaves DIRECTORY/seen-<attempt>-<rank>.json.
"""

import json
import os
import pathlib
import signal
import sys

RANK, WORLD, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MUSTER_ATTEMPT"))


def report(**fields):
    with open(os.environ["MUSTER_PROGRESS_FILE"], "a") as file:
        file.write(json.dumps(fields) + "\n")


def main():
    directory, each, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Blocked, so that it cannot come between two looks.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    state = {"step": 0, "worlds": []}
    if "MUSTER_RESTORE_PATH" in os.environ:
        state = json.loads(pathlib.Path(os.environ["MUSTER_RESTORE_PATH"]).read_text())
    seen = {"world": WORLD, "from": state["step"], "worlds": state["worlds"],
            "step": int(os.environ.get("MUSTER_RESTORE_STEP", 0))}
    (directory / f"seen-{ATTEMPT}-{RANK}.json").write_text(json.dumps(seen))
    state["worlds"].append(WORLD)
    for _ in range(each):
        state["step"] += 1
        report(step=state["step"], steps=steps, phase="stepping")
    if state["step"] >= steps:
        return
    signal.sigwait({signal.SIGTERM})
    if RANK == 0:
        path = directory / f"checkpoint-{state['step']}.json"
        path.write_text(json.dumps(state))
        report(checkpoint={"step": state["step"], "path": str(path)})


main()
