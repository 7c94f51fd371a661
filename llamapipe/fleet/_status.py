"""Reports the models of a pool to clients, as lists and as an event for each change."""

from __future__ import annotations

from typing import Any

from llamapipe.fleet.pool import ModelState, Pool, PooledModel


def entry_of(model: PooledModel, name: str, created: int, can_delete: bool) -> dict[str, Any]:
    """Return the entry of ``/v1/models`` for a model under one of its names.

    Only the entry of the first name has figures about the model. ``created``: the Unix time of the server's start.
    ``can_delete``: clients may delete files.
    """
    status: dict[str, Any] = {"value": model.state.value}
    if model.state is ModelState.LOADING:
        status["progress"] = model.progress
    elif model.state is ModelState.UNLOADED and model.failure is not None:
        status |= {"failed": True, "exit_code": 1, "error": model.failure}
    facts = model.facts
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created,
        "owned_by": "llamapipe",
        "status": status,
        "architecture": {
            "input_modalities": ["text"] if facts is None else list(facts.takes),
            "output_modalities": ["text"],
        },
        **({} if facts is None else {"capabilities": ["embedding" if facts.embeds else "completion"]}),
    }
    if name in model.entry.adapters:
        return {**entry, "root": model.name, "parent": model.name}
    if name != model.name:
        return {**entry, "root": model.name}
    return {
        **entry,
        "aliases": list(model.names[1:]),
        "adapters": list(model.entry.adapters),
        "tags": [],
        "can_remove": can_delete and model.entry.reference is not None,
        "pinned": model.entry.keep,
        "n_requests": model.n_users,
        **(
            {}
            if facts is None
            else {"memory_bytes": model.memory.n_bytes or facts.n_bytes, "context_length": facts.n_ctx}
        ),
    }


class Watch:
    """The models' states as last sent to a client of ``/models/sse``. Events are as in llama-server's router."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._names, self._states = self._now()

    def __repr__(self) -> str:
        return f"<Watch {len(self._states)} models>"

    def _now(self) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Any, ...]]]:
        models = self._pool.models
        names = {model.name: (*model.names, *model.entry.adapters) for model in models}
        # ``failed_at`` makes a repeated failure a change.
        return names, {
            model.name: (model.state, model.progress, model.failure, model.failed_at) for model in models
        }

    def changes(self) -> list[dict[str, Any]]:
        """Return one event for each change since the last call."""
        (names, states), (old_names, old_states) = self._now(), (self._names, self._states)
        self._names, self._states = names, states
        events: list[dict[str, Any]] = [
            {"model": name, "event": "model_remove"} for name in old_states if name not in states
        ]
        if names != old_names:
            events.append({"model": "*", "event": "models_reload"})
        for model in self._pool.models:
            before = old_states.get(model.name)
            if before is not None and before != states[model.name]:
                events.append({"model": model.name, "event": "model_status", "data": _status_event(model)})
        return events


def _status_event(model: PooledModel) -> dict[str, Any]:
    """Return a model's state in the format of llama-server's router. Its loads have several stages; ours have one."""
    data: dict[str, Any] = {"status": model.state.value}
    if model.state is ModelState.LOADING:
        stage = "text_model"
        data["progress"] = {"stages": [stage], "current": stage, "value": model.progress}
    elif model.state is ModelState.UNLOADED:
        data["exit_code"] = 0 if model.failure is None else 1
        if model.failure is not None:
            data["error"] = model.failure
    return data
