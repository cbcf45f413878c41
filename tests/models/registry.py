"""The libraries, and the cases of each."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache

from tests.models.cases import Case

#: What to import for each library, by the module of its cases.
LIBRARIES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "smp": "segmentation_models_pytorch",
    "neuralop": "neuralop",
    "harmonics": "torch_harmonics",
    "pyg": "torch_geometric",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "physicsnemo": "physicsnemo",
    "others": "monai",
    "weather": "credit",
    "vits": "vit_pytorch",
    "flows": "normflows",
    "solvers": "the_well",
    "pina": "pina",
    "atoms": "mace",
    "snapshots": "",  # a folder that SCIDATA_SNAPSHOTS names
}


def is_installed(library: str) -> bool:
    module = LIBRARIES[library]
    return importlib.util.find_spec(module) is not None if module else "SCIDATA_SNAPSHOTS" in os.environ


@cache
def cases_of(library: str) -> dict[str, Case]:
    """Return a library's cases by name; those of "timm" are in ``on_timm.py``."""
    cases: dict[str, Case] = importlib.import_module(f"tests.models.on_{library}").cases()
    return cases
