"""A folder with one file per sample, named after its source, in the source's order: files, layout and writer."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Shard

from scidata.core.apart import check_apart
from scidata.core.checks import check_int
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.output.background import Background
from scidata.data.output.fields import OutputField, OutputLayout, OutputVariable
from scidata.data.output.like import RowsLike
from scidata.data.output.part_writer import Part
from scidata.data.output.places import LocalPlace
from scidata.data.output.routes import Route
from scidata.data.output.sample_formats import TEMPORARY, NewArray, SourceFile, format_of, settle
from scidata.data.output.sample_series import write_series
from scidata.data.output.vtkhdf_output import GROUPS
from scidata.data.output.writer import Writer
from scidata.errors import ConfigError, RefusedError, SourceChangedError
from scidata.meshes.formats.base import base_name
from scidata.meshes.formats.foam import FoamSource, is_case
from scidata.meshes.formats.foam_files import COMPONENTS
from scidata.shard import ShardTensor
from scidata.sources.collections import parts_of
from scidata.sources.groups import split_group
from scidata.store.format.durable import remove
from scidata.store.partitioning.inputs import difference
from scidata.store.raw_points.windows_reader import WindowsReader

_READING = ("kind", "points", "topology")  # settings of a store for reading its sources
_MAX_WRITING = 2  # samples whose rows wait to be written on their rank; bounds the memory
_WORD = re.compile(r"\w[\w.:+-]*")  # names in OpenFOAM
_END = -1  # placeholder for a sample's number
_ELSEWHERE = "name the folder that has it: create(topology=...)"


class FilesLike(RowsLike):
    """The files of a data set's samples, and their fields; see :func:`scidata.create`."""

    def __init__(
        self, ds: IrregularDataset[Any], fields: object, chosen: int | Sequence[int] | None, moved: str | None,
        kind: str | None,
    ) -> None:  # fmt: skip
        self.reader, self._kind, reader = ds.reader, kind, ds.reader
        if isinstance(reader, WindowsReader) or reader.kind == "hetero" or not len(ds):
            what = "its samples have no files of their own" if len(ds) else "it has no samples"
            raise ConfigError(f"create: {reader.path}: {what}; name one file, such as 'out.zarr'")
        given = range(len(ds)) if chosen is None else [chosen] if isinstance(chosen, int) else chosen
        self.chosen = sorted({check_int("create: sample", each) for each in given})
        if not self.chosen:
            raise ConfigError("create: sample=[] names none of the samples, and there would be nothing to write")
        for each in self.chosen:
            if not 0 <= each < len(ds):
                raise ConfigError(f"create: sample={each} is out of range: there are {len(ds)} samples, from 0 on")
        super().__init__(ds, fields, "source", 0, None)
        locate = reader.numbering.locate
        self._records = {stored: reader.store.sample(stored).inputs for stored, _ in map(locate, self.chosen)}
        self._paths, self._same = self._found(moved), set[int]()
        self._cases: dict[int, tuple[str, list[str]]] = {}  # of stored samples that are one: its folder, and its times
        self.names = self._named()

    def _found(self, moved: str | None) -> dict[int, tuple[str, ...]]:
        """Return the files of each stored sample; the topology's file comes first."""
        reader, found = self._reader, {}
        for stored, records in self._records.items():
            raw = () if records else (reader.sources_of(reader.numbering.firsts[stored])[0].path,)
            found[stored] = reader.inputs_of(stored) or raw
        if moved is not None:
            common = os.path.commonpath([os.path.dirname(path) for paths in found.values() for path in paths] or [""])
            for stored, paths in found.items():
                names = [os.path.relpath(path, common) for path in paths]  # an older store has only those of files
                names = names or [each.name for each in self._records[stored]]
                found[stored] = tuple([os.path.join(moved, name) for name in names])
        for stored, paths in found.items():
            if not paths or "://" in paths[0]:
                raise ConfigError(
                    f"{reader.path}: sample {stored}: nothing says where its file lies on this machine; {_ELSEWHERE}"
                )
        return found

    def _named(self) -> dict[int, str]:
        numbering = self._reader.numbering
        names = {stored: self._reader.store.sample(stored).name for stored in self._paths}
        is_unique, found = len(set(map(str.lower, names.values()))) == len(names), dict[int, str]()
        folders: dict[str, str] = {}  # of cases, by the names of theirs in the output
        for index in self.chosen:
            stored, step = numbering.locate(index)
            name, num = names[stored], numbering.firsts[stored + 1] - numbering.firsts[stored]
            if os.path.basename(name) != name or name.startswith("."):
                raise RefusedError(f"{self._reader.path}: sample {stored} is named {name!r}, which is no file's name")
            name = name if is_unique else f"{stored:06d}_{name}"  # of joined stores
            if (case := self._case(stored, num)) is not None:
                time, own = case[1][step], os.path.basename(case[0])
                if os.path.basename(os.path.abspath(self._paths[stored][0])) == time:  # the sample is named after it
                    name = name.removesuffix(os.path.splitext(time)[0]).rstrip("_")
                    name = own if not name or name.isdigit() else name
                if folders.setdefault(name.lower(), case[0]) != case[0] or f"{name}/{time}" in found.values():
                    name = f"{stored:06d}_{name}"
                found[index] = f"{name}/{time}"
                continue
            suffix = format_of(self._paths[stored][0], self._kind)[0]
            name = re.sub(r"\.(cas|msh|dat)$", "", name) if suffix == ".dat.h5" else name
            name += "" if num == 1 else f"_{step:0{max(4, len(str(num - 1)))}d}"
            found[index] = name + suffix
        return found

    def _case(self, stored: int, num: int) -> tuple[str, list[str]] | None:
        """Return the folder and the ``num`` times of a stored sample's OpenFOAM case, if fields are added to it."""
        path = self._paths[stored][0]
        if self._kind is None and not os.path.lexists(path) and split_group(path) is None:
            raise _gone(path, stored)
        if self._kind is None and stored not in self._cases and is_case(path):
            region: Any = self._reader.store.sample(stored).settings.get("topology")
            case = FoamSource(path, region)
            if len(case.times) != num:
                raise _changed(path, f"it has {len(case.times)} times, and had {num}")
            self._cases[stored] = case.case, case.times
        return self._cases.get(stored)

    @property
    def has_cases(self) -> bool:
        """Whether fields are added to OpenFOAM cases."""
        return bool(self._cases)

    def steps(self, times: object) -> tuple[dict[str, int], list[OutputVariable]]:
        """Return the number of samples, and their files."""
        if times is not None:
            raise ConfigError("create: times: each sample has a file of its own; leave it out")
        return {"sample": len(self._ds)}, [OutputVariable.of("sample", np.array(list(self.names.values())), {})]

    def rows(self) -> None:
        """Return None: rows differ between samples."""

    def check(self, place: LocalPlace) -> None:
        """Raise if a source's file is missing, has another size, or would be replaced. For one process."""
        for stored, paths in self._paths.items():
            for path, recorded in zip(paths, self._records[stored] or (None,) * len(paths), strict=True):
                file, _ = split_group(path) or (path, "")
                if not os.path.lexists(file):
                    raise _gone(path, stored)
                size = None if is_case(path) or os.path.isdir(path) or recorded is None else recorded.size
                if size is not None and size != os.path.getsize(file):
                    raise _changed(path, f"it has {os.path.getsize(file)} bytes, and had {size}")
        for written in place.written:
            check_apart(written, [path for paths in self._paths.values() for path in paths], "the output")
            check_apart(written, [folder for folder, _ in self._cases.values()], "the output")

    def write(self, folder: str, index: int, arrays: Sequence[NewArray], *, is_packed: bool) -> None:
        """Write the file of a sample atomically; raises SourceChangedError if its source has changed."""
        (stored, step), name = self._reader.numbering.locate(index), self.names[index]
        path, records, settings = (
            self._paths[stored][0],
            self._records[stored],
            self._reader.sample_info(index).settings,
        )
        files = path, *(part for part in parts_of(path) if part != path)
        for file, record in zip(files, records if stored not in self._same else (), strict=False):
            if (how := difference(file, record)) is not None:
                raise _changed(file, how)
        self._same.add(stored)  # a source of many steps is compared once
        reading = {key: settings[key] for key in _READING if settings.get(key) is not None}
        if not records:
            reading = {"kind": "points", "points": self._reader.options.positions}
        if settings.get("entity") == "cell":  # points, too, are the source's cells then
            arrays = [replace(each, field=replace(each.field, entity="cell")) for each in arrays]
        made = os.path.join(folder, TEMPORARY + name.replace("/", "_"))
        source = SourceFile(path=path, reading=reading, step=step, others=self._paths[stored][1:])
        format_of(path, self._kind)[1](source, made, arrays, is_packed)
        settle(made, os.path.join(folder, os.path.dirname(name) or name))


def _gone(path: str, stored: int) -> FileNotFoundError:
    return FileNotFoundError(
        f"{path}: the file of sample {stored} is gone, whose mesh is written onto: put it back, or {_ELSEWHERE}"
    )


def _changed(path: str, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{path}: is not the file that the store was made of: {how}; partition it again, or {_ELSEWHERE}"
    )


class FilesOutput:
    """The output folder; the threads of all ranks write their samples' files into it."""

    def __init__(self, place: LocalPlace, files: FilesLike, layout: OutputLayout, *, is_packed: bool) -> None:
        self.files, self._place, self._is_packed = files, place, is_packed
        for field in layout.fields.values():
            if field.entity not in GROUPS:
                raise ConfigError(
                    f"create: field {field.name!r} lives on {field.entity!r}; files of samples have fields of nodes, "
                    "points and cells: write those of others to one file, such as 'out.zarr', or leave it out"
                )
            num = math.prod(field.shape) // max(1, field.shape[field.entity_dim])
            if files.has_cases and (num not in COMPONENTS.values() or not _WORD.fullmatch(base_name(field.name))):
                raise ConfigError(
                    f"create: field {field.name!r} of {num} components: OpenFOAM's fields have 1, 3, 6 or 9, and names "
                    "of letters, digits and _ . : + -; write others in parts, or to new files with format='vtu'"
                )

    def create(self) -> None:
        """Make the folder, or remove partial files of a killed run. For one process."""
        self.files.check(self._place)
        os.makedirs(self._place.target, exist_ok=True)
        for name in os.listdir(self._place.target):
            if name.startswith(TEMPORARY):
                remove(os.path.join(self._place.target, name))

    resume = create

    def open(self, run: str) -> None:
        """Do nothing, as :meth:`close`: all files are complete."""

    def close(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Write the file that lists all others. For one process."""
        write_series(self._place.target, self.files.names)

    def write_file(self, index: int, arrays: Sequence[NewArray]) -> None:
        """Write the file of a sample."""
        self.files.write(self._place.target, index, arrays, is_packed=self._is_packed)


class FilesWriter(Writer):
    """A :class:`Writer` of one file per sample: ``writer[sample.index] = {name: tensor}``.

    Ranks that share samples take turns: one of them receives the rows of all and writes the file in a separate thread,
    while the next sample's rows go to another rank.
    """

    def __init__(self, *args: Any, output: FilesOutput, **options: Any) -> None:
        super().__init__(*args, output=output, **options)  # type: ignore[arg-type, misc]  # of files, not boxes
        self._folder, self._files, self._wanted, self._turn = output, output.files, output.files.chosen, 0
        self._last = Background(self._write_file, self._background.fail, self._ranks.check, max_waiting=_MAX_WRITING)

    def _steps_of(self, step: object) -> list[int]:
        if not isinstance(step, int | np.integer):
            raise ConfigError(
                f"{self.path}: samples differ in their sizes, and are given one at a time: writer[sample.index] = ... "
                f"of DataLoader(ds, batch_size=None), not {step!r}"
            )
        (found,) = super()._steps_of(step)
        if found not in self._files.names:
            raise ConfigError(f"{self.path}: sample {found} is none of those that create(sample=...) names")
        return [found]

    def _route_of(self, name: str, tensor: torch.Tensor, step: object, lead: int | None) -> Route:
        field, index = self._layout.fields[name], int(step)  # type: ignore[call-overload]
        given, dim = self._files.tensor_shape(name, index), field.entity_dim
        num_rows = self._files.reader.sample_info(index).source_counts[field.entity]
        if tuple(tensor.shape) != given:
            raise ConfigError(
                f"{self._what(name, step)} ({self._files.names[index]}) has shape {tuple(tensor.shape)}, and must have "
                f"{given} ({', '.join(field.dims)})"
            )
        wanted, sizes = self._sizes(field, index), None
        if isinstance(tensor, ShardTensor):
            split = zip(tensor.spec.placements, tensor.spec.sizes, strict=True)
            found = [s for p, s in split if isinstance(p, Shard) and p.dim == dim and s is not None]
            sizes = list(found[0]) if len(found) == 1 else None
        if len(wanted) > 1 and sizes != wanted:
            raise ConfigError(
                f"{self._what(name, step)} is not split as the rows of the data set are ({', '.join(map(str, wanted))} "
                "on its ranks); give it as it was read"
            )
        return Route(part=self._ranks.part, written=(), shape=(*given[:dim], num_rows, *given[dim + 1 :]))

    def _sizes(self, field: OutputField, index: int) -> list[int]:
        """Return the number of rows of each part of a sample."""
        sizes: list[int] = np.diff(self._files.reader.partition_of(index).bounds[field.entity]).tolist()
        return sizes

    def _write(self, step: tuple[int, list[Part]]) -> None:
        index, parts = step
        if self._ranks.is_first:
            self._owner.look()
        at, self._turn = self._turn % math.prod(self._ranks.parts), self._turn + 1
        self._agree(index, at)
        if index == _END:
            return
        arrays = [array for part in parts if (array := self._gathered(index, part, at)) is not None]
        if self._ranks.part == at:
            self._last.put((index, arrays))
        else:
            self._note(index)

    def _gathered(self, index: int, part: Part, at: int) -> NewArray | None:
        """Send a field's rows to the rank that writes the file; return all rows there, in the source's order."""
        field, ranks = part.field, self._ranks
        values = field.packing.pack(part.staged.values(), self._what(field.name, index))
        if ranks.part != at:
            if values.size:
                going = ranks.send(values, at)
                ranks.wait(going[0])
            part.staged.release()
            return None
        dim, missing = field.entity_dim, np.asarray(field.packing.missing)
        out = np.full(part.route.shape, missing, missing.dtype)  # rows that the store has not stay so
        coming = []
        for other, size in enumerate(self._sizes(field, index)):
            rows = np.empty((*values.shape[:dim], size, *values.shape[dim + 1 :]), values.dtype)
            is_own = other == at
            coming.append((None if is_own or not rows.size else ranks.receive(rows, other), values if is_own else rows))
        for other, (work, rows) in enumerate(coming):
            ids = self._files.reader.original_id(index, other, field.entity)
            ranks.wait(work)
            out[(slice(None),) * dim + (ids,)] = rows
        part.staged.release()
        return NewArray(field=field, values=out)

    def _agree(self, index: int, at: int) -> None:
        """Tell the writing rank which sample comes next; it raises ConfigError if a part's sample differs."""
        ranks = self._ranks
        if ranks.part != at:
            going = ranks.send(np.array([index]), at)
            ranks.wait(going[0])
            return
        others = [part for part in range(math.prod(ranks.parts)) if part != at]
        said = [np.empty(1, np.int64) for _ in others]
        works = [ranks.receive(each, part) for each, part in zip(said, others, strict=True)]
        for work, each, part in zip(works, said, others, strict=True):
            ranks.wait(work)
            if each[0] != index:
                own, other = ("no more" if i == _END else f"sample {i}" for i in (index, each[0]))
                raise ConfigError(
                    f"{self.path}: part {at} of the domain gives {own} where part {part} gives {other}: all ranks of a "
                    "domain give the same samples, in the same order"
                )

    def _write_file(self, job: tuple[int, list[NewArray]]) -> None:  # in the second thread
        self._folder.write_file(*job)
        self._note(job[0])

    def _note(self, index: int) -> None:
        with self._lock:
            self._written.add(index)
        self._say_sometimes()

    def close(self) -> None:
        """Wait until all ranks have written all, and rename the folder. Collective; see :class:`Writer`."""
        if not (self._is_closed or self._ranks.is_idle or self._background.error):
            with contextlib.suppress(Exception):  # super().close() raises the error that ended the thread
                self._background.put((_END, []))  # so that no rank waits for rows of a sample that another rank omits
        super().close()

    def _wait(self) -> None:
        super()._wait()
        self._last.wait()

    def _stop(self, error: BaseException | None = None) -> None:
        super()._stop(error)
        self._last.stop(error)
