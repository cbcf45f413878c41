"""Keyword arguments in the library's messages are said as the options of the command that runs."""

import pytest

from scidata.cli.failures import in_options

OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in ("halo", "fields", "kind", "isel", "sel", "align", "steps", "sample_dim", "mesh", "shard", "part")
}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("halo={'latitude': 2} needs a mesh", "--halo latitude=2 needs a mesh"),
        ("halo={'latitude': (1, 2)}: too wide", "--halo latitude=1:2: too wide"),
        ("choose one with fields=", "choose one with --fields"),
        ("choose with fields=[...]; or not", "choose with --fields; or not"),
        ("choose fields=['u', 'v'].", "choose --fields u,v."),
        ("say kind='grid' (--kind grid), to take", "say --kind grid, to take"),
        ("shard={'y': 'domain'} (--shard y), and name it with sample_dim", "--shard y, and name it with --sample-dim"),
        ("read them whole with sample_dim=False", "read them whole with --sample-dim none"),
        ("halo=0.5 is a radius", "--halo 0.5 is a radius"),
        ("with halo=1.", "with --halo 1."),
        ("halo names dimension 'latitud'", "--halo names dimension 'latitud'"),
        ("a.zarr: isel: no field has it", "a.zarr: --isel: no field has it"),
        ("isel of 'level': index 9 is out of range", "--isel of 'level': index 9 is out of range"),
        (
            "crop to 20 rows with isel, or choose another align",
            "crop to 20 rows with --isel, or choose another --align",
        ),
        ("kind must be 'mesh'", "--kind must be 'mesh'"),
        ("'time' cannot have a halo; use steps", "'time' cannot have a halo; use --steps"),
        ("sel={'x': slice(5, None, None)} selects", "--sel x=5: selects"),
        (
            "sel of 'y': nothing lies there; labels descend: slice(60, -20)",
            "--sel of 'y': nothing lies there; labels descend: 60:-20",
        ),
        # no arguments of the command
        (
            "the halo of a mesh, with fields of kind mesh, in steps",
            "the halo of a mesh, with fields of kind mesh, in steps",
        ),
        ("allow_external=True reads it", "allow_external=True reads it"),
        ("attribute mesh='x' of u", "attribute mesh='x' of u"),
        ("https://host/a?kind=grid&part=2: no such file", "https://host/a?kind=grid&part=2: no such file"),
        ("/data/year=2015/part=0/x.nc: is empty", "/data/year=2015/part=0/x.nc: is empty"),
        ("part=0/x.nc: is empty", "part=0/x.nc: is empty"),
        ("subkind=3, no_halo=2", "subkind=3, no_halo=2"),
        ("my.sample_dim and sample_dims", "my.sample_dim and sample_dims"),
    ],
)
def test_options(message, says):
    assert in_options(message, OPTIONS) == says


def test_without_options_nothing_changes():
    assert in_options("halo=2", {}) == "halo=2"
