"""Lists the GGUF files in the hub's cache on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from llamapipe.hub.download import library
from llamapipe.hub.reference import PREFIX, part_of


class CachedModel(NamedTuple):
    """``reference``: what ``-m`` takes. ``size_bytes``: of all parts of a split model."""

    reference: str
    path: Path
    size_bytes: int


def cached_models() -> list[CachedModel]:
    """The models in the cache, by name; none if there is no cache. Raises ImportError without the extra ``hub``."""
    hub = library()
    try:
        repos = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    found: dict[str, CachedModel] = {}
    for repo in repos:
        for revision in sorted(repo.revisions, key=lambda one: one.last_modified):
            files = {
                str(file.file_path.relative_to(revision.snapshot_path)): file
                for file in revision.files
                if file.file_name.endswith(".gguf")
            }
            for name, file in files.items():
                model, part = part_of(name)
                if part == 1:
                    size = sum(other.size_on_disk for n, other in files.items() if part_of(n)[0] == model)
                    reference = f"{PREFIX}{repo.repo_id}/{name}"
                    found[reference] = CachedModel(reference, Path(file.file_path), size)
    return [found[reference] for reference in sorted(found)]
