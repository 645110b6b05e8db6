"""Report of the CPU kernel forms that tests ran in, for the end of `make test`, because no machine has all of them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

# AMX kernels on emulated tiles (emulated_amx.py).
EMULATED = "emulated_amx"
EVERY_FORM = ["amx", EMULATED, "avx512", "avx2"]

# User property of a report: the form that its test ran in.
PROPERTY = "kernel_form"


def note(item: pytest.Item) -> None:
    """Record the form of a test with the fixture `compiled` in its report."""
    callspec = getattr(item, "callspec", None)
    form = callspec.params.get("compiled") if callspec else None
    # Other tests have a parameter of that name.
    if form in EVERY_FORM:
        item.user_properties.append((PROPERTY, form))


def summary(reports: Iterable[Any]) -> str | None:
    """Return the summary line; None if no kernel test ran."""
    ran = Counter(value for report in reports for name, value in report.user_properties if name == PROPERTY)
    if not ran:
        return None
    from mlaforge.ops import native
    from support import emulated_amx

    def named(form: str) -> str:
        emulated = form == EMULATED or (form == "amx" and emulated_amx.replaces_amx())
        return "amx on emulated tiles" if emulated else form

    parts = ["CPU kernels: their tests ran in " + ", ".join(f"{named(form)} ({n})" for form, n in sorted(ran.items()))]
    if missing := [form for form in native.FORMS if form not in ran]:
        parts.append(f"not in {', '.join(missing)}")
    form = native.form() if native.why_not() is None else None
    parts.append(f"other tests took {named(form) if form else 'none'}")
    return "; ".join(parts)
