"""Many checks on the ranks of one group: making a group costs more than most of them."""

import traceback


def failures(rank, num_ranks, make_mesh, checks):
    """Run checks, which get the mesh; return the tracebacks of those that fail, by name."""
    mesh, failed = make_mesh(), {}
    for check in checks:
        try:
            check(mesh)
        except Exception:
            failed[check.__name__] = traceback.format_exc()
    return failed


def asked_for(request):
    """Return those checks that this run has tests of, for the fixture that runs them all at once."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params["each"] for item in items if request.fixturename in item.fixturenames]
