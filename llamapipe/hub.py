"""Model files from the Hugging Face Hub: names, the cache on this machine, downloads.

Choosing among the names in a repository is pure. The hub and its cache are accessed through huggingface_hub (the extra
``hub``), which heeds ``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``, and continues a download whose
connection breaks. Nothing here knows about models.
"""

from __future__ import annotations

import errno
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from llamapipe.errors import ModelLoadError
from llamapipe.gguf.names import part_name, read_name, split_quantization

PREFIX = "hf:"
MMPROJ = "mmproj*.gguf"  # for ``choose``: the projector; of several types, that of F16
_ADDRESS = re.compile(
    r"(?:https?://)?(?:huggingface|hf)\.co/([^/?:]+/[^/?:]+)"
    r"(?:/(?:(?:resolve|blob)/[^/]+/)?([^?#]+\.gguf)|(:[^/?#]+)|/tree(?:/[^?#]*)?|/)?(?:[?#].*)?"
)
_NO_MODELS = ("mmproj", "imatrix")  # projectors of pictures and importance matrices accompany models
_MOST_LISTED = 20


class Reference(NamedTuple):
    """A file, or a pattern of files, of a repository. ``filename``: see ``pattern`` of ``choose``."""

    repo_id: str
    filename: str | None


def parse(text: str) -> Reference:
    """Parse ``hf:owner/repo``, ``hf:owner/repo/file`` (the file may be a pattern), or ``hf:owner/repo:quantization``.

    Raises ValueError.
    """
    owner, _, rest = text.removeprefix(PREFIX).partition("/")
    name, slash, filename = rest.partition("/")
    name, colon, quantization = name.partition(":")
    is_whole = owner and name and bool(filename) == bool(slash) and bool(quantization) == bool(colon)
    if not text.startswith(PREFIX) or not is_whole or (slash and colon):
        raise ValueError(
            f"{text!r} names no model on the hub; write hf:OWNER/REPO, hf:OWNER/REPO/FILE.gguf or hf:OWNER/REPO:QUANT"
        )
    return Reference(f"{owner}/{name}", filename or colon + quantization or None)


def hub_name(address: str) -> str | None:
    """Return the name, as ``parse`` takes it, for a URL of the hub's website; None for any other text."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return None
    repo_id, filename, quantization = match.groups()
    return f"{PREFIX}{repo_id}{f'/{filename}' if filename else quantization or ''}"


def choose(names: Iterable[str], pattern: str | None, where: str) -> list[str]:
    """Choose the files of the one model that matches: a single file, or all its parts in order.

    ``pattern``: a file's name or a pattern such as ``*Q4_K_M.gguf``, which matches the whole path or its last part;
    ``:Q4_K_M`` matches the end of the name, regardless of case. None means the only model. ``where``: the place that
    messages name. Raises ValueError if no model matches, or several do, or a part is missing.
    """
    files = sorted(name for name in names if name.endswith(".gguf"))
    if pattern is None or pattern.startswith(":"):
        matches = [name for name in files if not _last(name).startswith(_NO_MODELS)]
        if pattern is not None:
            matches = [name for name in matches if _has_quantization(name, pattern[1:])]
    elif pattern in files:
        matches = [pattern]
    else:
        matches = [name for name in files if fnmatchcase(name, pattern) or fnmatchcase(_last(name), pattern)]
    if pattern == MMPROJ and len(matches) > 1:
        matches = [name for name in matches if _has_quantization(name, "F16")] or matches
    models = {_model_of(name) for name in matches}
    if not models:
        what = (
            "no GGUF file" if pattern is None else f"no GGUF file that matches {pattern.removeprefix(':')!r}"
        )
        raise ValueError(f"{where} has {what}; it has {_list_names(files)}")
    if len(models) > 1:
        raise ValueError(f"{where} has {len(models)} models; name one of {_list_names(matches)}")
    stem, _, n = read_name(matches[0])
    if not n:
        return matches
    parts = [part_name(stem, i, n) for i in range(1, n + 1)]
    missing = [part for part in parts if part not in files]
    if missing:
        raise ValueError(f"{where} has not all parts of {stem}: {missing[0]} is missing")
    return parts


def source_of(path: Path) -> Reference | None:
    """Return the repository of a cached file, with the commit in place of a file name; None for other files."""
    for folder in path.absolute().parents:
        owner_and_name = folder.parent.parent.name.removeprefix("models--").split("--")
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return Reference("/".join(owner_and_name), folder.name)
    return None


def quantization_of(name: str) -> str | None:
    """Return the quantization at the end of a file's name, as in ``model-Q4_K_M.gguf``; None if there is none."""
    return split_quantization(read_name(_last(name)).stem)[1]


def pull_advice(path: Path) -> str:
    """Return the advice for a cut file of the cache; empty for a file elsewhere."""
    source = source_of(path)
    if source is None:
        return ""
    name = path.absolute().as_posix().partition(f"/snapshots/{source.filename}/")[2]
    return f"; llamapipe pull {PREFIX}{source.repo_id}/{name} downloads it again"


def _has_quantization(name: str, quantization: str) -> bool:
    """Return whether the file's name ends with the quantization, as in ``model-Q4_K_M.gguf``."""
    stem, wanted = read_name(_last(name)).stem.lower(), quantization.lower()
    return stem == wanted or stem.endswith(tuple(separator + wanted for separator in "-._"))


def _model_of(name: str) -> tuple[str, int]:
    """Return what the files of one model share. A model in one file and the same one in parts are two models."""
    stem, _, n_parts = read_name(name)
    return stem, n_parts


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return (", ".join(names[:_MOST_LISTED]) or "none") + more


_log = logging.getLogger("llamapipe")
_OUT_OF_ORDER = (429, 500, 502, 503, 504)  # statuses that do not say that the model is not there
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def model_file(
    repo_id: str,
    filename: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    watch: Watch | None = None,
) -> Path:
    """Return the path of a model's first or only file; other parts are next to it. ``Model`` describes the options.

    ``watch``: called in the threads of the download with the name of a file, its size in bytes, and how many bytes have
    arrived; an exception in it ends the download. Only old versions of huggingface_hub continue it the next time.

    Raises ImportError without the extra ``hub``, ValueError for a bad name, ModelLoadError if the hub or its cache has
    no such model.
    """
    hub = library()
    where = f"{repo_id}{f'@{revision}' if revision else ''}"
    try:
        hub.utils.validate_repo_id(repo_id)
        with _bars(hub, progress):
            if local_files_only or hub.constants.HF_HUB_OFFLINE:
                return _find_cached(hub, repo_id, filename, revision, where)
            try:
                _connect(hub)
                sizes = _sizes(hub, repo_id, revision)
                files = [
                    _download(hub, repo_id, name, revision, watch, sizes[name])
                    for name in choose(sizes, filename, where)
                ]
                return files[0]
            except _http_errors(hub) as e:
                response = e.response if isinstance(e, hub.errors.HfHubHTTPError) else None
                if response is not None and response.status_code not in _OUT_OF_ORDER:
                    raise
                if _is_local(e):
                    raise
                with suppress(ModelLoadError, ValueError):
                    path = _find_cached(hub, repo_id, filename, revision, where)
                    problem = (
                        "cannot be reached" if response is None else f"answers with {response.status_code}"
                    )
                    _log.warning("the hub %s; using %s from the cache", problem, path.name)
                    return path
                raise
    except hub.errors.HFValidationError as e:
        raise ValueError(f"{repo_id!r} is not the name of a repository: {e}") from None
    except ValueError as e:
        raise ModelLoadError(str(e)) from None
    except _http_errors(hub) as e:
        raise ModelLoadError(f"{where}: {_reason(hub, e)}") from e


Watch = Callable[[str, int, int], None]


def _download(
    hub: Any, repo_id: str, name: str, revision: str | None, watch: Watch | None, size: int
) -> Path:
    """Return the path of a file in the cache, which is downloaded unless it is there. Raises as the library does.

    The library takes a file of the cache as it is, even if it was cut off by a copy or a full disk.
    """
    bar = watch and _watching(watch, name)
    path = Path(hub.hf_hub_download(repo_id, name, revision=revision, tqdm_class=bar))
    if (there := path.stat().st_size) != size:
        _log.warning("%s has %d bytes, but the hub's file has %d: downloading it again", path, there, size)
        path = Path(
            hub.hf_hub_download(repo_id, name, revision=revision, tqdm_class=bar, force_download=True)
        )
    return path


def _watching(watch: Watch, name: str) -> type:
    """Make a progress bar that shows nothing and calls ``watch`` about a file."""
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            is_shown = super().update(n)
            watch(name, int(self.total or 0), int(self.n))
            return is_shown

    return Bar


def delete(repo_id: str, filename: str | None) -> list[Path]:
    """Remove a model's files from the cache, and return those of its newest revision. Raises as ``model_file`` does.

    Other revisions with the same contents lose them too.
    """
    first = model_file(repo_id, filename, local_files_only=True, progress=False)
    model = _model_of(first.name)
    files = [path for path in first.parent.glob("*.gguf") if _model_of(path.name) == model]
    snapshots = next(path for path in first.parents if path.name == "snapshots")
    for file in files:
        blob = file.resolve()
        for other in list(snapshots.rglob(file.name)):
            if other.resolve() == blob:
                other.unlink()
        blob.unlink(missing_ok=True)
    return files


def library() -> Any:
    """Import huggingface_hub. Raises ImportError, which names the extra."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.hf_api
        import huggingface_hub.utils
    except ImportError as e:
        raise ImportError(
            f"models from the hub need {e.name}, which is not installed: pip install 'llamapipe[hub]'"
        ) from None
    return huggingface_hub


def _connect(hub: Any) -> None:
    """Raise ConnectionError if the hub cannot be reached.

    Without it the library would try its first request six times in half a minute, and log every failure.
    """
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
    except _http_errors(hub) as e:
        raise ConnectionError(f"{hub.constants.ENDPOINT} cannot be reached: {e}") from e


def _sizes(hub: Any, repo_id: str, revision: str | None) -> dict[str, int]:
    """Return the files of a repository with their sizes.

    Raises as the library does; ConnectionError if what answers is no hub.
    """
    try:
        entries = hub.HfApi().list_repo_tree(repo_id, recursive=True, revision=revision)
        return {
            str(entry.path): int(entry.size) for entry in entries if isinstance(entry, hub.hf_api.RepoFile)
        }
    except (ValueError, TypeError, LookupError, AttributeError) as e:  # such as the page of a login
        if isinstance(e, hub.errors.HFValidationError):
            raise
        raise ConnectionError(
            f"{hub.constants.ENDPOINT} does not answer as a hub does: check HF_ENDPOINT, and whether this network asks "
            "for a login"
        ) from e


def _http_errors(hub: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that a request may raise: for an HTTP error, or for no answer (HTTP library or OS)."""
    return (hub.errors.HfHubHTTPError, getattr(hub.errors, "HTTPError", OSError), OSError)


def _find_cached(hub: Any, repo_id: str, filename: str | None, revision: str | None, where: str) -> Path:
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
    """Show or hide the library's progress bars, which are a setting of the process."""
    if shown or hub.utils.are_progress_bars_disabled():
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


def _is_local(error: Exception) -> bool:
    """Return whether an error is of this machine's disk, not of the connection."""
    return isinstance(error, OSError) and (error.filename is not None or error.errno in _LOCAL)


def _reason(hub: Any, error: Exception) -> str:
    """Return one line on what a user can do about an error of the library."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return "the repository asks for consent to its terms: accept them on its page and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private and HF_TOKEN is missing"
    if isinstance(error, errors.RevisionNotFoundError):
        return "there is no such revision"
    if isinstance(error, ConnectionError):
        return f"{error}, and the cache of this machine has no such model"
    if _is_local(error):
        cache = hub.constants.HF_HUB_CACHE
        return (
            f"the file could not be written ({error}): {cache} must be writable and have room, or set HF_HOME"
        )
    text = str(error).strip().splitlines()
    return f"the hub did not answer as expected: {text[0] if text else type(error).__name__}"


class CachedModel(NamedTuple):
    """``reference``: what ``-m`` takes. ``size_bytes``: the size of all parts of a split model."""

    reference: str
    path: Path
    size_bytes: int


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, sorted by name, without image projectors; none if there is no cache.

    Raises ImportError without the extra ``hub``.
    """
    hub = library()
    try:
        repos = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    models: dict[str, CachedModel] = {}
    for repo in repos:
        for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified):
            files = {
                str(file.file_path.relative_to(revision.snapshot_path)): file
                for file in revision.files
                if file.file_name.endswith(".gguf")
            }
            for name, file in files.items():
                model = _model_of(name)
                if read_name(name).part == 1 and not _last(name).startswith(_NO_MODELS):
                    size = sum(other.size_on_disk for n, other in files.items() if _model_of(n) == model)
                    reference = f"{PREFIX}{repo.repo_id}/{name}"
                    models[reference] = CachedModel(reference, Path(file.file_path), size)
    return [models[reference] for reference in sorted(models)]
