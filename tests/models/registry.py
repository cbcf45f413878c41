"""The libraries, and the cases of each."""

from __future__ import annotations

import importlib
import importlib.util
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
}


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(LIBRARIES[library]) is not None


@cache
def cases_of(library: str) -> dict[str, Case]:
    """Return a library's cases by name; those of "timm" are in ``on_timm.py``."""
    cases: dict[str, Case] = importlib.import_module(f"tests.models.on_{library}").cases()
    return cases
