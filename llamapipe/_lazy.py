"""Imports a package's public names on first use, so that importing the package does not need its extra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Raise an ImportError that names ``what`` and the extra if the block imports a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "llamapipe":
            raise
        raise ImportError(
            f"{what} needs {e.name}, which is not installed: pip install 'llamapipe[{extra}]'"
        ) from None


def imported_name(package: str, homes: Mapping[str, str], name: str, extra: str) -> object:
    """Return the value of a public name, for ``__getattr__`` of a package. ``homes``: the module of each name.

    Raises AttributeError for other names; ImportError, which names the extra, if a package is not installed.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with needs_extra(package, extra):
        value: object = getattr(import_module(f"{package}.{homes[name]}"), name)
    return value
