"""A folder as Ollama keeps its models in: manifests and blobs, made by hand."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

KIND = "application/vnd.ollama.image."


def put_blob(store: Path, data: bytes) -> str:
    """Writes a blob and returns its digest."""
    digest = sha256(data).hexdigest()
    blobs = store / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    (blobs / f"sha256-{digest}").write_bytes(data)
    return f"sha256:{digest}"


def put_model(store: Path, place: str, model: bytes | None, **layers_of: str | bytes) -> Path:
    """Writes a model and returns its manifest. ``place``: host, namespace, name and tag; ``layers_of``: more."""
    layers = (
        [] if model is None else [{"mediaType": f"{KIND}model", "digest": put_blob(store, model), "size": 1}]
    )
    layers += [
        {
            "mediaType": KIND + kind,
            "digest": put_blob(store, data.encode() if isinstance(data, str) else data),
            "size": len(data),
        }
        for kind, data in layers_of.items()
    ]
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": put_blob(store, b"{}")}
    manifest = store / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))
    return manifest
