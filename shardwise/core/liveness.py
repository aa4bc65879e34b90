"""Which ranks have failed, from what was heard of them: pure, so that it is tested without time.

[Note: Who judges whom]
The kernel knows best: whether a process has ended or was stopped is seen by the ranks of its host.
Whether a host is cut off is seen by all others, as silence of *all* its ranks. A rank that is
silent while its process runs only holds Python's lock for long, and is no failure. So nothing that
merely takes long, a first compilation or an evaluation, looks like one; except on a host with one
rank, if it holds the lock for half the time limit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shardwise.core.failure import Fault, Kind
from shardwise.core.processes import Life


@dataclass(slots=True)
class Peer:
    """Another rank, as this one sees it."""

    rank: int
    host: str
    life: Callable[[], Life] | None
    """Asks the kernel; None: it runs on another host."""
    heard_s: float | None = None
    """When it was last heard of; None: never, so that its silence says nothing."""
    refused_s: float | None = None
    """Since when its host says that nobody listens at its address."""
    stopped_s: float | None = None
    """Since when the kernel says that it is stopped."""
    has_left: bool = False
    """It said that it ends, and nothing is expected of it."""
    silent: bool = field(default=False)
    """Whether it was quiet for several beats, so that its host's other ranks are asked for it."""


class Liveness:
    """Keeps what is heard of the other ranks, and judges it."""

    def __init__(
        self, peers: Iterable[Peer], timeout_s: float, watched: Iterable[int] | None = None
    ) -> None:
        self.peers = {peer.rank: peer for peer in peers}
        expected = self.peers.keys() if watched is None else set(watched)
        self._beating = [peer for peer in self.peers.values() if peer.rank in expected]
        """Those that send beats. Others are heard of now and then, so that their silence, and that
        of a host with none but them, says nothing."""
        self.timeout_s = timeout_s

    @property
    def silence_s(self) -> float:
        """So long may a rank be silent, or stopped, before it has failed."""
        return self.timeout_s / 2

    @property
    def refused_s(self) -> float:
        """So long may a host say that nobody listens there."""
        return min(1.0, self.timeout_s / 20)

    def doubt_s(self, now_s: float, beat_s: float) -> float:
        """So long after an error in a transfer another rank's failure may still come to light."""
        if self.uncertain(now_s, beat_s):
            return self.silence_s + 2 * beat_s
        is_local = all(peer.life is not None for peer in self.peers.values())
        return 0.5 if is_local else 0.5 + self.refused_s + 2 * beat_s

    def hear(self, rank: int, now_s: float) -> None:
        peer = self.peers.get(rank)
        if peer is not None:
            peer.heard_s, peer.refused_s = now_s, None

    def pardon(self, now_s: float) -> None:
        """This rank did not run, so that it could not hear the others: their time begins anew."""
        for peer in self.peers.values():
            if peer.heard_s is not None:
                peer.heard_s = now_s

    def refuse(self, rank: int, now_s: float) -> None:
        """Its host is there, but no process of it has the address."""
        peer = self.peers.get(rank)
        if peer is not None and peer.refused_s is None:
            peer.refused_s = now_s

    def strangers(self, ranks: Iterable[int]) -> list[int]:
        """Those of whom nothing was ever heard: their silence says nothing."""
        return [rank for rank in ranks if self.peers[rank].heard_s is None]

    def leave(self, rank: int) -> None:
        if rank in self.peers:
            self.peers[rank].has_left = True

    def faults(self, now_s: float) -> list[Fault]:
        """What has failed by now."""
        beating = [peer for peer in self._beating if not peer.has_left]
        expected = {peer.host for peer in beating if peer.heard_s is not None}
        hosts: dict[str, float] = {}
        for peer in self.peers.values():
            if peer.heard_s is not None and peer.host in expected:
                hosts[peer.host] = max(hosts.get(peer.host, 0.0), peer.heard_s)
        judged = (
            self._judge(peer, hosts, now_s) for peer in self.peers.values() if not peer.has_left
        )
        return [fault for fault in judged if fault is not None]

    def uncertain(self, now_s: float, beat_s: float) -> bool:
        """Whether a rank is too quiet for saying that it lives."""
        return any(
            peer.heard_s is not None and now_s - peer.heard_s > 4 * beat_s
            for peer in self._beating
            if not peer.has_left
        )

    def _judge(self, peer: Peer, hosts: dict[str, float], now_s: float) -> Fault | None:
        if peer.life is not None:
            life = peer.life()
            peer.stopped_s = (peer.stopped_s or now_s) if life is Life.STOPPED else None
            if life is Life.ENDED:
                return Fault(peer.rank, Kind.ENDED, peer.heard_s or now_s)
            if peer.stopped_s is not None and now_s - peer.stopped_s >= self.silence_s:
                return Fault(peer.rank, Kind.STOPPED, peer.stopped_s)
            if life is not Life.UNKNOWN:
                return None
        if peer.refused_s is not None and now_s - peer.refused_s >= self.refused_s:
            return Fault(peer.rank, Kind.ENDED, peer.heard_s or peer.refused_s)
        heard = hosts.get(peer.host)
        if peer.heard_s is None or heard is None or now_s - heard < self.silence_s:
            return None
        return Fault(peer.rank, Kind.CUT_OFF, peer.heard_s)
