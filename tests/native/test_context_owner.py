"""The native owner of a context may be let go of in any order with its pipeline and its steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import llamapipe as lp
from llamapipe.native.load import native

N_CTX, N_UBATCH, DEPTH = 64, 16, 2
ORDERS = list(itertools.permutations(("context", "pipeline", "step")))


class Handles:
    """A context, its pipeline and one step, as native handles."""

    def __init__(self, model: lp.Model, threaded: bool) -> None:
        module = native()
        self.ffi, self.lib = module.ffi, module.lib
        lib = self.lib
        params = self.ffi.new("struct llama_context_params *", lib.llama_context_default_params())
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_UBATCH, N_UBATCH
        params.n_seq_max, params.n_outputs_max = 1, N_UBATCH
        params.n_threads = params.n_threads_batch = 1
        context = lib.lp_context_new(model.handle, params, 0, (DEPTH + 1) * N_UBATCH, False, False, False)
        assert context != self.ffi.NULL and lib.lp_context_has_ring(context)
        mode = lib.LP_HOST if lib.lp_context_ring_in_host_memory(context) else lib.LP_SYNC
        pipeline = lib.lp_pipeline_new(context, mode, DEPTH, DEPTH + 1, N_UBATCH, N_UBATCH, False, threaded)
        assert pipeline != self.ffi.NULL
        self.context, self.pipeline = context, pipeline
        self.step: Any = None

    def submit(self) -> None:
        code = self.ffi.new("int *")
        self.step = self.lib.lp_submit(self.pipeline, 3, [5, 6, 7], [0, 1, 2], [0, 0, 0], [0, 0, 1], code)
        assert self.step != self.ffi.NULL

    def largest(self, n_vocab: int) -> int:
        """The largest logit of the step's row, once it is computed."""
        in_place = self.ffi.new("bool *")
        assert self.lib.lp_step_wait(self.step, -1) and self.lib.lp_step_code(self.step) == 0
        row = self.ffi.unpack(self.lib.lp_step_expose(self.step, in_place), n_vocab)
        if in_place[0]:
            self.lib.lp_step_unexpose(self.step)
        return max(range(n_vocab), key=row.__getitem__)

    def free(self, what: str) -> None:
        if what == "pipeline":
            self.lib.lp_pipeline_close(self.pipeline, True)
        getattr(self.lib, f"lp_{what}_free")(getattr(self, what))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_handles_are_freed_in_any_order(tiny: lp.Model, order: tuple[str, ...]) -> None:
    handles = Handles(tiny, threaded=True)
    handles.submit()
    for what in order:
        handles.free(what)


def test_a_pipeline_computes_after_its_context_was_let_go(tiny: lp.Model) -> None:
    expected = []
    for free_first in (False, True):
        handles = Handles(tiny, threaded=True)
        if free_first:
            handles.free("context")
        handles.submit()
        expected.append(handles.largest(tiny.n_vocab))
        handles.free("pipeline")
        assert handles.largest(tiny.n_vocab) == expected[0]  # done steps outlive the pipeline and the context
        handles.free("step")
        if not free_first:
            handles.free("context")
    assert expected[0] == expected[1]
