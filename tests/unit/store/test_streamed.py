"""Manifests whose samples are parsed one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scidata.store.format import streamed
from scidata.store.format.streamed import Items, parse_object

# documents stay small, of which many are drawn in a second; what JSON is written with is in some texts, too
TEXT = st.text(max_size=5) | st.text('"\\{}[],:', max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), max_size=4)
REST = st.dictionaries(TEXT, VALUES, max_size=4)


@given(REST, ITEMS, st.sampled_from([None, 1, 4]))
def test_the_same_as_json(rest, items, indent):
    data = rest | {"samples": items}
    found = parse_object(json.dumps(data, indent=indent), "samples")
    assert isinstance(found["samples"], Items if items else list)
    assert {key: list(value) if key == "samples" else value for key, value in found.items()} == data
    assert len(found["samples"]) == len(items)


@given(REST, ITEMS, st.data())
def test_what_json_refuses_is_refused(rest, items, data):
    text = json.dumps(rest | {"samples": items})
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.sampled_from(["", "}", "]", ",", '"', "x"])) + text[at + 1 :]
    try:
        wanted = json.loads(broken)
    except ValueError:
        with pytest.raises(
            ValueError, match=r"expect|Expect|delimiter|follows|Unterminated|Invalid|Illegal|property name"
        ):
            parse_object(broken, "samples")
        return
    if isinstance(wanted, dict) and not (isinstance(wanted.get("samples"), list) and not all(wanted["samples"])):
        found = parse_object(broken, "samples")
        assert {k: list(v) if isinstance(v, Items) else v for k, v in found.items()} == wanted


def test_values_are_bounded(monkeypatch):
    monkeypatch.setattr(streamed, "MAX_VALUE", 100)
    item = {"name": "x" * 60}
    text = json.dumps({"a": 1, "samples": [item] * 1000, "b": 2})
    found = parse_object(text, "samples")
    assert list(found["samples"]) == [item] * 1000
    assert found["b"] == 2
    for large in ({"a": "x" * 300}, {"samples": [{"a": "x" * 300}]}):
        with pytest.raises(ValueError, match="Unterminated"):
            parse_object(json.dumps(large), "samples")


@pytest.mark.parametrize("body", ['"samples": [{}', '"samples": [{"a": [[]', '"settings": [[]'])
def test_a_document_made_to_do_harm(tmp_path, body):
    """64 MiB that would be gigabytes as objects end in a named error, with a quarter of that."""
    folder = tmp_path / "bomb.store"
    folder.mkdir()
    (folder / "manifest.json").write_text("{" + body + ",[]" * (64 << 20 >> 2) + "]")
    script = """
import resource, sys
import scidata
from scidata.store.format.store import open_store
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + (600 << 20), used + (600 << 20)))
try:
    open_store(sys.argv[1]).samples
except scidata.errors.CorruptDataError as e:
    print("named:", e)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], check=False, capture_output=True, text=True, env=environment
    )
    assert done.stdout.startswith("named:"), done.stderr[-500:]
