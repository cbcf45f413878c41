"""Choose an executor: processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

from scidata.core.checks import check_int
from scidata.core.tasks.dask_jobs import Cluster
from scidata.core.tasks.processes import Processes
from scidata.core.tasks.work import Executor
from scidata.errors import ConfigError


def executor_of(jobs: int, client: object) -> Executor:
    """Return an executor: ``jobs`` processes, or the workers of the cluster that ``client`` is connected to.

    Raises
    ------
    ConfigError
        Both are given, or ``client`` is none.
    MissingDependencyError
        ``client`` is given, and distributed is not installed.
    """
    jobs = check_int("jobs", jobs, least=1)
    if client is None:
        return Processes(jobs)
    if jobs > 1:
        raise ConfigError(f"jobs={jobs}: excludes client=, whose cluster has its own processes; give one of the two")
    return Cluster(client)
