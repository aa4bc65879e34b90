"""The simulated device as an installed backend of torch: processes that import torch then have it.

Torch loads the backends that installed distributions offer, as it does for real devices that are
not its own. So whole commands, with all processes they start, run on simulated devices.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
_DEVICES = "SHARDWISE_SIM_DEVICES"


def environment(folder: Path, devices: int) -> dict[str, str]:
    """What processes need in their environment; ``folder`` is where the distribution is put."""
    info = folder / "simulated_device-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-device\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nsim = tests.accelerator.device.plugin:start\n"
    )
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",  # no folder of the caller's shadows a module
        _DEVICES: str(devices),
    }


def start() -> None:
    """What torch calls at the end of its import."""
    from tests.accelerator.device import ccl, sim  # noqa: F401

    sim.set_device_count(int(os.environ[_DEVICES]))
