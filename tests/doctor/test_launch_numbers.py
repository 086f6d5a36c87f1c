"""Numbers of the launcher, and the rendezvous' port against real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from primus_odc.doctor import launch
from primus_odc.doctor.job import Job

ONE, TWO = Job(), Job(nodes=2)


@pytest.mark.parametrize(
    ("job", "environment", "expected"),
    [
        (ONE, {}, [("launch", "ok", "node 0 of 1")]),
        (TWO, {"NODE_RANK": "1", "NNODES": "2", "WORLD_SIZE": "4", "GPUS_PER_NODE": "2"}, [("launch", "ok", "node 1 of 2")]),
        (TWO, {}, [("NODE_RANK", "note", "takes itself for node 0")]),
        (TWO, {"NODE_RANK": "2"}, [("NODE_RANK", "problem", "numbered from 0 to 1")]),
        (ONE, {"NODE_RANK": "1"}, [("NODE_RANK", "problem", "NODE_RANK=1 of 1 node:")]),
        (TWO, {"NODE_RANK": "one"}, [("NODE_RANK", "problem", "NODE_RANK=one is not a whole number")]),
        (ONE, {"NNODES": "1:4"}, [("NNODES", "problem", "NNODES=1:4 is not a whole number from 1")]),
        (ONE, {"NNODES": "0", "MASTER_PORT": "65536"}, [("NNODES", "problem", "NNODES=0"), ("MASTER_PORT", "problem", "from 1 to 65535")]),
        (ONE, {"MASTER_PORT": "-1"}, [("MASTER_PORT", "problem", "MASTER_PORT=-1")]),
        (ONE, {"WORLD_SIZE": "²", "GPUS_PER_NODE": "8.0"}, [("GPUS_PER_NODE", "problem", "8.0"), ("WORLD_SIZE", "problem", "²")]),
    ],
)
def test_numbers(job: Job, environment: dict[str, str], expected: list[tuple[str, str, str]]) -> None:
    findings = launch.check_numbers(job, environment)
    assert [(f.check, f.severity) for f in findings] == [(check, severity) for check, severity, _ in expected]
    assert all(text in f.found for f, (_, _, text) in zip(findings, expected, strict=True))
    assert all(f.setting or f.severity == "ok" for f in findings)
    job.world(environment)  # understood as far as it can be


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def found(job: Job, **environment: str) -> tuple[str, str]:
    (finding,) = launch.check_port(job, environment)
    return finding.severity, finding.found


def test_a_port_that_is_taken_matters_on_node_0_alone(taken: int) -> None:
    assert found(TWO, MASTER_PORT=str(taken), NODE_RANK="0") == (
        "problem",
        f"port {taken} cannot be opened here: another process listens on it",
    )
    assert found(ONE, MASTER_PORT=str(taken))[0] == "problem"
    assert found(TWO, MASTER_PORT=str(taken), NODE_RANK="1")[0] == "ok"
    assert found(ONE, MASTER_PORT=str(taken), TORCHELASTIC_RUN_ID="1")[0] == "ok"  # by the job itself


def test_a_port_left_moments_ago_is_free() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store has it
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # closed on this side first: its end stays for a while
    assert found(ONE, MASTER_PORT=str(port)) == ("ok", f"port {port}")


def test_reserved_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(TWO, MASTER_PORT="80", NODE_RANK="1")[0] == "note"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert found(TWO, MASTER_PORT="80") == ("problem", "port 80 cannot be opened here: ports below 1024 are for privileged processes")


def test_no_port_is_needed_on_one_node(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DEFAULT_PORT", taken)
    assert found(ONE)[0] == "ok"
    for job, environment in ((TWO, {}), (ONE, {"MASTER_ADDR": "node-0"})):
        severity, text = found(job, **environment)
        assert severity == "problem" and "(the default)" in text
