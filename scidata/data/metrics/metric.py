"""``Metric``, the base of all metrics. Updates without communication, one result for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import is_int, names_of
from scidata.core.keywords import checked_keywords
from scidata.core.types import FloatArray, IntArray
from scidata.data.irregular_sample import IrregularSample
from scidata.data.metrics.exact import Entry, Key, domain_sums, exact_terms, pack, rounded_sum, unpack
from scidata.data.metrics.layout import Layout, Ranks, aligned, part_of, whole_along
from scidata.data.metrics.weighting import Weights, WeightsByDim, weights_fault
from scidata.data.sample import Sample
from scidata.errors import ConfigError, check_known
from scidata.shard.comm.agreement import gather_bytes

_VERSION = 1

#: Terms of the weights' sums, by the box and the dims that are kept.
_KnownWeights: TypeAlias = dict[tuple[Layout, tuple[int, ...]], FloatArray]
#: Number of samples: of all, or of each element of the result.
Count: TypeAlias = int | IntArray


class Metric:
    """A weighted mean over the rows of each sample, and over samples: the same for any number of ranks, bit for bit.

    Each rank adds up its own rows; halos and ghosts do not count. :meth:`compute` adds the ranks' sums without error
    and rounds once, in float64, so that neither the cut of the domain nor the dealing of samples changes a bit. A
    sample that several dp ranks were given, because a sampler pads, counts once.

    A new metric overrides :meth:`pointwise`, and where it is no mean :meth:`of_sample` and :meth:`of_mean`.

    Parameters
    ----------
    weights : Mapping[str, array_like] or None, optional
        By dim, those of all ranks' rows: ``{"latitude": latitude_weights(ds)}``, float64, not negative. By several
        dims where they vary along both, ``{("y", "x"): areas}``. ShardTensors that lie as the fields do will serve.
        A row of weight 0 does not count, whatever it holds. Default: all rows weigh the same.
    by : str or Sequence[str], default ()
        Dims that have a value each in the result, sharded or not; the mean is over all others.
    mesh : DeviceMesh or None, optional
        The ranks that take part. None: one process.
    skipna : bool, default False
        Leave out elements that are NaN, in any of the tensors, and samples without any other element. Otherwise NaN in
        an element is NaN in the result.
    dims : Sequence[str] or None, optional
        Names of a sample's dims where tensors are plain, or mappings of such; default ``dim_0``, ``dim_1``, … A
        :class:`scidata.Sample` among the tensors brings its own.
    dp, domain : str or Sequence[str] or None
        Axes of the mesh, where they have other names, as for :func:`scidata.open_dataset`. Default of ``domain``: also
        further axes, such as one of members, but not ``tp``, ``pp`` and their like.

    Raises
    ------
    ConfigError
        Weights or axes that make no sense.

    Examples
    --------
    >>> mse = scidata.metrics.MSE(dims=("x",), weights={"x": [3, 1]})
    >>> mse.update(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 3.0]), index=0)
    >>> mse.update(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0]), index=1)
    >>> mse.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    @checked_keywords
    def __init__(
        self,
        *,
        weights: WeightsByDim | None = None,
        by: str | Sequence[str] = (),
        mesh: DeviceMesh | None = None,
        skipna: bool = False,
        dims: Sequence[str] | None = None,
        dp: str | None = "dp",
        domain: str | Sequence[str] | None = None,
    ) -> None:
        self.by = tuple([by] if isinstance(by, str) else names_of("by", by))
        self.skipna = bool(skipna)
        self._weights = Weights(weights)
        self._dims = None if dims is None else tuple(dims)
        self._ranks = Ranks.of(mesh, dp, domain)
        self._entries: dict[Key, Entry] = {}
        self._unnumbered = 0
        self._fault: str | None = None
        self._known_weights: _KnownWeights = {}

    # -- to be overridden ------------------------------------------------------------------------------------------

    def pointwise(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return one or several float64 quantities, element by element, whose means are taken.

        An element depends on the same element of the tensors alone: a sum along a dim would depend on the cut.

        Parameters
        ----------
        *values : Tensor
            Tensors of one shape, float64: the part that this rank owns.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it is the mean of")

    def of_sample(self, sums: Sequence[FloatArray], weight: FloatArray) -> FloatArray:
        """Return a sample's value from the weighted sums of the quantities, and the sum of the weights.

        Parameters
        ----------
        sums : Sequence[ndarray]
            Weighted sum of each quantity.
        weight : ndarray
            Sum of the weights.
        """
        return sums[0] / weight

    def of_mean(self, mean: FloatArray) -> FloatArray:
        """Return the result from the mean of the samples' values.

        Parameters
        ----------
        mean : ndarray
            Of the samples' values.
        """
        return mean

    def _quantities(self, values: Sequence[Tensor], layout: Layout) -> tuple[Sequence[Tensor], Layout]:
        found = self.pointwise(*values)
        return (found if isinstance(found, tuple) else (found,)), layout

    #: Dim of each input that the others do not have, counted in a sample's dims.
    _extra_dims: tuple[int | None, ...] = (None, None, None)

    # -- updates ---------------------------------------------------------------------------------------------------

    def _update(
        self,
        inputs: Sequence[object],
        words: Sequence[str],
        index: int | Sequence[int] | None,
        weights: WeightsByDim | None,
    ) -> None:
        """Add this rank's part of a sample, or of each sample of a batch."""
        names: list[str] = list(inputs[0]) if isinstance(inputs[0], Mapping) else [""]
        samples = [x for x in (*inputs[1:2], inputs[0]) if isinstance(x, Sample)]
        if index is None and samples:
            index = samples[0].index
        more = Weights(weights)
        fields = {}
        for name in names:
            tensors = [_field(x, name, word) for x, word in zip(inputs, words, strict=True)]
            fields[name] = tensors, self._dims_of(name, tensors, samples)
        self._check_names({dim for _, dims in fields.values() for dim in dims}, more)
        for name, (tensors, dims) in fields.items():
            for number, parts in self._split(tensors, words, dims, index, samples):
                if (number, name) not in self._entries:
                    self._entries[number, name] = self._entry(parts, words, more)
        if index is None:
            self._unnumbered += 1

    def _dims_of(self, name: str, tensors: Sequence[Tensor], samples: Sequence[Sample[Tensor]]) -> tuple[str, ...]:
        for sample in samples:
            if name in sample:
                return sample.shown_dims()[name]
        if self._dims is not None:
            return self._dims
        return tuple(f"dim_{d}" for d in range(tensors[-1].ndim))

    def _check_names(self, known: set[str], more: Weights) -> None:
        check_known("by: no field has a dim", [name for name in self.by if name not in self._made_dims], known)
        self._weights.check_names(known)
        more.check_names(known)

    #: Dims that the quantities have and the tensors have not.
    _made_dims: tuple[str, ...] = ()

    def _split(
        self,
        tensors: Sequence[Tensor],
        words: Sequence[str],
        dims: tuple[str, ...],
        index: int | Sequence[int] | None,
        samples: Sequence[Sample[Tensor]],
    ) -> list[tuple[tuple[int, ...], list[tuple[Tensor, Layout]]]]:
        """Return the number and the tensors' parts of each sample of a batch."""
        numbers = None if index is None or is_int(index) else [int(i) for i in index]  # type: ignore[union-attr]
        irregular = any(isinstance(sample, IrregularSample) for sample in samples)
        if irregular and numbers is not None and len(numbers) != 1:
            raise ConfigError(
                f"a metric of a batch of {len(numbers)} meshes, clouds or graphs: their rows are one union; use "
                "batch_size=None, or 1"
            )
        batched = dims[:1] == ("batch",) or (numbers is not None and not irregular)
        if batched and dims[:1] != ("batch",):
            dims = ("batch", *(dims if self._dims is not None else dims[:-1]))
        # one climatology may serve a whole batch
        shared = [batched and i > 1 and x.ndim == len(dims) - 1 for i, x in enumerate(tensors)]
        parts = [
            self._part(x, dims[1:] if shared[i] else dims, word, i)
            for i, (x, word) in enumerate(zip(tensors, words, strict=True))
        ]
        dp = 0 if self._ranks.dp is None else self._ranks.place[self._ranks.dp]
        if not batched:
            single = numbers[0] if numbers else index
            return [((-1, dp, self._unnumbered) if index is None else (_number(single),), parts)]
        size = parts[0][1].global_shape[0]
        if any(layout.split[0] for (_, layout), alone in zip(parts, shared, strict=True) if not alone):
            raise ConfigError(
                "the batch is sharded over the domain: a metric counts samples, which each rank has all of"
            )
        if numbers is not None and len(numbers) != size:
            raise ConfigError(f"{len(numbers)} indices for a batch of {size} samples")
        found: list[tuple[tuple[int, ...], list[tuple[Tensor, Layout]]]] = []
        for b in range(size):
            number: tuple[int, ...] = (-1, dp, self._unnumbered, b) if numbers is None else (_number(numbers[b]),)
            own = [
                (x, layout) if alone else (x.select(-len(layout.dims), b), layout.without(0))
                for (x, layout), alone in zip(parts, shared, strict=True)
            ]
            found.append((number, own))
        return found

    def _part(self, x: Tensor, dims: tuple[str, ...], word: str, place: int) -> tuple[Tensor, Layout]:
        """Return the own part of an input; a dim that the other inputs lack comes first, outside the layout."""
        extra = self._extra_dims[place]
        if extra is None:
            return part_of(x, dims, self._ranks, word)
        at = extra + (dims[:1] == ("batch",)) if extra >= 0 else len(dims) + 1 + extra
        x = whole_along(x, at, int(dims[:1] == ("batch",)))
        values, layout = part_of(x, (*dims[:at], "", *dims[at:]), self._ranks, word)
        if layout.split[at]:
            raise ConfigError(f"{word}: its dim {at} is sharded, and is taken as one here; shard another dim")
        return values.movedim(at, 0), layout.without(at)

    def _entry(self, parts: Sequence[tuple[Tensor, Layout]], words: Sequence[str], more: Weights) -> Entry:
        values, layout = aligned(parts, words)
        quantities, layout = self._quantities([x.to(torch.float64) for x in values], layout)
        kept = [d for d, name in enumerate(layout.dims) if name in (*self.by, *self._made_dims)]
        device = quantities[0].device
        weight = self._weights.local(layout, device)
        if more:
            of_update = more.local(layout, device)
            fault = None if of_update is None else weights_fault(of_update)
            if fault is not None and self._fault is None:  # perhaps only this rank sees it: compute() raises on all
                self._fault = f"weights: {fault}"
            weight = weight if of_update is None else of_update if weight is None else weight * of_update
        box = layout.select(kept)
        if not self._ranks.counts(layout):
            none = np.zeros((0, *box.local_shape))
            arrays = tuple(none for _ in range(len(quantities) + 1))
        else:
            arrays = self._terms(quantities, weight, layout, kept, {} if more else self._known_weights)
        return Entry(dims=box.dims, global_shape=box.global_shape, offsets=box.offsets, arrays=arrays)

    def _terms(
        self,
        quantities: Sequence[Tensor],
        weight: Tensor | None,
        layout: Layout,
        kept: Sequence[int],
        known: _KnownWeights,
    ) -> tuple[FloatArray, ...]:
        """Return terms of the weighted sums over the box, then of its weights, each ``(num_terms, *kept dims)``."""
        missing = None
        if self.skipna:
            missing = torch.stack([x.isnan() for x in quantities]).any(0)
            quantities = [x.masked_fill(missing, 0.0) for x in quantities]
        if weight is not None:
            quantities = [x * weight for x in quantities]
            if not bool(weight.all()):
                quantities = [x.masked_fill(weight == 0, 0.0) for x in quantities]  # also NaN
        sums = [_terms_keeping(x, kept) for x in quantities]
        key = layout, tuple(kept)
        if missing is None and key in known:
            return (*sums, known[key])
        shape = list(layout.local_shape)
        each = quantities[0].new_ones([1] * len(shape)) if weight is None else weight
        # along a kept dim without differences, one sum is enough
        narrow = [missing is None and d in kept and each.shape[d] <= 1 for d in range(len(shape))]
        spread = each.expand([min(n, 1) if narrow[d] else n for d, n in enumerate(shape)])
        if missing is not None:
            spread = spread.masked_fill(missing, 0.0)
        total = _terms_keeping(spread, kept)
        total = np.broadcast_to(total, (len(total), *(layout.local_shape[d] for d in kept)))
        if missing is None:
            known[key] = total
        return (*sums, total)

    # -- results ---------------------------------------------------------------------------------------------------

    def compute(self) -> Any:
        """Return the result, the same on all ranks. Collective over the dp and domain axes.

        Returns
        -------
        Sample or torch.Tensor
            Float64, on the CPU, over the dims of ``by``: of mappings a :class:`scidata.Sample` with their names, also
            on ranks that had no sample; of tensors a tensor.

        Raises
        ------
        ConfigError
            No rank had a sample; ranks of a domain had different ones; ranks have different metrics. On all ranks.

        Examples
        --------
        >>> mse.compute()
        tensor(0.5000, dtype=torch.float64)
        """
        values = self._of_domain()
        by_name: dict[str, dict[tuple[int, ...], Entry]] = {}
        for (number, name), entry in values.items():
            by_name.setdefault(name, {})[number] = entry
        results, dims = {}, {}
        for name, entries in by_name.items():
            first = next(iter(entries.values()))
            if any(entry.global_shape != first.global_shape for entry in entries.values()):
                raise ConfigError(
                    f"samples have {', '.join(first.dims)} of different sizes; leave it out of by=, to take the mean"
                )
            of_samples = np.stack([entry.arrays[0] for entry in entries.values()])
            results[name] = torch.from_numpy(self._over_samples(of_samples))
            dims[name] = first.dims
        return results[""] if set(results) == {""} else Sample(results, dims=dims, index=None)

    def _over_samples(self, values: FloatArray) -> FloatArray:
        count: Count = len(values)
        if self.skipna:
            count = (~np.isnan(values)).sum(0)
            values = np.where(np.isnan(values), 0.0, values)
        flat = torch.from_numpy(values.reshape(len(values), -1).T)
        total = rounded_sum(exact_terms(flat)).reshape(values.shape[1:])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.of_mean(self._mean(total, count)), np.float64)

    def _mean(self, total: FloatArray, count: Count) -> FloatArray:
        return total / count

    def _of_domain(self) -> dict[Key, Entry]:
        """Return each sample's value, for all dp ranks: add up over the domain, then compute from the sums."""
        mesh, ranks = self._ranks.mesh, self._ranks
        said = {"metric": self._described(), "fault": self._fault}
        device = "cpu" if mesh is None else mesh.device_type
        domain = [] if mesh is None else [mesh.get_group(axis) for axis in ranks.domain]
        parts = [unpack(each) for each in gather_bytes(pack(self._entries, **said), domain, device)]
        fault = next((each["fault"] for _, each in parts if each["fault"]), None)
        values: dict[Key, Entry] = {}
        try:
            _check_alike([each["metric"] for _, each in parts])
            for key, entry in domain_sums([entries for entries, _ in parts]).items():
                with np.errstate(invalid="ignore", divide="ignore"):
                    value = self.of_sample(entry.arrays[:-1], entry.arrays[-1])
                values[key] = replace(entry, arrays=(np.asarray(value, np.float64),))
        except ConfigError as e:  # unknown to other domains
            fault = fault or str(e)
        dp = [] if mesh is None or ranks.dp is None else [mesh.get_group(ranks.dp)]
        everyone = [unpack(each) for each in gather_bytes(pack(values, **said | {"fault": fault}), dp, device)]
        for _, each in everyone:
            if each["fault"]:
                raise ConfigError(each["fault"])
        _check_alike([each["metric"] for _, each in everyone])
        found: dict[Key, Entry] = {}
        for entries, _ in everyone:
            found = entries | found  # if several dp ranks had a sample, the first one's counts
        if not found:
            raise ConfigError("compute: no rank has called update() since the start, or since reset()")
        return found

    def _described(self) -> str:
        weights = "; ".join(self._weights.described) or "none"
        return f"{type(self).__name__}(by={list(self.by)}, skipna={self.skipna}, weights: {weights})"

    def reset(self) -> None:
        """Drop all samples: call it before the next epoch's validation.

        Examples
        --------
        >>> mse.reset()
        """
        self._entries, self._unnumbered, self._fault = {}, 0, None

    # -- its place -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the sums of this rank: plain values and one uint8 tensor, for ``torch.save`` by each rank.

        Examples
        --------
        >>> torch.save(mse.state_dict(), "mse.pt")
        """
        packed = pack(self._entries, fault=self._fault, unnumbered=self._unnumbered)
        return {
            "version": _VERSION,
            "metric": self._described(),
            "place": self._ranks.place,
            "entries": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state saved by the rank at the same place of an equal mesh.

        Parameters
        ----------
        state : Mapping[str, Any]
            From ``state_dict``.

        Raises
        ------
        ConfigError
            The state of another metric, or of a rank at another place.

        Examples
        --------
        >>> mse.load_state_dict(mse.state_dict())
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ConfigError("this is no state of a metric, or that of a newer scidata")
        for name, mine in (("metric", self._described()), ("place", self._ranks.place)):
            if state[name] != mine:
                raise ConfigError(f"the state is of another {name}: {state[name]}, and this one is {mine}")
        self._entries, said = unpack(state["entries"].numpy().tobytes())
        self._fault, self._unnumbered = said["fault"], said["unnumbered"]

    def __repr__(self) -> str:
        return f"{self._described()[:-1]}; {len({number for number, _ in self._entries})} samples here)"


def _terms_keeping(x: Tensor, kept: Sequence[int]) -> FloatArray:
    """Return terms of the sums over all dims except some, ``(num_terms, *kept dims)``."""
    averaged, shape = [d for d in range(x.ndim) if d not in kept], [x.shape[d] for d in kept]
    num_addends = math.prod(x.shape[d] for d in averaged)
    terms = exact_terms(x.permute([*kept, *averaged]).reshape(math.prod(shape), num_addends))
    return terms.reshape(len(terms), *shape)


def _field(x: object, name: str, word: str) -> Tensor:
    found = x
    if name:
        if not isinstance(x, Mapping):
            raise ConfigError(f"{word} is one tensor, and the other has fields by name; give both the same way")
        check_known(f"{word} has no field", [name], x)
        found = x[name]
    if not isinstance(found, Tensor):
        raise ConfigError(f"{word}{f' {name!r}' if name else ''}: expected a tensor, not {type(found).__name__}")
    return found


def _number(index: object) -> int:
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
        raise ConfigError(f"index: expected a sample's number, or one for each sample of a batch, not {index!r}")
    return int(index)


def _check_alike(described: Sequence[str]) -> None:
    other = next((each for each in described if each != described[0]), None)
    if other is not None:
        raise ConfigError(f"ranks have different metrics: {described[0]} and {other}; give every rank the same")
