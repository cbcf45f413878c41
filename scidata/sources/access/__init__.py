"""How bytes come here: files by ``preadv``, objects through fsspec, retries."""
