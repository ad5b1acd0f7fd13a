"""Which addresses a hub takes, and its life."""

import pytest
from index_fakes import (
    MODEL,
    SECRET,
)

from cacheindex.hub import Hub, SourceSpec
from cacheindex.table import Table


@pytest.mark.parametrize(
    ("address", "bind", "fits"),
    [
        ("tcp://127.0.0.1:5557", True, True),
        ("tcp://localhost:5557", True, True),
        ("tcp://[::1]:5557", True, True),
        ("tcp://*:5557", True, False),
        ("tcp://0.0.0.0:5557", True, False),
        ("tcp://10.0.0.1:5557", True, False),
        ("tcp://10.0.0.1:5557", False, True),
        ("tcp://*:5557", False, False),
        ("tcp://host", False, False),
        ("inproc://x", False, False),
        ("ipc://", False, False),
        ("http://127.0.0.1:80", False, False),
    ],
)
def test_addresses(address: str, bind: bool, fits: bool) -> None:
    hub = Hub(Table(1 << 20), secret=SECRET)
    spec = SourceSpec("w", MODEL, address, bind=bind)
    if fits:
        hub.watch(spec)
    else:
        with pytest.raises(ValueError, match="://"):
            hub.watch(spec)
    hub.close()


def test_remote_binds_only_where_allowed() -> None:
    hub = Hub(Table(1 << 20), secret=SECRET, allow_remote_bind=True)
    hub.watch(SourceSpec("w", MODEL, "tcp://0.0.0.0:5557", bind=True))
    hub.close()
    with pytest.raises(ValueError, match="secret"):
        Hub(Table(1 << 20), secret=b"short")


def test_life_of_a_hub() -> None:
    hub = Hub(Table(1 << 20), secret=SECRET)
    hub.start()
    with pytest.raises(RuntimeError):
        hub.start()
    hub.report("nobody", agreed=True)
    hub.new_epoch("nobody", "why not")
    assert hub.status("nobody") is None
    hub.close()
    hub.close()
