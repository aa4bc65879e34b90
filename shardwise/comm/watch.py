"""Begins to watch the other ranks of a job: ranks learn of each other, and their hearts start."""

import logging
import os
import secrets
import time
from pathlib import Path

from shardwise.comm import alive
from shardwise.comm.alarm import Member
from shardwise.comm.control import Control
from shardwise.comm.courier import TOKEN_BYTES, Courier
from shardwise.comm.heart import Heart
from shardwise.comm.local import host_identity
from shardwise.core.failure import name_ranks
from shardwise.core.flight import RECORDER
from shardwise.core.processes import process_id

_log = logging.getLogger("shardwise")


def start(
    control: Control,
    timeout_s: float,
    folder: str | os.PathLike[str] | None = None,
    *,
    prints: bool | None = None,
) -> None:
    """Begins to watch the other ranks, or goes on with another time limit; collective.

    - ``folder``: gets the report and the flight recorders if a rank fails.
    - ``prints``: whether the report is printed as well; a launcher may want to do that itself.
    """
    alive.report_to(folder, prints=prints)
    if control.world == 1:
        return
    heart = alive.current()
    goes_on = heart is not None and heart.place == (control.rank, control.world)
    if all(control.exchange_objects(goes_on)):
        assert heart is not None
        heart.timeout_s = timeout_s
        return
    alive.leave()
    host, pid, rank = host_identity(), os.getpid(), control.rank
    about = [secrets.token_hex(TOKEN_BYTES // 2), time.strftime("%Y%m%d-%H%M%S"), host]
    told = control.exchange_objects(about)
    token, stamp = str(told[0][0]).encode(), str(told[0][1])
    courier = Courier(rank, token, one_host=len({there for _, _, there in told}) == 1)
    ring = RECORDER.share(rank)
    try:
        me = Member(rank, host, process_id(pid), ring)
        members: list[Member] = []
        for member, addresses in control.exchange_objects((me, courier.addresses)):
            courier.introduce(member.rank, addresses)
            members.append(member)
        heart = Heart(me, members, courier, timeout_s, alive.publish)
        control.exchange_objects(None)  # all have mapped what they need
    finally:
        Path(ring).unlink(missing_ok=True)
    alive.adopt(heart, stamp)
    heart.start()
    if strangers := heart.meet():
        _log.warning(
            "Rank %d hears nothing of %s by UDP (a firewall?): that they fail is only noticed by "
            "the collectives' own limits.",
            rank,
            name_ranks(strangers),
        )
