"""``Writer``: takes the ranks' parts of steps and writes them while the loop goes on."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch.distributed.tensor import Shard

from scidata.core.bounds import bounds_of
from scidata.core.cache import Cache
from scidata.data.output.background import Background
from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.owner import Owner
from scidata.data.output.part_writer import Output, Part, PartWriter, Staging, as_tensor
from scidata.data.output.places import Place, say_written, written_steps
from scidata.data.output.ranks import Ranks
from scidata.data.output.routes import Route, route_of
from scidata.device_mesh.groups import end_well, explained, fail_at_end, uncaught
from scidata.device_mesh.torch_internals import named
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    OutputError,
    RankFailedError,
    SciDataError,
    UnknownNameError,
    near_matches,
)
from scidata.plan.owners import exchange_of
from scidata.shard import ShardTensor

_log = logging.getLogger("scidata")

_open: weakref.WeakSet[Writer] = weakref.WeakSet()  # unclosed writers of this process
_JOURNAL_SECONDS = 1.0  # s between two updates of the journal
_MAX_OPEN = 4  # chunks of several steps that wait for more of them
_MAX_ROUTES = 64
_SHOWN = 6


class Writer:
    """Writes each rank's part of each step, in the background and without gathering. Made by :func:`scidata.create`.

    ``writer[step] = sample`` takes a sample of a data set, or a model's output for one: a mapping with a ShardTensor
    for each field, of the shape of one step. All ranks that share a sample write the same steps, in the same order;
    those of other samples other ones. It returns when the tensors are copied, or wait to be on CUDA. ``step`` is a
    number from 0 on, or a list of them for tensors with a batch dim in front.

    A context manager: at its end all ranks wait for each other, and the output takes its name if no step is missing.
    Where the body raises, the output stays unfinished, and all ranks are told.

    Attributes
    ----------
    path
        Where the output lies when it is finished.
    num_steps
        Number of steps.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> with scidata.create("copy.nc", like=ds) as writer:
    ...     writer[0] = ds[0]
    ...     writer[[1, 2]] = scidata.collate([ds[1], ds[2]])
    ...     print(len(writer), writer.fields, writer.missing)
    ...     writer[3] = ds[3]
    4 ('u',) [3]
    """

    def __init__(
        self, place: Place, layout: OutputLayout, output: Output, ranks: Ranks, owner: Owner, *,
        written: Iterable[int] | None, in_flight: int, copy: bool, routes: Mapping[str, Route],
    ) -> None:  # fmt: skip
        self.path, self.num_steps = str(place.path), layout.num_steps
        self._place, self._layout, self._output, self._ranks, self._owner = place, layout, output, ranks, owner
        self._is_whole = written is None
        self._before = set(range(layout.num_steps) if written is None else written)
        self._wanted: Sequence[int] = range(layout.num_steps)
        self._taken: set[int] = set()
        self._open: dict[int, int] = {}  # number of steps taken, by block
        self._routes: Cache[Route] = Cache(_MAX_ROUTES)
        self._fixed = routes
        self._staging = Staging(copy=copy)
        self._parts = PartWriter(layout, output, ranks, str(place.path))
        self._lock = threading.Lock()
        num_parts = int(np.prod(ranks.parts, dtype=np.int64))
        self._journal = f"steps-{ranks.name}-of-{num_parts}.json"
        self._written: set[int] = set()  # by this rank
        self._said, self._said_at = 0, 0.0
        self._is_closed = False
        # last: it begins at once
        self._background = Background(self._write, ranks.fail, ranks.check, max_waiting=in_flight)
        _watch_end(self)
        if ranks.is_first and not self._is_whole:
            owner.watch(self._background.fail)

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of a step."""
        return tuple(self._layout.fields)

    @property
    def missing(self) -> list[int]:
        """Steps missing when the writer was opened and not yet submitted by this rank, in order."""
        return [step for step in self._wanted if step not in self._before and step not in self._taken]

    def __len__(self) -> int:
        return self.num_steps

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name} {f.shape}" for f in self._layout.fields.values())
        return f"Writer({self.path!r}, {self.num_steps} steps, {len(self.missing)} missing, {fields})"

    # -- the loop's ----------------------------------------------------------------------------------------------

    def __setitem__(self, step: int | slice | Sequence[int], values: Mapping[str, object]) -> None:
        self._check_open()
        if not isinstance(values, Mapping):
            raise ConfigError(f"writer[{step!r}] takes a sample, or {{name: tensor}}, not a {type(values).__name__}")
        for name in values:
            if name not in self._layout.fields:
                raise UnknownNameError(
                    f"{self.path}: field {name!r} was not declared{near_matches(str(name), self._layout.fields)}; "
                    "name it in create(fields=...), or leave it out of the step"
                )
        if lacking := [name for name in self._layout.fields if name not in values]:
            raise ConfigError(f"{self.path}: step {step!r} lacks {lacking[0]!r}; a step is given with all its fields")
        steps = self._steps_of(step)
        batched = not isinstance(step, int | np.integer)
        tensors = {name: as_tensor(values[name], self._what(name, step)) for name in self._layout.fields}
        lead = len(steps) if batched else None
        routes = {name: self._route_of(name, tensor, step, lead) for name, tensor in tensors.items()}
        if self._ranks.is_idle:
            self._taken.update(steps)
            return
        for i, each in enumerate(steps):
            self._claim(each)
            parts = []
            for name, tensor in tensors.items():
                local = tensor.to_local() if isinstance(tensor, ShardTensor) else tensor
                local = local[i] if batched else local
                if routes[name].written is None:
                    local = local.new_empty((0,))  # written by another part
                staged = self._staging.take(local, self._what(name, each))
                parts.append(Part(field=self._layout.fields[name], route=routes[name], staged=staged))
            try:
                self._background.put((each, parts))
            except (RuntimeError, OSError) as e:
                raise self._reason(e) from None
            self._taken.add(each)

    def flush(self) -> None:
        """Wait until this rank's part of all submitted steps is written.

        Examples
        --------
        >>> with scidata.create("flushed.nc", like=ds) as writer:
        ...     for i in range(4):
        ...         writer[i] = ds[i]
        ...     writer.flush()  # all is on the disk
        """
        self._check_open()
        try:
            self._wait()
            self._say()
        except (RuntimeError, OSError) as e:
            raise self._reason(e) from None

    def close(self) -> None:
        """Wait until all ranks have written all, and rename the output if no step is missing. Collective.

        Raises
        ------
        RankFailedError
            Another rank has failed: the output stays unfinished.
        OSError
            This one could not write.

        Examples
        --------
        >>> writer = scidata.create("closed.nc", like=ds)
        >>> writer[[0, 1, 2, 3]] = scidata.collate([ds[i] for i in range(4)])
        >>> writer.close()
        """
        if self._is_closed:
            return
        self._is_closed = True
        error: BaseException | None = None
        try:
            self._wait()
            self._say()
            self._place.sync()
        except BaseException as e:
            error = self._reason(e)
            self._ranks.fail(error)  # the thread may wait for rows
        try:
            self._ranks.agree(error)
            self._ranks.run_on_first(self._finish)
        finally:
            self._stop()
            self._let_go()

    def abort(self, error: BaseException) -> None:
        """Stop writing, and tell all ranks: the output stays unfinished.

        Parameters
        ----------
        error : BaseException
            Why; other ranks raise it, too.

        Examples
        --------
        >>> writer = scidata.create("aborted.nc", like=ds)
        >>> writer.abort(RuntimeError("the model diverged"))
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._ranks.fail(error)
        self._stop(error)
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        else:
            self.close()

    def _wait(self) -> None:
        self._background.wait()

    def _stop(self, error: BaseException | None = None) -> None:
        self._background.stop(error)

    def _let_go(self) -> None:
        _open.discard(self)
        self._output.close()
        if self._ranks.is_first:
            self._owner.release()
        self._ranks.close()

    # -- one step ------------------------------------------------------------------------------------------------

    def _what(self, name: str, step: object) -> str:
        return f"{self.path}: field {name!r} of step {step}"

    def _check_open(self) -> None:
        if self._is_closed:
            raise OutputError(f"{self.path}: the writer is closed; create it again with resume=True")
        if self._background.error is not None:  # first: others may have left because of it
            raise self._reason(self._background.error)
        if (failure := self._ranks.failure()) is not None:
            raise failure

    def _reason(self, error: BaseException) -> BaseException:
        """Return the cause of a failure: another rank, if gloo says so, or another run that owns the output."""
        if isinstance(error, RuntimeError) and not isinstance(error, SciDataError):
            for _ in range(20):  # its message may arrive shortly after its connections end
                if (failure := self._ranks.failure()) is not None:
                    return failure
                time.sleep(0.05)
            if "gloo" in str(error).lower() or "connection" in str(error).lower():
                died = RankFailedError(f"{self.path}: a rank has died while writing: {error}")
                return explained(error) or died
        if isinstance(error, FileNotFoundError):
            try:
                self._owner.check()
            except (OutputError, OSError) as e:
                return e if isinstance(e, OutputError) else error
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = self.path  # of a full disk, say
        return error

    def _steps_of(self, step: object) -> list[int]:
        steps, given = [], range(*step.indices(self.num_steps)) if isinstance(step, slice) else step
        if not isinstance(given, Iterable):
            given = [given]
        for each in given:
            if isinstance(each, bool | np.bool_) or not isinstance(each, int | np.integer):
                raise TypeError(f"{self.path}: steps are numbers from 0 on, not {each!r}")
            steps.append(int(each))
        for each in steps:
            if not 0 <= each < self.num_steps:
                raise IndexError(
                    f"{self.path}: step {each} is out of range: there are {self.num_steps} steps, from 0 on"
                )
            if each in self._before or each in self._taken or steps.count(each) > 1:
                raise OutputError(
                    f"{self.path}: step {each} is written already; writer.missing lists those that are not"
                )
        return steps

    def _claim(self, step: int) -> None:
        """Raise if another group writes this step, or others in its chunks."""
        first_step, num_steps = self._layout.block_of(step)
        if self._ranks.num_groups > 1:
            own = str(self._ranks.group)
            first = self._ranks.claim(f"block/{first_step}", own)
            if first != own:
                what = "it" if num_steps == 1 else "steps of its chunk"
                raise OutputError(
                    f"{self.path}: step {step}: the ranks of domain {first} write {what}; each step, and all steps of "
                    "a chunk, are given by the ranks of one domain"
                )
        if num_steps == 1:
            return
        self._open[first_step] = self._open.get(first_step, 0) + 1
        if self._open[first_step] == num_steps:
            del self._open[first_step]
        if len(self._open) > _MAX_OPEN:
            raise ConfigError(
                f"{self.path}: steps of more than {_MAX_OPEN} chunks wait for others that share their chunks; give the "
                f"{num_steps} steps of a chunk one after another, or create(chunks={{...: 1}})"
            )

    def _route_of(self, name: str, tensor: torch.Tensor, step: object, lead: int | None) -> Route:
        field, skip = self._layout.fields[name], int(lead is not None)
        wanted = ((lead,) if lead is not None else ()) + (field.given_shape or field.shape)
        if tuple(tensor.shape) != wanted:
            raise ConfigError(
                f"{self._what(name, step)} has shape {tuple(tensor.shape)}, but {wanted} is written "
                f"({', '.join((('step',) if skip else ()) + field.dims)})"
            )
        if isinstance(tensor, ShardTensor):
            spec = tensor.spec
            if tuple(spec.device_mesh.shape) != self._ranks.parts:
                raise ConfigError(
                    f"{self._what(name, step)} is split over a mesh of {tuple(spec.device_mesh.shape)} ranks, and the "
                    f"output is written by domains of {self._ranks.parts}; create it with mesh= of the tensors"
                )
            splits = tuple(
                (p.dim - skip, s) if isinstance(p, Shard) and s is not None else None
                for p, s in zip(spec.placements, spec.sizes, strict=True)
            )
            if any(split is not None and split[0] < 0 for split in splits):
                raise ConfigError(f"{self._what(name, step)} is split over its batch dim; split others")
        else:
            splits = tuple(None for _ in self._ranks.parts)
        if (fixed := self._fixed.get(name)) is not None:
            self._check_rows(field, fixed, splits, self._what(name, step))
            return fixed
        found = self._routes.get((name, splits))
        if found is None:
            bounds = [None if split is None else (split[0], bounds_of(split[1])) for split in splits]
            ranks = self._ranks
            found = route_of(exchange_of(field.shape, field.units, ranks.parts, bounds, ranks.part), field.units)
            self._routes.put((name, splits), found)
        return found

    def _check_rows(
        self, field: OutputField, route: Route, splits: tuple[tuple[int, tuple[int, ...]] | None, ...], what: str
    ) -> None:
        """Check that a tensor's rows are those of the route."""
        held = [s[1] for s in splits if s is not None and s[0] == field.entity_dim]
        if held and len(splits) == 1:
            if held[0][self._ranks.part] == route.num_rows:
                return
        elif not splits or self._ranks.parts == (1,):
            return
        raise ConfigError(
            f"{what} is not split as the rows of the data set are; give it as it was read, or order='store'"
        )

    # -- the thread's --------------------------------------------------------------------------------------------

    def _write(self, step: tuple[int, list[Part]]) -> None:
        if self._ranks.is_first:  # the failed rank itself tells the others
            self._owner.look()
        with named("write"):
            self._written |= self._parts.write(*step)
        self._say_sometimes()

    def _say_sometimes(self) -> None:
        if time.monotonic() - self._said_at > _JOURNAL_SECONDS:
            self._say()

    def _say(self) -> None:
        with self._lock:
            if (count := len(self._written)) > self._said:
                say_written(self._place, self._journal, self._written)
                self._said = count
            self._said_at = time.monotonic()

    def _finish(self) -> None:
        """Finish the output if no step is missing. For the first rank, while the others wait."""
        if self._is_whole:
            return
        self._owner.check()
        written = written_steps(self._place)
        missing = [step for step in self._wanted if step not in written]
        if missing:
            shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
            _log.warning(
                "%s is unfinished: %d of %d steps were not written (%s); create(..., resume=True) goes on",
                self.path, len(missing), len(self._wanted), shown,
            )  # fmt: skip
            return
        try:
            self._output.finish()
        except (OSError, CorruptDataError):
            self._owner.check()  # a run that takes over removes the chunks of this one
            raise
        self._output.close()
        self._place.sync()
        self._owner.finish()


# -- the end of the process ------------------------------------------------------------------------------------------


def _watch_end(writer: Writer) -> None:
    """Make an unclosed writer release ranks and threads before its process groups end."""
    if not _open:
        end_well()
        atexit.unregister(_end)
        atexit.register(_end, os.getpid())
    _open.add(writer)


def _end(process: int) -> None:
    if os.getpid() != process:  # a fork has none of the threads
        return
    for writer in list(_open):
        error = uncaught()
        if error is None:
            error = OutputError(f"{writer.path}: the writer was not closed; use `with scidata.create(...) as writer`")
            print(f"scidata: {error}", file=sys.stderr, flush=True)
            fail_at_end()
        writer.abort(error)
