"""A PyTorch script as people run it under torchrun: it knows nothing of Muster. It trains a small
network with DistributedDataParallel over gloo, keeps a snapshot of its own and goes on from it.

usage: ddp.py SNAPSHOT STEPS EVERY; rank 0 prints the loss of the last step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    snapshot, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == int(os.environ["WORLD_SIZE"]) and rank == int(os.environ["RANK"])
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    start = 0
    if os.path.exists(snapshot):
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        start = saved["step"]
        print(f"rank {rank} goes on from step {start}")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for step in range(start + 1, steps + 1):
        data = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 16, generator=data)
        loss = (parallel(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % every == 0:
            torch.save({"step": step, "model": model.state_dict()}, snapshot + ".new")
            os.replace(snapshot + ".new", snapshot)
    if rank == 0:
        print(f"loss {loss.item()!r} after step {steps}")
    dist.barrier()
    dist.destroy_process_group()


main()
