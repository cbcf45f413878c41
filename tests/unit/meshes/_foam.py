"""Cases of OpenFOAM as it writes them: a row of boxes along x, raw or cut between two processors."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np


def head(kind: str, name: str, *, binary: bool, label: int, note: str = "") -> bytes:
    arch = f'    arch        "LSB;label={label};scalar=64";\n'
    entry = f'    note        "{note}";\n' if note else ""
    return (
        f"/* of a test */\nFoamFile\n{{\n    version     2.0;\n    format      {'binary' if binary else 'ascii'};\n"
        f"{arch}    class       {kind};\n{entry}    object      {name};\n}}\n// * * * //\n\n"
    ).encode()


def items(values: np.ndarray, *, binary: bool, label: int) -> bytes:
    if values.dtype.kind == "i":
        values = values.astype(f"<i{label // 8}")
    if binary:
        return f"{len(values)}\n(".encode() + values.tobytes() + b")\n"
    rows = [f"({' '.join(map(repr, row))})" if isinstance(row, list) else repr(row) for row in values.tolist()]
    return (f"{len(values)}\n(\n" + "\n".join(rows) + "\n)\n").encode()


def boxes(first: int, num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Points, faces, owner and neighbour of boxes; box ``i`` lies from ``x = i**1.5`` to the next."""
    x = np.arange(first, first + num + 1) ** 1.5
    points = np.array([[a, y, z] for a in x for y, z in ((0, 0), (1, 0), (1, 1), (0, 1))], float)
    corner = np.arange(4 * (num + 1)).reshape(-1, 4)
    inner = [corner[i] for i in range(1, num)]
    sides = [
        [corner[i, k], corner[i, (k + 1) % 4], corner[i + 1, (k + 1) % 4], corner[i + 1, k]]
        for k in range(4) for i in range(num)
    ]  # fmt: skip
    faces = np.array([*inner, corner[0][::-1], corner[-1], *sides])
    owner = np.array([*range(num - 1), 0, num - 1, *(list(range(num)) * 4)])
    return points, faces, owner, np.arange(1, num)


def write_mesh(
    folder: Path, first: int, num: int, *, binary: bool, label: int, between: tuple[int, int] | None = None
) -> None:
    """Write a polyMesh; ``between``: this processor and the one whose boxes follow (or precede, if lower)."""
    folder.mkdir(parents=True)
    points, faces, owner, neighbour = boxes(first, num)
    note = f"nPoints: {len(points)} nCells: {num} nFaces: {len(owner)} nInternalFaces: {len(neighbour)}"
    how = {"binary": binary, "label": label}
    (folder / "points").write_bytes(head("vectorField", "points", **how) + items(points, **how))
    (folder / "owner").write_bytes(head("labelList", "owner", **how, note=note) + items(owner, **how))
    (folder / "neighbour").write_bytes(head("labelList", "neighbour", **how, note=note) + items(neighbour, **how))
    if binary:
        lists = items(np.arange(len(faces) + 1) * 4, **how) + items(faces.ravel(), **how)
        (folder / "faces").write_bytes(head("faceCompactList", "faces", **how) + lists)
    else:
        lines = "\n".join(f"4({' '.join(map(str, face))})" for face in faces.tolist())
        (folder / "faces").write_bytes(head("faceList", "faces", **how) + f"{len(faces)}\n(\n{lines}\n)\n".encode())
    patches = {"walls": ("wall", len(neighbour), len(owner) - len(neighbour), "")}
    if between is not None:
        start = len(neighbour) + (1 if between[0] < between[1] else 0)
        to = f"myProcNo {between[0]}; neighbProcNo {between[1]};"
        patches = {f"procBoundary{between[0]}to{between[1]}": ("processor", start, 1, to)}
    text = "".join(
        f"{n}\n{{ type {t}; nFaces {k}; startFace {s}; {more} }}\n" for n, (t, s, k, more) in patches.items()
    )
    (folder / "boundary").write_bytes(
        head("polyBoundaryMesh", "boundary", **how) + f"{len(patches)}\n(\n{text})\n".encode()
    )


def write_field(path: Path, kind: str, values: np.ndarray, *, binary: bool, label: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    of = {"volScalarField": "scalar", "volVectorField": "vector"}[kind]
    how = {"binary": binary, "label": label}
    path.write_bytes(
        head(kind, path.name, **how)
        + f"dimensions      [0 1 -1 0 0 0 0];\n\ninternalField   nonuniform List<{of}>\n".encode()
        + items(values, **how)
        + b";\n\nboundaryField\n{\n    walls { type zeroGradient; }\n}\n"
    )


def pack(folder: Path) -> None:
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
