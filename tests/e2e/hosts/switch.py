"""The network between test hosts: carries the packets of their TUN devices, or does not.

Started by network.py with a table {host: [file descriptor, address]} as its argument. Each line on
stdin changes something, and is answered by a line:
  {"pair": [from, to], "cut": bool, "delay": s, "jitter": s, "loss": 0..1}   of one direction
  {"down": host}  {"up": host}  {"address": [host, address]}
Jitter lets packets overtake each other. What is lost is drawn from a fixed seed.
"""

import heapq
import ipaddress
import json
import os
import random
import select
import sys
import time


class Path:
    """What happens from one host to another."""

    def __init__(self):
        self.cut = False
        self.delay = 0.0
        self.jitter = 0.0
        self.loss = 0.0

    def plain(self):
        return not (self.cut or self.delay or self.jitter or self.loss)


class Switch:
    def __init__(self, table, write, seed=1):
        self.fds = {name: fd for name, (fd, _) in table.items()}
        self.names = {}
        for name, (_, address) in table.items():
            self.names[ipaddress.ip_address(address).packed] = name
        self.down = set()
        self.paths = {}
        self.late = []  # heap of (time, number, from, to, packet)
        self.number = 0
        self.random = random.Random(seed)
        self.write = write

    def change(self, what):
        if "pair" in what:
            path = self.paths.setdefault(tuple(what["pair"]), Path())
            for field in ("cut", "delay", "jitter", "loss"):
                if field in what:
                    setattr(path, field, what[field])
        if "down" in what:
            self.down.add(what["down"])
        if "up" in what:
            self.down.discard(what["up"])
        if "address" in what:
            name, address = what["address"]
            self.names = {at: of for at, of in self.names.items() if of != name}
            self.names[ipaddress.ip_address(address).packed] = name

    def carry(self, source, packet, now):
        # An empty packet matches neither family and has no destination.
        ipv4 = packet[:1] >= b"\x40" and packet[:1] < b"\x50"
        destination = self.names.get(packet[16:20] if ipv4 else packet[24:40])
        if destination is None or source in self.down or destination in self.down:
            return
        path = self.paths.get((source, destination))
        if path is None or path.plain():
            self.write(self.fds[destination], packet)
            return
        if path.cut or (path.loss and self.random.random() < path.loss):
            return
        wait = path.delay + path.jitter * self.random.random()
        if wait == 0:
            self.write(self.fds[destination], packet)
            return
        self.number += 1
        heapq.heappush(self.late, (now + wait, self.number, source, destination, packet))

    def deliver(self, now):
        """Sends what is due; returns the time until the next one, or None."""
        while self.late and self.late[0][0] <= now:
            _, _, source, destination, packet = heapq.heappop(self.late)
            # Packets on their way over a link are lost when it is cut or goes down.
            if source not in self.down and destination not in self.down and not self.paths[
                    source, destination].cut:
                self.write(self.fds[destination], packet)
        return max(0.0, self.late[0][0] - now) if self.late else None


def write(fd, packet):
    try:
        os.write(fd, packet)
    except OSError:
        pass  # its queue is full, or the device is down: the packet is lost, as in a network


def main():
    switch = Switch(json.loads(sys.argv[1]), write)
    poll = select.poll()
    hosts = {fd: name for name, fd in switch.fds.items()}
    for fd in hosts:
        poll.register(fd, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    wait = None
    while True:
        for fd, _ in poll.poll(None if wait is None else wait * 1000):
            if fd == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                switch.change(json.loads(line))
                print(flush=True)
                continue
            now = time.monotonic()
            for _ in range(64):
                try:
                    packet = os.read(fd, 65536)
                except OSError:
                    break
                switch.carry(hosts[fd], packet, now)
        wait = switch.deliver(time.monotonic()) if switch.late else None


if __name__ == "__main__":
    main()
