"""The oracle of parts: read all of them and put them back where the source has them."""

import numpy as np

from scidata.core.options import ReadOptions
from scidata.meshes.order.cells import edges_of_cells
from scidata.meshes.order.faces import edges_across_faces
from scidata.meshes.order.ids import ranges
from scidata.meshes.order.neighbours import near_edges
from scidata.meshes.order.positions import cell_centres
from scidata.meshes.sample import parse_edges
from scidata.meshes.samples import read_samples
from scidata.store.format.store import open_store
from scidata.store.reading.reader import StoreReader


def khop_ghosts(indptr, src, start, stop, num_hops):
    """The nodes that ``[start, stop)`` does not own and that reach it along at most so many edges of a whole graph."""

    reached = np.arange(start, stop)
    for _ in range(num_hops):
        reached = np.union1d(reached, src[ranges(indptr[reached], indptr[reached + 1])])
    return reached[(reached < start) | (reached >= stop)]


def random_bounds(num_rows, num_parts, rng):
    """Uneven bounds, with empty parts among them."""
    return np.sort(np.r_[0, rng.integers(0, num_rows + 1, num_parts - 1), num_rows])


def check_round_trip(raw_path, store, num_parts, *, bounds="even", halo=1, sample=None, **options):
    """Read every part and put owned rows, edges and cells back where the source has them."""
    options.setdefault("sample_dim", False)  # samples as stored, all their times
    raw = sample if sample is not None else read_samples(raw_path)[0]
    options = ReadOptions(bounds=bounds, halo=halo, ghosts="disk", **options)
    reader = StoreReader(store, options, num_parts=num_parts)
    parts = [reader.read(0, p) for p in range(num_parts)]
    cut = sum(plan.bytes_fetched for plans in reader._partition(0)[1].values() for plan in plans)  # read once
    for p in {0, num_parts // 2, num_parts - 1}:
        plan = reader.plan(0, p)
        assert plan.exact
        assert plan.bytes_fetched == parts[p].stats.bytes_fetched + cut
    owned = {e: np.concatenate([reader.original_id(0, p, e) for p in range(num_parts)]) for e in reader.entities}
    for entity, ids in owned.items():
        times = 2 if entity == "edge" and raw.mesh_edges is not None else 1  # both directions of an edge of the mesh
        expected = np.repeat(np.arange(len(ids) // times), times)
        assert np.array_equal(np.sort(ids), expected), f"{entity}: a row is missing or there too often"
    for name in reader.fields:
        info = reader.info(name)
        pieces = []
        for part in parts:
            rows = part.index_maps[info.entity]
            values = np.moveaxis(part.fields[name], info.entity_dim, 0)
            assert len(values) == rows.num_local
            pieces.append(values[: rows.num_owned])
        stored = np.concatenate(pieces)
        if name == "orientation" and raw.mesh_edges is not None:
            continue  # made by the store: its own test has it
        source = raw.fields.get(name) or raw.fields.get(info.path)  # names may be longer there
        expected = np.moveaxis(positions_of(raw) if name == "pos" else source.read(), info.entity_dim, 0)
        assert stored.astype(expected.dtype).tobytes() == expected[owned[info.entity]].tobytes(), name
        for part in parts:
            rows = part.index_maps[info.entity]
            values = np.moveaxis(part.fields[name], info.entity_dim, 0)
            assert np.array_equal(values[rows.num_owned :], stored[rows.ghosts], equal_nan=True), name
    check_edges(reader, parts, owned, raw)
    check_cells(reader, parts, owned, raw)
    return reader, parts


def check_edges(reader, parts, owned, raw):
    if "edge" not in reader.entities:
        return
    nodes, pairs = owned[reader.entity], []
    whole = open_store(reader.path)
    indptr, src = whole.read(0, "csr/indptr"), whole.read(0, "csr/src")
    for part in parts:
        rows, edges = part.index_maps[reader.entity], part.index_maps["edge"]
        assert part.relations["edge"].shape == (2, edges.num_owned)
        assert not part.relations["edge"].size or part.relations["edge"][1].max() < rows.num_owned
        assert np.all(np.diff(part.relations["edge"][1]) >= 0)
        pairs.append(nodes[rows.to_global(part.relations["edge"])])
        hops = khop_ghosts(indptr, src, *rows.owned, reader.num_hops)
        assert np.isin(hops, rows.ghosts).all()
        inner = khop_ghosts(indptr, src, *rows.owned, reader.num_hops - 1)
        far = np.concatenate([np.arange(indptr[i], indptr[i + 1]) for i in inner] or [np.empty(0, int)])
        assert np.array_equal(edges.ghosts, far)
        dst = np.searchsorted(indptr, far, side="right") - 1
        assert np.array_equal(rows.to_global(part.far_relations["edge"]), np.stack([src[far], dst]))
    pairs = np.concatenate(pairs, axis=1)
    if raw.edges == "edge_index":
        assert np.array_equal(pairs, raw.edge_index[:, owned["edge"]])
    else:
        made = edges_made(raw)
        assert np.array_equal(pairs[:, np.lexsort(pairs)], made[:, np.lexsort(made)])
        assert raw.edges.startswith("knn") or len(np.unique(pairs, axis=1).T) == len(pairs.T)


def edges_made(raw):
    """Return the edges that a store makes of a raw sample, in the source's numbering."""
    cells, (rule, number) = raw.cells, parse_edges(raw.edges)
    points = positions_of(raw)
    if rule in ("cells", "faces"):
        make = edges_of_cells if rule == "cells" else edges_across_faces
        return make(cells, raw.num_nodes)
    return near_edges(points, rule, number, on_sphere=raw.on_sphere, period=raw.period)


def positions_of(raw):
    if raw.entity != "cell":
        return raw.points
    return cell_centres(raw.points, raw.cells, on_sphere=raw.on_sphere, period=raw.period)


def check_cells(reader, parts, owned, raw):
    if "cell" not in reader.entities or reader.entity == "cell":
        return
    nodes = owned[reader.entity]
    for p, part in enumerate(parts):
        rows = part.index_maps[reader.entity]
        for i, cell in enumerate(reader.original_id(0, p, "cell")):
            corners = part.cells.connectivity[part.cells.offsets[i] : part.cells.offsets[i + 1]]
            a, b = raw.cells.offsets[cell : cell + 2]
            assert np.array_equal(nodes[rows.to_global(corners)], raw.cells.connectivity[a:b])
            assert part.cells.types[i] == raw.cells.cell_type[cell]
