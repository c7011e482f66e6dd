"""Linux namespaces and network devices, by the system calls themselves: no compiler, no iproute2. Needs root."""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
from pathlib import Path

#: linux/sched.h: CLONE_NEWNET, ...
KINDS = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000}
SLAVE_ALL, DETACH = 0x4000 | 0x80000, 2  # linux/mount.h: MS_REC | MS_SLAVE; MNT_DETACH
SET_PDEATHSIG, SET_TIMERSLACK = 1, 29  # linux/prctl.h
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
SIOCSIFFLAGS, SIOCGIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFTXQLEN = (
    0x8914, 0x8913, 0x8916, 0x891C, 0x8922, 0x8943,
)  # fmt: skip
IFF_UP = 1


def _call(name: str, *args: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wake_in_time() -> None:
    """Wake from a sleep on time: no timer slack, and real-time priority if it is allowed."""
    _call("prctl", SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # a container may keep root from it
        return


def leave() -> None:
    """Put this process into network, UTS, IPC and mount namespaces of its own.

    /sys shows the devices of the network namespace in which it was mounted. It is mounted again, because UCX reads it.
    """
    _call("unshare", sum(KINDS.values()))
    _call("mount", b"none", b"/", None, SLAVE_ALL, None)
    _call("umount2", b"/sys", DETACH)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def enter(pid: int) -> None:
    """Join the namespaces of process ``pid``, in the same directory."""
    folder = Path.cwd()
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(Path(f"/proc/{pid}/ns/{name}").open("rb")) for name in KINDS]
        for place, kind in zip(places, KINDS.values(), strict=True):
            _call("setns", place.fileno(), kind)
    os.chdir(folder)


def new_tun(name: str) -> int:
    """A TUN device in this namespace: a descriptor that reads and writes IP packets, non-blocking."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun


def bring_up(name: str, address: str | None = None, mtu: int | None = None, queue: int | None = None) -> None:
    """Give a device of this namespace an address (/24), an MTU and a queue length in packets, and start it."""

    def packed_address(text: str) -> bytes:
        return struct.pack("16sHH4s8x", name.encode(), socket.AF_INET, 0, socket.inet_aton(text))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        if address is not None:
            fcntl.ioctl(control, SIOCSIFADDR, packed_address(address))
            fcntl.ioctl(control, SIOCSIFNETMASK, packed_address("255.255.255.0"))
        for request, value in ((SIOCSIFMTU, mtu), (SIOCSIFTXQLEN, queue)):
            if value is not None:
                fcntl.ioctl(control, request, struct.pack("16si20x", name.encode(), value))
    _set_up(name, up=True)


def bring_down(name: str) -> None:
    """Stop a device of this namespace, as a cable that is pulled out does: routes go, connections stay and starve."""
    _set_up(name, up=False)


def _set_up(name: str, *, up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sH22x", name.encode(), 0))
        flags = struct.unpack("16sH22x", answer)[1]
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags))
