"""Finds model files in the hub's cache on this machine, or downloads them, with huggingface_hub.

``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` are heeded by that library. An interrupted download
continues where it ended.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamapipe.errors import ModelLoadError
from llamapipe.hub.reference import choose

_log = logging.getLogger("llamapipe")
# Errors of this machine's disk, not of the connection.
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def model_file(
    repo_id: str,
    filename: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: bool = True,
) -> Path:
    """The path of a model's first or only file, whose other parts are beside it; for options see ``Model``.

    Raises ImportError without the extra ``hub``, ValueError for a bad name, ModelLoadError if the hub or its cache has
    no such model.
    """
    hub = library()
    where = f"{repo_id}{f'@{revision}' if revision else ''}"
    try:
        hub.utils.validate_repo_id(repo_id)
        with _bars(hub, progress):
            if local_files_only or hub.constants.HF_HUB_OFFLINE:
                return _cached(hub, repo_id, filename, revision, where)
            try:
                _connect(hub)
                names = hub.HfApi().list_repo_files(repo_id, revision=revision)
                files = [
                    hub.hf_hub_download(repo_id, name, revision=revision)
                    for name in choose(names, filename, where)
                ]
                return Path(files[0])
            except _http_errors(hub) as e:
                if isinstance(e, hub.errors.HfHubHTTPError) and e.response is not None:
                    raise
                if isinstance(e, OSError) and e.errno in _LOCAL:
                    raise
                # There is no connection.
                with suppress(ModelLoadError, ValueError):
                    found = _cached(hub, repo_id, filename, revision, where)
                    _log.warning("the hub cannot be reached; using %s from the cache", found.name)
                    return found
                raise
    except hub.errors.HFValidationError as e:
        raise ValueError(f"{repo_id!r} is no name of a repository: {e}") from None
    except ValueError as e:
        raise ModelLoadError(str(e)) from None
    except _http_errors(hub) as e:
        raise ModelLoadError(f"{where}: {_reason(hub, e)}") from e


def library() -> Any:
    """huggingface_hub. Raises ImportError, which names the extra."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as e:
        raise ImportError(
            f"models from the hub need {e.name}, which is not installed: pip install 'llamapipe[hub]'"
        ) from None
    return huggingface_hub


def _connect(hub: Any) -> None:
    """Raises ConnectionError if the hub cannot be reached.

    Without it the library would try its first request six times in half a minute, and log every failure.
    """
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
    except _http_errors(hub) as e:
        raise ConnectionError(f"{hub.constants.ENDPOINT} cannot be reached: {e}") from e


def _http_errors(hub: Any) -> tuple[type[Exception], ...]:
    """What a request raises: an answer that is an error, or no answer (of the HTTP library, or of the system)."""
    return (hub.errors.HfHubHTTPError, getattr(hub.errors, "HTTPError", OSError), OSError)


def _cached(hub: Any, repo_id: str, filename: str | None, revision: str | None, where: str) -> Path:
    try:
        folder = Path(hub.snapshot_download(repo_id, revision=revision, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        raise ModelLoadError(
            f"{where} is not in the cache of this machine, and downloads are off (local_files_only, HF_HUB_OFFLINE)"
        ) from None
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.exists()]
    return folder / choose(names, filename, f"the cached {where}")[0]


@contextmanager
def _bars(hub: Any, shown: bool) -> Iterator[None]:
    """Shows or hides the library's progress bars, which are a setting of the process."""
    if shown or hub.utils.are_progress_bars_disabled():
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


def _reason(hub: Any, error: Exception) -> str:
    """What a user can do about an error of the library, in one line."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return "the repository asks for consent to its terms: accept them on its page and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private and HF_TOKEN is missing"
    if isinstance(error, errors.RevisionNotFoundError):
        return "there is no such revision"
    if isinstance(error, ConnectionError):
        return f"{error}, and the cache of this machine has no such model"
    text = str(error).strip().splitlines()
    return f"the hub did not answer as expected: {text[0] if text else type(error).__name__}"
