"""Writes trees of CGNS as HDF5 and as ADF."""

import h5py
import numpy as np

CODES = {"int32": "I4", "int64": "I8", "float32": "R4", "float64": "R8", "int8": "C1"}


class Tree(dict):
    """A node: what it is, its values with the first index changing first, and the nodes below it."""

    def __init__(self, label, values=None, **children):
        super().__init__(children)
        self.label = label
        text = isinstance(values, str)
        self.values = np.frombuffer(values.encode(), "i1") if text else None if values is None else np.asarray(values)

    @property
    def kind(self):
        return "MT" if self.values is None else CODES[self.values.dtype.name]


def tree(bases, version=4.2):
    return Tree("Root", CGNSLibraryVersion=Tree("CGNSLibraryVersion_t", np.array([version], "f4")), **bases)


def structured(points, **children):
    """A zone of ``(ni, nj, nk, 3)`` points."""
    shape = np.array(points.shape[:3], "i4")
    return _zone("Structured", np.stack([shape, shape - 1, shape * 0], axis=1), points.reshape(-1, 3, order="F"), shape,
                 children)  # fmt: skip


def unstructured(points, num_cells, **children):
    return _zone("Unstructured", np.array([[len(points), num_cells, 0]], "i4"), points, [len(points)], children)


def _zone(kind, sizes, points, shape, children):
    coordinates = {
        f"Coordinate{x}": Tree("DataArray_t", points[:, i].reshape(shape, order="F")) for i, x in enumerate("XYZ")
    }
    grid = Tree("GridCoordinates_t", **coordinates)
    return Tree("Zone_t", sizes, ZoneType=Tree("ZoneType_t", kind), GridCoordinates=grid, **children)


def section(code, first, connectivity, num, starts=None, **children):
    if starts is not None:
        children["ElementStartOffset"] = Tree("DataArray_t", np.array(starts, "i4"))
    return Tree("Elements_t", np.array([code, 0], "i4"), ElementRange=array([first, first + num - 1], "IndexRange_t"),
                ElementConnectivity=array(connectivity), **children)  # fmt: skip


def array(values, label="DataArray_t"):
    values = np.asarray(values)
    return Tree(label, values.astype("i4") if values.dtype.kind == "i" else values)


def one_to_one(zone, label="GridConnectivity1to1_t", **children):
    if label == "GridConnectivity_t":
        children["GridConnectivityType"] = Tree("GridConnectivityType_t", "Abutting1to1")
    return Tree(label, zone, **children)


def write_hdf5(path, root):
    def put(group, node, name):
        group.attrs.update(
            {"name": np.array(name, "S33"), "label": np.array(node.label, "S33"), "type": np.array(node.kind, "S3")}
        )
        if node.values is not None:
            group[" data"] = node.values.T
        for below, child in node.items():
            put(group.create_group(below, track_order=True), child, below)

    with h5py.File(path, "w", track_order=True) as file:
        put(file, root, "HDF5 MotherNode")
        file[" format"] = np.frombuffer(b"IEEE_LITTLE_32\0", "i1")
        file[" hdf5version"] = np.frombuffer(b"HDF5 Version 1.8.17".ljust(33, b"\0"), "i1")


def write_adf(path, root, binary=False):
    """Write ADF of version A, whose addresses are text, or B; each node with its list and one piece, or two."""
    data = bytearray(266)

    def number(value, length=8):
        return value.to_bytes(length, "little") if binary else b"%0*X" % (length, value)

    def address(at):
        return number(at // 4096) + number(at % 4096, 4)

    def put(node, name):
        at, values = len(data), b"" if node.values is None else node.values.tobytes(order="F")
        data.extend(bytes(246))
        places = [(below, put(child, below)) for below, child in node.items()]
        table = len(data)
        end = table + 16 + 44 * len(places)
        data.extend(b"SNTb" + address(end))
        for below, place in places:
            data.extend(below.ljust(32).encode() + address(place))
        data.extend(b"snTE")
        pieces = []
        for piece in (values[:8], values[8:]) if len(values) > 64 else (values,):
            pieces.append((len(data), len(data) + 16 + len(piece)))
            data.extend(b"DaTa" + address(pieces[-1][1]) + piece + b"dEnD")
        first = pieces[0][0]
        if len(pieces) > 1:
            first = len(data)
            data.extend(b"DCtb" + address(first + 16 + 24 * len(pieces)))
            data.extend(b"".join(address(begin) + address(end) for begin, end in pieces) + b"dcTE")
        shape = [] if node.values is None else list(node.values.shape)
        data[at : at + 246] = (
            b"NoDe" + name.ljust(32).encode() + node.label.ljust(32).encode()
            + b"%08X%08X" % (len(places), len(places)) + address(table) + node.kind.ljust(32).encode()
            + b"%02X" % len(shape) + b"".join(number(n) for n in shape + [0] * (12 - len(shape)))
            + b"%04X" % (len(pieces) if len(values) else 0) + address(first if len(values) else 0) + b"TaiL"
        )  # fmt: skip
        return at

    put(root, "ADF MotherNode")
    none = number(0) + number(4096, 4)
    date = b"Tue Jul 24 09:19:55 2007    "
    data[:266] = (
        (b"\xc0\xa8\xa3\xa9ADF Database Version " + (b"B02012>" if binary else b"A02011>")).ljust(32, b"\0")
        + b"AdF0" + date + b"AdF1" + date + b"AdF2L" + (b"L" if binary else b"B")
        + b"AdF3010204080408080808080808" + b"AdF4" + address(266) + address(len(data)) + address(186) + none
        + b"AdF5" + b"fCbt" + 6 * none + b"Fcte"
    )[:266].ljust(266, b"\0")  # fmt: skip
    path.write_bytes(data)
