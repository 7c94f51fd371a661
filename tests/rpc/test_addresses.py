"""Addresses of workers are checked before anything connects."""

from __future__ import annotations

import pytest

import llamapipe as lp
from llamapipe.errors import BackendError
from llamapipe.rpc import parse_addresses


@pytest.mark.parametrize(
    ("rpc", "error", "message"),
    [
        ("127.0.0.1:1", TypeError, "rpc must be a sequence of addresses, not str"),
        (b"127.0.0.1:1", TypeError, "not bytes"),
        (50052, TypeError, "not int"),
        ({"127.0.0.1:1"}, TypeError, "not set"),
        ([50052], TypeError, "rpc must hold str, not int"),
        ([("127.0.0.1", 1)], TypeError, "not tuple"),
        ([], ValueError, "rpc is empty"),
        (["127.0.0.1"], ValueError, "is not of the form host:port"),
        (["127.0.0.1:"], ValueError, "is not of the form host:port"),
        ([":50052"], ValueError, "is not of the form host:port"),
        (["tcp://127.0.0.1:1"], ValueError, "is not of the form host:port"),
        (["127.0.0.1:-1"], ValueError, "is not of the form host:port"),
        (["127.0.0.1:٥"], ValueError, "is not of the form host:port"),
        (["a b:1"], ValueError, "is not of the form host:port"),
        (["a\0b:1"], ValueError, "is not of the form host:port"),
        (["::1:50052"], ValueError, "is not of the form host:port"),
        (["127.0.0.1:0"], ValueError, "is 0; it must be from 1 to 65535"),
        (["127.0.0.1:65536"], ValueError, "is 65536; it must be from 1 to 65535"),
        (["[::1]:50052"], ValueError, "::1 is an IPv6 address, and ggml-rpc uses IPv4 only"),
        (["127.0.0.1:1", "127.0.0.1:1"], ValueError, "has the worker 127.0.0.1:1 twice"),
        (["127.0.0.1:1", "localhost:1"], ValueError, "has the worker 127.0.0.1:1 twice"),
        (
            [f"127.0.0.1:{port}" for port in range(1, 18)],
            ValueError,
            "has 17 addresses; it must have at most 16",
        ),
        ([f"{'a' * 64}:1"], BackendError, "has no IPv4 address"),  # longer than a name may be: no look-up
    ],
)
def test_wrong_ones_are_refused(rpc: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lp.Model(lp.demo_model_path(), rpc=rpc)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_mode": "row"}, "split_mode is 'row', which splits each tensor"),
        ({"split_mode": "tensor"}, "split_mode is 'tensor', which splits each tensor"),
        ({"n_gpu_layers": 0}, "n_gpu_layers is 0, so that RPC workers would get nothing"),
        ({"vocab_only": True}, "vocab_only is True, so that RPC workers would get nothing"),
    ],
)
def test_options_that_leave_nothing_to_workers_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lp.Model(lp.demo_model_path(), rpc=["127.0.0.1:1"], **options)  # type: ignore[arg-type]


def test_names_are_looked_up_and_loopback_is_told_from_the_network() -> None:
    near, far = parse_addresses(["localhost:50052", "10.1.2.3:50052"], 16)
    assert (near.endpoint, near.is_loopback) == ("127.0.0.1:50052", True)
    assert (far.endpoint, far.is_loopback) == ("10.1.2.3:50052", False)
