"""Hosts in network namespaces, and the wire between them: ``python relay.py HOSTS DELAY_US RATE_MBIT MTU``.

Host k has the address 10.79.0.k on a device ``wan0``, whose other end is this process. Packets leave their sender one
after another at RATE_MBIT and arrive DELAY_US later. When all hosts are up, this program prints {address: id of the
process that holds the host's namespaces}. The program and its hosts end when their parent process ends, even if that
was killed, because a namespace lives as long as a process in it.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

import namespaces

NETWORK = "10.79.0"
LONGEST_QUEUE_S = 0.2  # a sender's packets that would wait longer are dropped, as by a router
BATCH = 64  # packets taken from one host before the others' are delivered
#: one congestion window for the whole connection, as between hosts that talk all the time
SETTINGS = {"tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}


def new_host(number: int, mtu: int) -> tuple[int, int]:
    """A process that holds a host's namespaces, and the descriptor of the host's device."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.die_with_parent()
            namespaces.leave()
            socket.sethostname(f"lab{number}")
            tun = namespaces.new_tun("wan0")
            namespaces.bring_up("lo")
            namespaces.bring_up("wan0", f"{NETWORK}.{number}", mtu, queue=4000)
            for name, value in SETTINGS.items():
                Path("/proc/sys/net/ipv4", name).write_text(value)
            socket.send_fds(theirs, [b"up"], [tun])
            os.close(tun)
            while True:
                signal.pause()
        except BaseException as error:
            theirs.send(f"host {number}: {error}".encode())
            os._exit(1)
    message, descriptors, _, _ = socket.recv_fds(ours, 1000, 1)
    ours.close()
    theirs.close()
    if not descriptors:
        raise OSError(message.decode())
    return pid, descriptors[0]


def relay(tuns: list[int], delay_s: float, bytes_per_s: float) -> None:
    """Carry packets until killed."""
    clock, select_, read, write = time.perf_counter, select.select, os.read, os.write
    owner = {tun: number for number, tun in enumerate(tuns)}
    wires: list[deque[tuple[float, int, bytes]]] = [deque() for _ in tuns]  # by sender: (arrival, receiver, packet)
    free = [0.0] * len(tuns)  # when the sender's last packet has left
    while True:
        now, arrival = clock(), float("inf")
        for wire in wires:
            while wire and wire[0][0] <= now:
                _, receiver, packet = wire.popleft()
                try:
                    write(receiver, packet)
                except OSError:  # the receiver's queue is full; TCP sends the packet again
                    continue
            if wire:
                arrival = min(arrival, wire[0][0])
        wait = None if arrival == float("inf") else max(0.0, arrival - clock())
        for tun in select_(tuns, (), (), wait)[0]:
            sender = owner[tun]
            for _ in range(BATCH):
                try:
                    packet = read(tun, 65536)
                except BlockingIOError:
                    break
                receiver = packet[19] - 1  # IPv4: the last byte of the destination address
                if packet[0] >> 4 != 4 or not 0 <= receiver < len(tuns):
                    continue  # IPv6's, or a broadcast
                now = clock()
                begins = max(free[sender], now)
                if begins - now > LONGEST_QUEUE_S:
                    continue
                free[sender] = begins + len(packet) / bytes_per_s
                wires[sender].append((free[sender] + delay_s, tuns[receiver], packet))


def main() -> None:
    """Start the hosts, print their processes, and carry packets."""
    hosts, delay_us, rate_mbit, mtu = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    namespaces.die_with_parent()
    up = [new_host(number, mtu) for number in range(1, hosts + 1)]
    namespaces.wake_in_time()
    print(json.dumps({f"{NETWORK}.{number}": pid for number, (pid, _) in enumerate(up, 1)}), flush=True)
    relay([tun for _, tun in up], delay_us * 1e-6, rate_mbit * 1e6 / 8)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error}")
