"""Where the tasks of this folder have their data: beside them, whatever the current folder is, and never on a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def load(file: str, **others: Any) -> Any:
    """The documents of one JSON file as the split ``test``; the harness also passes its model arguments."""
    documents = json.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(documents)})
