"""HDF5 files: every numeric dataset by its path."""

from __future__ import annotations

from scidata.sources.hdf5.source import HDF5Base


class HDF5Source(HDF5Base):
    """One HDF5 file.

    ``arrays`` holds every dataset of numbers: contiguous, chunked with filters that numcodecs decodes (deflate,
    shuffle, fletcher32, bzip2, blosc, zstd), or marked ``fallback`` where only HDF5 reads it (compact, lzf, nbit,
    scale-offset, szip and other plugins, types that NumPy has no exact match for). Dimensions are named by their
    scales, else their labels, else ``dim_i``. Text, compounds and references are left out and named in ``skipped``,
    as are virtual datasets, external storage and external links unless ``allow_external``.

    Parameters
    ----------
    path
        File or URL. Opened at the first use, once per process.
    allow_external
        Also read what lies in other files, through HDF5.
    """

    format = "hdf5"
