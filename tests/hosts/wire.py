"""A cable between two network interfaces that has a delay, loses packets, or carries only so many of them.

The kernel's netem does the same, and is missing in many kernels. This program needs raw sockets alone. It is started by
its path, and lasts until it is killed::

    python wire.py INTERFACE INTERFACE DELAY_S LOSS BYTES_PER_S

Each direction has its own delay and rate; a rate of 0 is unlimited. Frames come with the header by which the kernel
remembers what is left to its hardware (checksums, cutting into packets), and are handed on with it.
"""

import heapq
import random
import select
import socket
import sys
import time

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23  # of linux/if_packet.h
_ALL_PROTOCOLS = 3
_LONGEST_FRAME = 1 << 17
_BUFFER_BYTES = 32 << 20
_QUEUE_S = 0.1  # a frame that would wait longer for its turn is dropped, as by a router whose buffer is full


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # deaf until it is bound: it hears no other interface
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    end.bind((interface, _ALL_PROTOCOLS))
    end.setblocking(False)
    return end


def carry(left: socket.socket, right: socket.socket, delay_s: float, loss: float, rate: float) -> None:
    """Does not return. ``loss``: the share of the frames; ``rate``: bytes/s, 0 without a limit."""
    other = {left: right, right: left}
    free_at = {left: 0.0, right: 0.0}  # when the direction that begins there has sent what it holds
    flying: list[tuple[float, int, socket.socket, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, flying[0][0] - time.monotonic()) if flying else None
        readable, _, _ = select.select([left, right], [], [], wait)
        now = time.monotonic()
        for end in readable:
            try:
                frame = end.recv(_LONGEST_FRAME)
            except OSError:  # the interface is down for a moment
                continue
            start = max(now, free_at[end])
            if random.random() < loss or start > now + _QUEUE_S:
                continue
            free_at[end] = start + (len(frame) / rate if rate else 0.0)
            heapq.heappush(flying, (free_at[end] + delay_s, number, other[end], frame))
            number += 1
        while flying and flying[0][0] <= now:
            _, _, end, frame = heapq.heappop(flying)
            try:
                end.send(frame)
            except OSError:  # nobody is there, or the queue is full: lost, as on any network
                continue


if __name__ == "__main__":
    carry(_open(sys.argv[1]), _open(sys.argv[2]), *map(float, sys.argv[3:]))
