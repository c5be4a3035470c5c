"""A PyTorch script for `muster submit examples/ddp.yaml`, and for torchrun: DistributedDataParallel on
CPUs or GPUs. Under Muster it also says how far it is, and goes on from the checkpoint that it is given
(docs/commands.md).
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def report(**fields):
    path = os.environ.get("MUSTER_PROGRESS_FILE")
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(fields) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--checkpoints", default="checkpoints/ddp")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    dist.init_process_group("nccl" if gpus else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    start = 0
    if "MUSTER_RESTORE_PATH" in os.environ:
        model.load_state_dict(torch.load(os.environ["MUSTER_RESTORE_PATH"], map_location=device))
        start = int(os.environ["MUSTER_RESTORE_STEP"])
    parallel = DistributedDataParallel(model, device_ids=[local_rank] if gpus else None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)

    for step in range(start + 1, options.steps + 1):
        samples = torch.Generator().manual_seed(1_000 * step + rank)
        x = torch.randn(32, 64, generator=samples).to(device)
        loss = (parallel(x) - x.sum(1, keepdim=True).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank != 0:
            continue
        if step % 10 == 0 or step == options.steps:
            report(step=step, steps=options.steps, loss=loss.item(), phase="training")
        if step % options.save_every == 0:
            os.makedirs(options.checkpoints, exist_ok=True)
            path = os.path.join(options.checkpoints, f"{step}.pt")
            torch.save(model.state_dict(), path)
            report(checkpoint={"step": step, "path": os.path.abspath(path)})
    if rank == 0:
        print(f"trained {options.steps} steps on {dist.get_world_size()} ranks, loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
