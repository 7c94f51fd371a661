"""Overrides the scaling of rotary positions that a model's file sets.

A model that was trained with contexts of N tokens can read longer ones if positions are scaled into the range it knows.
``"linear"`` divides all positions. ``"yarn"`` (arXiv 2309.00071) divides them for slow rotations only and sharpens
attention a little. llama.cpp computes both.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from llamapipe._options import BY_NAME
from llamapipe.arguments import check_option

if TYPE_CHECKING:
    from llamapipe.llama.model import Model

Scaling = Literal["none", "linear", "yarn", "longrope"]
# llama.cpp's numbers for the kinds of scaling.
SCALINGS: Final = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_LONG = "rope_factors_long.weight"
_MOST_TOKENS = 2**31 - 1  # llama.cpp counts tokens in 32 bits


@dataclass(frozen=True)
class Rope:
    """The position options of ``Engine`` and ``EngineTuning``; None: the file's value. Raises TypeError, ValueError."""

    rope_scaling: str | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.options().items():
            check_option(BY_NAME[name], value)

    def options(self) -> dict[str, Any]:
        """Return the options that were set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check(self, model: Model) -> None:
        """Raise ValueError for options that would do nothing with this model."""
        options = self.options()
        if not options:
            return
        if not model.rotates:
            name = next(iter(options))
            raise ValueError(f"{name} is given, and {model.path.name} has no rotary positions; leave it out")
        scaling, scale = self._scaling(model), self._scale(model)
        if self.rope_scaling in ("linear", "yarn") and scale == 1:
            raise ValueError(
                f"rope_scaling is {scaling!r}, and neither rope_freq_scale nor the file sets a factor: give "
                "rope_freq_scale, such as 0.25 for four times the context"
            )
        if scaling == "none" and self.rope_freq_scale not in (None, 1):
            raise ValueError(
                f"rope_freq_scale is {self.rope_freq_scale:g}, and rope_scaling is 'none'; give 'yarn' or 'linear'"
            )
        for name in options:
            if name.startswith("yarn_") and scaling != "yarn":
                raise ValueError(
                    f"{name} is given, and rope_scaling is {scaling!r}; it needs rope_scaling='yarn'"
                )
        if self.most_tokens(model) > _MOST_TOKENS:
            raise ValueError(
                f"rope_freq_scale is {scale:g}, which is for contexts of {self.most_tokens(model):.3g} tokens; "
                f"the limit is {_MOST_TOKENS}: give a larger rope_freq_scale"
            )

    def most_tokens(self, model: Model) -> float:
        """Return the longest context, in tokens, that positions are scaled for."""
        n_train = float(model.n_ctx_train)
        if self._scaling(model) == "none":
            return n_train
        return max(n_train, (self.yarn_orig_ctx or self._n_unscaled(model)) / self._scale(model))

    def _n_unscaled(self, model: Model) -> float:
        return float(model.metadata.get(f"{_prefix(model)}.original_context_length") or model.n_ctx_train)

    def _scaling(self, model: Model) -> str:
        if self.rope_scaling is not None:
            return self.rope_scaling
        return model.metadata.get(f"{_prefix(model)}.type", "linear")

    def _scale(self, model: Model) -> float:
        if self.rope_freq_scale is not None:
            return self.rope_freq_scale
        older = model.metadata.get(f"{model.metadata.get('general.architecture')}.rope.scale_linear", 1)
        return 1 / (float(model.metadata.get(f"{_prefix(model)}.factor", older)) or 1)

    def apply(self, params: Any) -> None:
        """Set the fields of llama.cpp's ``llama_context_params``."""
        for name, value in self.options().items():
            if name == "rope_scaling":
                params.rope_scaling_type = SCALINGS[value]
            else:
                setattr(params, name, value)

    def fingerprint(self, model: Model, n_ctx: int) -> bytes:
        """Return 16 bytes that differ between options whose cells are not interchangeable. Raises OSError.

        ``n_ctx``: positions that a sequence may have. If the file has two sets of factors, llama.cpp chooses one by
        this number (``get_rope_factors``).
        """
        is_long = _LONG in model.tensors and n_ctx > self._n_unscaled(model)
        if not self.options() and not is_long:
            return model.fingerprint
        differs = repr((astuple(self), is_long)).encode()
        return hashlib.sha256(model.fingerprint + differs).digest()[:16]


FROM_FILE: Final = Rope()


def _prefix(model: Model) -> str:
    return f"{model.metadata.get('general.architecture')}.rope.scaling"
