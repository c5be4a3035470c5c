"""Hosts for tests: network namespaces with host names and addresses of their own, and a network
between them that can be cut, delayed and made lossy.

Two kinds of link. `veth`: real virtual Ethernet into one bridge, as fast as the machine, cut by
nftables in the bridge. `switch`: a TUN device per host whose packets a process of ours (switch.py)
carries, delays, reorders or drops: the kernel's netem is not everywhere, and this is the same on
every machine.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), iproute2, nftables and /dev/net/tun; why_not() says
what is missing. Namespaces have the pid of the process that made them in their names. That process
removes them when it closes the network; should it die before, even by SIGKILL, a child of it does.
"""

import atexit
import ctypes
import fcntl
import json
import os
import pathlib
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000  # few packets for Python to carry; tests of small packets ask for less
REAP = "--reap"


def why_not():
    """Why hosts cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "unshare", "nft"):
        if shutil.which(tool) is None:
            return f"the program {tool} is missing (Debian: iproute2, util-linux, nftables)"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    probe = f"muster-{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", probe)
        os.close(open_tun(probe, "net0"))
        run(*inside(probe), "nft", "add table inet probe")
        run(*inside(probe), "unshare", "--uts", "--mount", "--", "hostname", "probe")
    except (OSError, RuntimeError) as problem:
        return f"network namespaces do not work here: {problem}"
    finally:
        run("ip", "netns", "del", probe, check=False)
    return ""


def run(*command, check=True):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if check and result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {result.stderr.strip()}")
    return result.stdout


def inside(namespace):
    return ["ip", "netns", "exec", namespace]


def kill_all_in(namespace):
    """SIGKILL to every process of the namespace, until there is none."""
    # A process that is being started may escape the first look.
    while pids := [int(pid) for pid in run("ip", "netns", "pids", namespace, check=False).split()]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


class Reaper:
    """Removes namespaces once this process is gone, however it went."""

    def __init__(self):
        # In a session of its own Ctrl-C does not reach it.
        self.process = subprocess.Popen([sys.executable, __file__, REAP], stdin=subprocess.PIPE,
                                        text=True, start_new_session=True)

    def add(self, namespace):
        """Before the namespace is made."""
        self.process.stdin.write(namespace + "\n")
        self.process.stdin.flush()

    def close(self):
        """Returns when they are removed."""
        self.process.stdin.close()
        self.process.wait()


def reap():
    namespaces = [line.strip() for line in sys.stdin]  # stdin ends with the process that made them
    for namespace in namespaces:
        if os.path.exists(f"/var/run/netns/{namespace}"):
            kill_all_in(namespace)
            run("ip", "netns", "del", namespace, check=False)


class Host:
    """One machine of the test. Addresses: 10.77.0.N or fd77::N on its first interface."""

    def __init__(self, network, name, number):
        self.network = network
        self.name = name
        self.number = number
        self.namespace = f"muster-{os.getpid()}-{network.serial}-{name}"
        self.hidden = {}  # path: directory that this host sees there instead
        network.make_namespace(self.namespace)
        self.ip("link", "set", "lo", "up")

    @property
    def address(self):
        return self.network.address_of(self.number)

    def ip(self, *arguments):
        return run("ip", "-n", self.namespace, *arguments)

    def command(self, *arguments):
        """The arguments as a command line that runs on this host."""
        mounts = "".join(f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(path))} && "
                         for path, source in self.hidden.items())
        # exec makes the process that is started the command itself.
        script = f"hostname {self.name} && {mounts}exec \"$@\""
        return [*inside(self.namespace), "unshare", "--uts", "--mount", "--",
                "sh", "-c", script, "sh", *map(str, arguments)]

    def run(self, *arguments, check=True, **options):
        options.setdefault("capture_output", True)
        return subprocess.run(self.command(*arguments), text=True, check=check, **options)

    def start(self, *arguments, **options):
        """Popen of the command, in a session of its own."""
        return subprocess.Popen(self.command(*arguments), start_new_session=True, **options)

    def nft(self, *rules):
        """Adds nftables rules for what arrives at this host, such as "tcp dport 22 reject"."""
        run(*inside(self.namespace), "nft",
            "add table inet test; add chain inet test input "
            "{ type filter hook input priority 0; }; "
            + "; ".join(f"add rule inet test input {rule}" for rule in rules))

    def clear_nft(self):
        run(*inside(self.namespace), "nft", "flush", "ruleset")

    def kill(self):
        """Ends everything that runs here, and the link, as a power cut does."""
        self.network.unplug(self)
        kill_all_in(self.namespace)

    def listening(self, program=""):
        """Ports of TCP that programs of this name listen on here, but for loopback."""
        ports = set()
        for line in run(*inside(self.namespace), "ss", "-Hltnp").splitlines():
            address, port = line.split()[3].rsplit(":", 1)
            if program in line and not address.startswith(("127.", "[::1]")):
                ports.add(int(port))
        return ports


class Network:
    """Hosts and what is between them. A context manager: leaves nothing behind."""

    serials = 0

    def __init__(self, names, kind="switch", ipv6=False, mtu=MTU):
        Network.serials += 1
        self.serial = Network.serials
        self.kind = kind
        self.ipv6 = ipv6
        self.mtu = mtu
        self.hosts = {}
        self.tuns = {}
        self.switch = None
        self.bridge = None
        self.drops = set()  # (from, to) on veth
        self.reaper = Reaper()
        atexit.register(self.close)
        try:
            for number, name in enumerate(names, 1):
                host = self.hosts[name] = Host(self, name, number)
                self.plug(host)
            if kind == "switch":
                self._start_switch()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getitem__(self, name):
        return self.hosts[name]

    def address_of(self, number):
        return f"fd77::{number}" if self.ipv6 else f"10.77.0.{number}"

    def make_namespace(self, name):
        self.reaper.add(name)
        run("ip", "netns", "add", name)

    # ---- links
    def plug(self, host, number=None):
        """Gives the host its link, with another address when `number` is given."""
        if number is not None:
            host.number = number
        if self.kind == "veth":
            self._plug_veth(host)
        elif host.name not in self.tuns:
            self.tuns[host.name] = open_tun(host.namespace, "net0")
        bits = "64" if self.ipv6 else "24"
        host.ip("link", "set", "net0", "mtu", self.mtu, "up")
        host.ip("address", "flush", "dev", "net0", "scope", "global")
        host.ip("address", "add", f"{host.address}/{bits}", "dev", "net0",
                *(["nodad"] if self.ipv6 else []))
        if self.switch is not None:
            self.tell(address=[host.name, host.address], up=host.name)

    def unplug(self, host):
        if self.kind == "veth":
            host.ip("link", "set", "net0", "down")
        else:
            self.tell(down=host.name)

    def second_interface(self, host, address):
        """An interface that leads nowhere."""
        host.ip("link", "add", "side0", "type", "veth", "peer", "name", "side1")
        host.ip("address", "add", address, "dev", "side0")
        host.ip("link", "set", "side0", "up")
        host.ip("link", "set", "side1", "up")

    def _plug_veth(self, host):
        if self.bridge is None:
            self.bridge = f"muster-{os.getpid()}-{self.serial}-wire"
            self.make_namespace(self.bridge)
            run("ip", "-n", self.bridge, "link", "add", "wire", "type", "bridge")
            run("ip", "-n", self.bridge, "link", "set", "wire", "up")
        if "net0" in host.ip("-o", "link"):
            return
        port = f"to-{host.name}"
        run("ip", "-n", self.bridge, "link", "add", port, "type", "veth", "peer", "name", "net0",
            "netns", host.namespace)
        run("ip", "-n", self.bridge, "link", "set", port, "mtu", self.mtu, "master", "wire", "up")

    # ---- the switch
    def _start_switch(self):
        table = {name: [fd, self.hosts[name].address] for name, fd in self.tuns.items()}
        self.switch = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("switch.py")), json.dumps(table)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=list(self.tuns.values()))

    def tell(self, **what):
        self.switch.stdin.write(json.dumps(what) + "\n")
        self.switch.stdin.flush()
        self.switch.stdout.readline()  # it has been done

    def cut(self, one, other, both=True):
        """Drops every packet from `one` to `other`, and with `both` those back, silently."""
        if self.kind == "veth":
            self._drop({(one, other)} | ({(other, one)} if both else set()), set())
        else:
            self.shape(one, other, both, cut=True)

    def mend(self, one, other):
        if self.kind == "veth":
            self._drop(set(), {(one, other), (other, one)})
        else:
            self.shape(one, other, cut=False)

    def shape(self, one, other, both=True, **how):
        """Any of cut, delay (seconds), jitter (seconds: packets overtake), loss (0 to 1)."""
        self.tell(pair=[one, other], **how)
        if both:
            self.tell(pair=[other, one], **how)

    def _drop(self, more, fewer):
        """Drops packets in the bridge, where the hosts' kernels do not notice."""
        self.drops = (self.drops | more) - fewer
        rules = "".join(f"add rule bridge cut forward iifname to-{one} oifname to-{other} drop; "
                        for one, other in sorted(self.drops))
        run(*inside(self.bridge), "nft",
            "add table bridge cut; delete table bridge cut; add table bridge cut; "
            "add chain bridge cut forward { type filter hook forward priority 0; }; " + rules)

    def isolate(self, name):
        for other in self.hosts:
            if other != name:
                self.cut(name, other)

    def rejoin(self, name):
        for other in self.hosts:
            if other != name:
                self.mend(name, other)

    def close(self):
        if self.reaper is None:
            return
        atexit.unregister(self.close)
        if self.switch is not None:
            self.switch.kill()
            self.switch.wait()
            self.switch.stdin.close()
            self.switch.stdout.close()
            self.switch = None
        for fd in self.tuns.values():
            os.close(fd)
        self.tuns = {}
        self.hosts = {}
        self.bridge = None
        self.reaper.close()
        self.reaper = None


def open_tun(namespace, name):
    """A TUN device inside the namespace; its packets are read from the file descriptor returned."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        finally:
            libc.setns(here, CLONE_NEWNET)
    finally:
        os.close(here)
        os.close(there)
    return fd


if __name__ == "__main__" and sys.argv[1:] == [REAP]:
    reap()
