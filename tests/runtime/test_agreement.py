"""What ranks are told when they disagree about a use beyond the recorded order."""

from types import SimpleNamespace

import pytest
import torch

from shardwise.core.errors import SyncError
from shardwise.runtime import agreement
from shardwise.runtime.agreement import Agreement


@pytest.mark.parametrize(
    ("other", "wants"),
    [
        (1, "rank 1 wants 'b'"),
        (agreement._END, "rank 1 wants nothing more"),
        (agreement._REDUCES + 1, "rank 1 wants to reduce 'b'"),
    ],
)
def test_disagreement_names_what_each_rank_wants(other, wants):
    units = [SimpleNamespace(index=i, name=name) for i, name in enumerate("ab")]
    control = SimpleNamespace(
        exchange=lambda mine, what: torch.stack([mine, torch.tensor([other])])
    )
    with pytest.raises(SyncError, match=f"rank 0 wants 'a', {wants}"):
        Agreement(control, units).on_extra_use(units[0])
