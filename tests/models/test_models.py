"""A share of the public models that are installed; ``python -m tests.models`` runs all."""

import pytest

from tests.models.__main__ import all_of
from tests.models.registry import LIBRARIES, cases_of

#: Quick ones, of different kinds.
SHARE = {
    "timm": ["test_vit", "test_convnext", "test_maxvit", "swin_tiny_patch4_window7_224"],
    "torchvision": ["vit dropout", "swin stochastic depth", "fcn"],
    "smp": ["Unet"],
    "neuralop": ["UNO", "FNO instance norm", "SFNO"],
    "harmonics": ["RealSHT and back, equiangular"],
    "transformers": ["Bert dropout", "Llama", "Segformer"],
    "diffusers": ["UNet2DCondition", "DiT"],
}
#: Of PyG, what needs to know the order of edges, or values on all ranks (docs/compatibility/models.md).
REFUSED = {
    *("convolutions: SuperGATConv", "models: GraphUNet"),
    *("models: GroupAddRev", "pools: ASAPooling", "pools: ClusterPooling", "pools: EdgePooling"),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("library", [name for name in LIBRARIES if name not in ("physicsnemo", "snapshots")])
def test_nothing_is_wrong(library):
    pytest.importorskip(LIBRARIES[library])
    names = SHARE.get(library) or list(cases_of(library))[::8]
    found = list(all_of(library, names, ["three, one empty"]))
    assert [each.name for each in found] == names
    fine = {name: ("right", "not run", "refused") if name in REFUSED else ("right", "not run") for name in names}
    assert not [each for each in found if each.kind not in fine[each.name]]
    assert any(each.kind == "right" for each in found)
