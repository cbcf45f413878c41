"""Batches of samples: grids are stacked, meshes, clouds and graphs united."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from scidata.core.keywords import checked_keywords
from scidata.data.channels import TensorT
from scidata.data.irregular_sample import IrregularSample
from scidata.data.irregular_union import unite
from scidata.data.local_fields import LocalFields, stacked
from scidata.data.sample import Sample
from scidata.errors import FieldMismatchError


@overload
def collate(samples: Sequence[IrregularSample[TensorT]]) -> IrregularSample[TensorT]: ...


@overload
def collate(samples: Sequence[Sample[TensorT]]) -> Sample[TensorT]: ...


@checked_keywords
def collate(samples: Sequence[Sample]) -> Sample:
    """Stack the fields of several grid samples on a new dim 0; unite meshes, clouds and graphs disjointly.

    A union has the rows of all samples, which may differ in number, and a field ``batch`` that says of which sample a
    row is.

    Parameters
    ----------
    samples : Sequence[Sample]
        At least one sample, all of one data set or of data sets alike.

    Raises
    ------
    FieldMismatchError
        The samples differ in fields or shapes, or are none.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> batch = scidata.collate([ds[0], ds[2]])
    >>> tuple(batch["u"].shape), batch.dims["u"], batch.index
    ((2, 3, 7, 8), ('batch', 'level', 'latitude', 'longitude'), [0, 2])
    """
    if samples and all(isinstance(sample, LocalFields) for sample in samples):
        return stacked(samples)  # type: ignore[arg-type, return-value]  # in a worker of torch's loader
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        kinds = {type(sample).__name__ for sample in samples}
        read = "; ds.assemble(part) makes a sample of what a worker has read" if "LocalPart" in kinds else ""
        found = ", ".join(sorted(kinds)) or "none"
        raise FieldMismatchError(f"collate makes a batch of one or more samples of a data set, not of {found}{read}")
    irregular = [sample for sample in samples if isinstance(sample, IrregularSample)]
    if not irregular:
        return _stacked(samples)
    if len(irregular) < len(samples):
        raise FieldMismatchError("a batch holds samples of one data set; these are of several kinds")
    return unite(irregular)


def _stacked(samples: Sequence[Sample]) -> Sample:
    first = samples[0]
    for sample in samples[1:]:
        if list(sample) != list(first):
            raise FieldMismatchError(
                f"sample {sample.index} has fields {list(sample)}, but sample {first.index} has {list(first)}"
            )
        for name in first:
            if sample[name].shape != first[name].shape:
                raise FieldMismatchError(
                    f"field {name!r} has shape {tuple(sample[name].shape)} in sample {sample.index} and "
                    f"{tuple(first[name].shape)} in sample {first.index}; a batch needs one shape: use batch_size=None"
                )
    batch = Sample(
        {name: torch.stack([sample[name] for sample in samples]) for name in first},
        dims={name: ("batch", *dims) for name, dims in first.dims.items()},
        index=[sample.index for sample in samples if isinstance(sample.index, int)],
    )
    batch.members = [member for sample in samples for member in sample.members]
    return batch
