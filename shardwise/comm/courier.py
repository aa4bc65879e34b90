"""Datagrams between the ranks of a job: small, never waited for, and none from strangers.

They go beside the collectives, so that a rank can say something while those are stuck. A datagram
may be lost; whoever needs an answer asks again. A rank publishes all addresses that may reach it,
and the others use the one from which they have heard of it.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

Address = tuple[str, int]
TOKEN_BYTES = 16
LARGEST = 60_000
_IP_RECVERR, _MSG_ERRQUEUE = 11, 0x2000  # Linux
_REFUSED = 111


@dataclass(frozen=True, slots=True)
class Refusal:
    """A host says that nobody listens at a rank's address."""

    rank: int


@dataclass(frozen=True, slots=True)
class Message:
    """What another rank says."""

    rank: int
    kind: str
    body: dict[str, Any]


class Courier:
    """This rank's socket."""

    def __init__(self, rank: int, token: bytes, *, one_host: bool) -> None:
        self._rank, self._token = rank, token
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # elsewhere than on Linux silence has to tell
            self._socket.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        self._socket.bind(("127.0.0.1" if one_host else "0.0.0.0", 0))
        port = self._socket.getsockname()[1]
        hosts = ["127.0.0.1"] if one_host else own_addresses()
        self.addresses: list[Address] = [(host, port) for host in hosts]
        self._known: dict[int, list[Address]] = {}
        self._ranks: dict[Address, int] = {}

    def fileno(self) -> int:
        return self._socket.fileno()

    def introduce(self, rank: int, addresses: Sequence[Sequence[Any]]) -> None:
        """Other ranks' addresses: all that may reach it."""
        self._known[rank] = [(str(host), int(port)) for host, port in addresses]
        for address in self._known[rank]:
            self._ranks.setdefault(address, rank)

    def send(self, rank: int, kind: str, body: dict[str, Any] | None = None) -> None:
        text = json.dumps({"r": self._rank, "k": kind, **(body or {})}).encode()
        for address in self._known.get(rank, ()):
            for _ in range(2):  # an error that is reported here may be of an earlier datagram
                with contextlib.suppress(OSError):
                    self._socket.sendto(self._token + text, address)
                    break

    def receive(self) -> Iterator[Message | Refusal]:
        """Everything that has arrived."""
        yield from self._refusals()
        while True:
            try:
                data, address = self._socket.recvfrom(LARGEST + TOKEN_BYTES)
            except BlockingIOError:
                return
            except OSError:
                yield from self._refusals()
                continue
            message = self._read(data)
            if message is not None and message.rank in self._known:
                if self._known[message.rank] != [address]:
                    self._known[message.rank] = [address]
                    self._ranks[address] = message.rank
                yield message

    def close(self) -> None:
        self._socket.close()

    def _read(self, data: bytes) -> Message | None:
        if not hmac.compare_digest(data[:TOKEN_BYTES], self._token):
            return None
        try:
            table = json.loads(data[TOKEN_BYTES:])
            return Message(int(table.pop("r")), str(table.pop("k")), table)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _refusals(self) -> Iterator[Refusal]:
        while True:
            try:
                _, ancillary, _, address = self._socket.recvmsg(1, 512, _MSG_ERRQUEUE)
            except OSError:
                return
            codes = [struct.unpack_from("=I", data)[0] for _, kind, data in ancillary if kind == 11]
            rank = self._ranks.get(address)
            if _REFUSED in codes and rank is not None and self._known.get(rank) == [address]:
                yield Refusal(rank)


def own_addresses() -> list[str]:
    """Where other hosts may reach this process, the most likely first."""
    found: list[str] = []
    interfaces = psutil.net_if_addrs()
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        found += _of(interfaces.get(name, ()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "localhost"), 1))  # sends nothing
        found.append(probe.getsockname()[0])
    for addresses in interfaces.values():
        found += _of(addresses)
    usable = [text for text in dict.fromkeys(found) if not ipaddress.ip_address(text).is_loopback]
    return usable[:4] or ["127.0.0.1"]


def _of(addresses: Any) -> list[str]:
    return [address.address for address in addresses if address.family == socket.AF_INET]
