"""The tests with other versions than your own: ``nox`` runs all, ``nox -s lowest -- tests/unit/plan`` a part of one.

With uv installed, environments are made by it, in a tenth of the time. torch's default build brings several GB of CUDA
packages an environment, which uv shares between them; with ``UV_TORCH_BACKEND=cpu`` there are none.
"""

import re

import nox

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
TESTED = ".[test,s3,obstore,trainers]"
NEWEST = ".[test,s3,obstore,trainers,virtual,grib]"  # what writes sets asks for newer versions than the lowest

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["newest", "lowest_torch", "lowest", "docs"]
nox.options.error_on_missing_interpreters = True


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """The newest of every package, on each Python."""
    session.install(NEWEST)
    _test(session)


@nox.session(python=PYTHONS[0])
def lowest_torch(session: nox.Session) -> None:
    """The lowest torch that pyproject.toml allows, the newest of all else."""
    session.install(TESTED, *(pin for pin in _lowest() if pin.startswith("torch==")))
    _test(session)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Every package at the lower bound that pyproject.toml declares."""
    constraints = f"{session.create_tmp()}/lowest.txt"
    with open(constraints, "w") as file:
        file.write("\n".join(_lowest()))
    session.install(TESTED, "--constraint", constraints)
    _test(session)


@nox.session(python=PYTHONS[0])
def gpu(session: nox.Session) -> None:
    """On a machine with a GPU: tests, copies, waits, operations and examples, in gpu.json and a table."""
    session.install(TESTED)
    session.run("python", "-m", "tests.gpu", *(session.posargs or ["gpu.json"]))


@nox.session(python=PYTHONS[0])
def docs(session: nox.Session) -> None:
    """The site, in build/site, with warnings as errors; the tests build it too."""
    session.install(".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-j", "2", "docs", "build/site", *session.posargs)


def _lowest() -> list[str]:
    """Return ``numpy==1.26`` for each ``numpy>=1.26``; constraints name no extras."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    declared = {requirement for group in (PROJECT["project"]["dependencies"], *extras) for requirement in group}
    return sorted(re.sub(r"\[.*?\]", "", r).replace(">=", "==") for r in declared if ">=" in r)


def _test(session: nox.Session) -> None:
    session.run("pytest", *(session.posargs or ["-n", "2", "--dist", "loadfile", "-m", "slow or not slow"]))
