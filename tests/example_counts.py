"""How many examples property tests try: `--hypothesis-profile` quick, test (unless said otherwise) or all."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

SHARES = {"quick": 0.1, "test": 1.0, "all": 5.0}
"""Of the number that a test asks for."""


def register_profiles() -> None:
    """Make the profiles known, and `test` the one in force.

    Only `all` draws other examples in each run: what it finds is no reason for an unrelated change to fail.
    """
    for name, share in SHARES.items():
        settings.register_profile(
            name,
            max_examples=int(100 * share),
            derandomize=name != "all",
            deadline=None,  # a busy machine makes examples slow, and that says nothing about the code
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("test")
    _draw_no_constants_of_modules()


def _draw_no_constants_of_modules() -> None:
    """Have only `all` draw the constants of imported modules, as hypothesis does among others.

    Which are imported depends on the tests that ran before, and thus the examples would.
    """
    of_modules, none = providers._get_local_constants, Constants()
    vars(providers)["_get_local_constants"] = lambda: (
        of_modules() if settings.get_current_profile_name() == "all" else none
    )


def examples(count: int) -> int:
    """Return the `max_examples` of a test that wants `count` of them in `make test`."""
    return max(3, int(count * SHARES[settings.get_current_profile_name()]))
