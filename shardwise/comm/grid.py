"""From the grid to communication: a rank's place, process groups, and a link per hop and lane."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.comm import watch
from shardwise.comm.control import Control
from shardwise.comm.lane import Lane, make_lane
from shardwise.comm.limits import Limits
from shardwise.comm.link import CollectiveLink, Labels, Link, PeerLink
from shardwise.comm.local import LocalLink, readable
from shardwise.core.errors import PlanError, UsageError
from shardwise.core.topology import Level, Step, Topology
from shardwise.device import streams
from shardwise.device.abilities import separate_memory
from shardwise.device.choice import collective_backend, host_backend, process_group_options

_COLLECTIVES_WAIT = 2
"""Collectives of a device may take so many times longer. The control group notices a late rank
first, and its error names the rank. The device's backend can then only end the process (NCCL's
watchdog does), because what is enqueued on a stream cannot raise."""


@dataclass(frozen=True)
class Place:
    """This process in the grid."""

    rank: int
    topology: Topology

    @property
    def world(self) -> int:
        return self.topology.world


@dataclass
class Grid:
    """Everything that a model needs to communicate: lanes, links and the control group."""

    place: Place
    device: torch.device
    control: Control
    gathers: Lane
    reduces: Lane
    outer: Lane
    """Runs the last hop of encoded reductions (see ``comm/descend.py``), and refreshes."""
    labels: Labels
    limit_s: float
    _links: dict[tuple[str, Step], Link] = field(default_factory=dict)
    _groups: list[dist.ProcessGroup] = field(default_factory=list)
    _everyone: dist.ProcessGroup | None = None
    """For broadcasts; made by the first."""

    @classmethod
    def build(cls, place: Place, device: torch.device, limits: Limits | None = None) -> "Grid":
        limits = limits or Limits()
        world = place.world
        control = Control(world, place.rank, limits.patience_s)
        watch.start(control, limits.timeout_s, limits.folder)
        return cls(
            place=place,
            device=device,
            control=control,
            gathers=make_lane("gather", device, world),
            reduces=make_lane("reduce", device, world),
            outer=make_lane("outer", device, world),
            labels=Labels(),
            limit_s=limits.patience_s,
        )

    def connect(self, steps: Iterable[Step], outer: Iterable[Step] = ()) -> None:
        """Make the links of all ``steps``; every rank must call it with the same ones.

        Lanes run concurrently, so each has its own links; the outer lane only on its steps.
        """
        last = set(outer)
        for step in sorted(set(steps), key=lambda s: (s.stride, s.size)):
            ranks = step.group(self.place.rank)
            group = self._new_group(step)
            local = not separate_memory(self.device) and readable(group, ranks, self.place.rank)
            lanes = ("gather", "reduce", "outer") if step in last else ("gather", "reduce")
            for lane in lanes:
                if not local and lane != "gather":
                    group = self._new_group(step)
                self._links[lane, step] = self._make_link(group, ranks, local=local)

    @property
    def link_kinds(self) -> dict[str, str]:
        """The kind of the links of each level, by the level's name."""
        kinds: dict[str, set[str]] = {}
        for (_, step), link in self._links.items():
            if step.size > 1:
                kinds.setdefault(step.level, set()).add(link.kind)
        return {level: " and ".join(sorted(found)) for level, found in kinds.items()}

    def link(self, lane: str, step: Step) -> Link:
        return self._links[lane, step]

    def order_after_transfers(self) -> None:
        """What the caller enqueues next comes after all gathers and refreshes."""
        for ticket in (self.gathers.so_far(), self.outer.so_far()):
            ticket.order_stream()

    def block_host_until_idle(self) -> None:
        """The host waits until no gather or refresh, and nothing that the caller enqueued before,
        uses memory: the host may then write values that rest in its own."""
        self.order_after_transfers()
        streams.block_host_until(streams.mark(self.device))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0; on the device through its backend."""
        if not separate_memory(tensor.device):
            self.control.broadcast(tensor)
        elif self.place.world > 1:
            if self._everyone is None:
                self._everyone = self._group_of(range(self.place.world))
            dist.broadcast(tensor, src=0, group=self._everyone)

    def end_lanes(self) -> None:
        """End the threads of a model that is no longer referenced."""
        for lane in (self.gathers, self.reduces, self.outer):
            lane.close()

    def close(self) -> None:
        """End lanes, links and groups, in this order; collective."""
        self.end_lanes()
        for link in self._links.values():
            link.close()
        self._links.clear()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        self.control.close()

    def _make_link(self, group: dist.ProcessGroup, ranks: tuple[int, ...], *, local: bool) -> Link:
        rank = self.place.rank
        if separate_memory(self.device):
            return CollectiveLink(group, ranks, rank)
        kind = LocalLink if local else PeerLink
        return kind(group, ranks, rank, self.labels, self.limit_s)

    def _new_group(self, step: Step) -> dist.ProcessGroup:
        """This rank's process group for a step. All ranks make all groups of it, in the same order:
        a group made by its members alone would reuse the name of a destroyed one."""
        mine: dist.ProcessGroup | None = None
        for ranks in sorted({step.group(rank) for rank in range(self.place.world)}):
            group = self._group_of(ranks)
            if self.place.rank in ranks:
                mine = group
        assert mine is not None
        return mine

    def _group_of(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        members, limit, backend = list(ranks), timedelta(seconds=self.limit_s), host_backend()
        if separate_memory(self.device):
            limit, backend = limit * _COLLECTIVES_WAIT, collective_backend(self.device)
        group: dist.ProcessGroup = dist.new_group(members, backend=backend, timeout=limit)
        if self.place.rank in members:
            self._groups.append(group)
        return group


def find_place(levels: str | Topology | None, device: torch.device) -> Place:
    """The place of this process; if needed, initialises ``torch.distributed`` from the environment.

    Without torchrun's environment there is one rank. Levels come from the argument, otherwise from
    torchrun: ranks per node, and nodes.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(**process_group_options(device))
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    if levels is None:
        topology = _levels_of_torchrun(world)
    else:
        topology = levels if isinstance(levels, Topology) else Topology.parse(levels)
    if topology.world != world:
        raise PlanError(
            f"Levels {topology} describe {topology.world} ranks, but {world} "
            f"{'is' if world == 1 else 'are'} running; start {topology.world} or give other levels."
        )
    return Place(rank, topology)


def _levels_of_torchrun(world: int) -> Topology:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local < 1 or world % local:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={local} does not divide the {world} ranks; give levels explicitly, "
            "for example levels='world=%d'." % world
        )
    return Topology((Level("node", local), Level("world", world // local)))
