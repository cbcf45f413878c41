"""The accelerator that these tests run on: this machine's, or the stand-in of ``tests/sim_device``.

Without either they are skipped; ``test_stand_in.py`` runs them all in a process that has the stand-in.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from scidata.device_mesh.devices import accelerator
from tests import sim_device

if os.environ.get(sim_device.CHOSEN):  # also in ranks, and other processes that tests start
    sim_device.load()

KIND = accelerator() or "none"
if KIND == "none":
    pytest.skip("needs an accelerator; test_stand_in.py runs this on one made of threads", allow_module_level=True)

DEVICE = torch.device(KIND, 0)
IS_SIM = KIND == "sim"
current_stream = torch.accelerator.current_stream


def busy(seconds: float) -> None:
    """Keep the current stream busy, so that a missing wait shows; does not wait for it."""
    if IS_SIM:
        torch.ops.sim.busy(int(seconds * 1e6))
    elif KIND == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))
    else:
        values = torch.ones(2048, 2048, device=DEVICE)
        began = time.monotonic()
        while time.monotonic() - began < seconds / 10:  # some thousand products, which are faster issued than done
            values = values @ values
