"""Counts and times of a loader: added up by its prefetchers, shown to people as a table."""

from __future__ import annotations

from dataclasses import dataclass, fields

from scidata.core.html import card
from scidata.read.context import ReadStats

#: Stages in the order of a sample's way, and the count that their speed is of.
_STAGES = {"read": "bytes_fetched", "decode": "bytes_decoded", "copy": "bytes", "transform": "bytes", "wait": ""}
_INTERNAL = ("num_ready", "warned")
_MIB = 2**20


@dataclass(slots=True)
class PrefetchStats:
    """Sums over all batches that were handed over or are ready; ``warned``: the loop was warned that it waits."""

    batches: int = 0
    samples: int = 0
    bytes: int = 0
    bytes_fetched: int = 0
    bytes_decoded: int = 0
    num_reads: int = 0
    fill_seconds: float = 0.0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    copy_seconds: float = 0.0
    transform_seconds: float = 0.0
    wait_seconds: float = 0.0
    loop_seconds: float = 0.0
    skipped: int = 0
    num_ready: int = 0
    warned: bool = False

    def count_read(self, stats: object, seconds: float) -> None:
        """Add one sample's reading: a ReadStats, the bytes fetched, or an object that may have ``bytes_fetched``."""
        self.fill_seconds += seconds
        if not isinstance(stats, ReadStats):  # then all of it counts as reading
            self.bytes_fetched += stats if isinstance(stats, int) else getattr(stats, "bytes_fetched", 0)
            self.read_seconds += seconds
            return
        self.bytes_fetched += stats.bytes_fetched
        self.bytes_decoded += stats.bytes_decoded
        self.num_reads += stats.num_reads
        self.read_seconds += stats.read_ns / 1e9
        self.decode_seconds += stats.decode_ns / 1e9
        self.copy_seconds += stats.copy_ns / 1e9


class LoaderStats(dict[str, float]):
    """Counts and times so far, over all iterators of a loader; printed as a table.

    ============================ ===================================================================================
    ``batches``, ``samples``     handed out
    ``bytes``                    in the batches: those that were wanted
    ``bytes_static``             of fields that are the same in all samples, which were read once and are kept beside
    ``bytes_fetched``            read from the store
    ``bytes_decoded``            that came out of decoding; raw data counts as well
    ``num_reads``                ranged reads
    ``fill_seconds``             reading samples from beginning to end, summed over reader threads
    ``read_seconds``             in it, waiting for files; summed over all threads, as the next two are
    ``decode_seconds``           in it, decompressing and checking
    ``copy_seconds``             in it, moving and converting values; and beginning copies to the device
    ``transform_seconds``        wrapping, collating and transforming in the loop's thread
    ``wait_seconds``             the loop's, for a batch to be read
    ``loop_seconds``             of the loop, from its first call of ``next`` to its last
    ``skipped``                  samples left out because they could not be read
    ``queue_depth``              batches that were ready when the loop asked for one, mean
    ============================ ===================================================================================
    """

    def __init__(self, counts: PrefetchStats, *, queue_capacity: int, bytes_static: int = 0) -> None:
        super().__init__({f.name: getattr(counts, f.name) for f in fields(counts) if f.name not in _INTERNAL})
        self["bytes_static"] = bytes_static
        self["queue_depth"] = _per(counts.num_ready, counts.batches)
        self.queue_capacity = queue_capacity

    def __str__(self) -> str:
        return "\n".join(
            [
                *_aligned(self._rows()),
                f"{self['batches']} batches, {self['samples']} samples in {self['loop_seconds']:.3f} s; "
                f"{self['queue_depth']:.1f} of {self.queue_capacity} batches ready when asked",
                f"{self['bytes'] / _MIB:.1f} MiB wanted, {self['bytes_fetched'] / _MIB:.1f} MiB fetched "
                f"({_per(self['bytes_fetched'], self['bytes']):.2f} of it), {self['num_reads']} reads; "
                "read, decode and copy are sums over threads",
            ]
        )

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        facts = {
            "handed out": f"{self['batches']} batches, {self['samples']} samples in {self['loop_seconds']:.3f} s",
            "ready when asked": f"{self['queue_depth']:.1f} of {self.queue_capacity} batches",
            "wanted": f"{self['bytes'] / _MIB:.1f} MiB",
            "fetched": f"{self['bytes_fetched'] / _MIB:.1f} MiB in {self['num_reads']} reads",
        }
        return card("LoaderStats", facts, head, rows)

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("", "seconds", "ms/sample", "MiB/s", "of the loop")
        return [head, *(self._row(stage, counted) for stage, counted in _STAGES.items())]

    def _row(self, stage: str, counted: str) -> tuple[str, ...]:
        seconds, nbytes = self[f"{stage}_seconds"], self.get(counted, 0)
        return (
            stage,
            f"{seconds:.3f}",
            f"{1e3 * _per(seconds, self['samples']):.2f}",
            f"{nbytes / _MIB / seconds:.0f}" if nbytes and seconds else "-",
            f"{100 * _per(seconds, self['loop_seconds']):.1f} %",
        )


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _per(value: float, of: float) -> float:
    return value / of if of else 0.0
