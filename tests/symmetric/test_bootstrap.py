"""Nodes meet: four ranks on two hosts, which here are two network namespaces joined by a cable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from primus_odc.errors import ConfigError
from primus_odc.symmetric import bootstrap
from primus_odc.symmetric.bootstrap import Place, choose, meet
from tests.symmetric.harness import FileExchange, Ranks
from tests.symmetric.hosts import ADDRESSES, move_to, two_hosts

WORLD = 4
STORE = (ADDRESSES[0], 29411)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with two_hosts() as names:
        yield names


def _comes(rank: int, _: FileExchange, pipe: Connection, hosts: list[str]) -> str:
    """Moves to its host, then meets the others as often as it is told, each time in the way it is told."""
    from torch.distributed import PrefixStore, TCPStore

    move_to(hosts[rank // 2])
    store = TCPStore(*STORE, world_size=WORLD, is_master=rank == 0, wait_for_workers=False)
    pipe.send("ready")
    while (order := pipe.recv()) != "leave":
        own = order["ranks"].get(rank, {})
        if own.get("absent"):
            pipe.send("absent")
            continue
        time.sleep(own.get("delay_s", 0.0))
        start = time.monotonic()
        try:
            places = meet(
                PrefixStore(order["name"], store),
                [f"rank {r}" for r in range(WORLD)],
                rank,
                interface=own.get("interface"),
                store_address=STORE,
                timeout_s=order.get("timeout_s", 15.0),
            )
        except Exception as error:  # noqa: BLE001  # told to the test
            pipe.send((type(error).__name__, str(error), time.monotonic() - start))
        else:
            pipe.send([asdict(place) for place in places])
    return "left"


@pytest.fixture(scope="module")
def ranks(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(WORLD, tmp_path_factory.mktemp("bootstrap"), _comes, hosts) as started:
        started.expect("ready")
        yield started


def _meet(ranks: Ranks, name: str, changed: dict[int, dict[str, Any]], **order: Any) -> list[Any]:
    ranks.tell({"name": name, "ranks": changed, **order})
    return ranks.hear()


def test_ranks_find_each_other_by_the_interface_of_the_store(ranks: Ranks) -> None:
    answers = _meet(ranks, "good", {})
    assert all(answer == answers[0] for answer in answers)
    assert [(place["interface"], place["address"]) for place in answers[0]] == [("cable0", f"10.77.13.{1 + r // 2}") for r in range(WORLD)]
    ids = [place["host_id"] for place in answers[0]]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_a_slow_rank_is_waited_for(ranks: Ranks) -> None:
    answers = _meet(ranks, "slow", {2: {"delay_s": 1.5}})
    assert all(isinstance(answer, list) for answer in answers)


def test_a_missing_rank_is_named_when_the_time_is_over(ranks: Ranks) -> None:
    answers = _meet(ranks, "missing", {3: {"absent": True}}, timeout_s=1.0)
    assert answers[3] == "absent"
    for name, message, took in answers[:3]:
        assert name == "PeerTimeoutError" and "bootstrap: rank 3 did not get there: see the output of rank 3. The limit is 1 s" in message
        assert 1.0 <= took < 5.0


@pytest.mark.parametrize(
    ("name", "interfaces", "texts"),
    [
        # The first rank of a host speaks for it, so its interface counts.
        ("no way", {2: "other0"}, ["does not reach rank 2 at 10.88.1.1 (other0", "cable0 10.77.13.2", "odc.interface"]),
        ("same address everywhere", dict.fromkeys(range(WORLD), "bridge0"), ["does not reach rank 2 at 172.31.255.1", "odc.interface"]),
        ("loopback", {0: "lo"}, ["does not reach rank 0 at 127.0.0.1", "loopback"]),
    ],
)
def test_a_wrong_interface_is_told_to_all_ranks(ranks: Ranks, name: str, interfaces: dict[int, str], texts: list[str]) -> None:
    answers = _meet(ranks, name, {rank: {"interface": interface} for rank, interface in interfaces.items()})
    for kind, message, _ in answers:
        assert kind == "PeerError" and all(text in message for text in texts), message


def test_an_interface_that_does_not_exist_ends_all_ranks_at_once(ranks: Ranks) -> None:
    answers = _meet(ranks, "typo", {3: {"interface": "cabel0"}})
    for kind, message, took in answers:
        assert kind == "ConfigError" and "cabel0 does not exist" in message and "cable0 10.77.13.2" in message
        assert took < 10.0
    assert all("rank 3: odc.interface" in message for _, message, _ in answers[:3])


def test_an_answer_of_somebody_else_is_no_answer() -> None:
    with bootstrap._listening("127.0.0.2", "token of another") as port:
        own = Place(rank=0, host="a", host_id="a", interface="x", address="127.0.0.1", port=1, token="t", known={})
        peer = replace(own, rank=1, host_id="b", address="127.0.0.2", port=port, token="token of another")
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            patch.setattr(bootstrap.ipaddress.IPv4Address, "is_loopback", False)
            assert bootstrap._problem(own, peer, ["rank 0", "rank 1"]) == ""
            wrong = bootstrap._problem(own, replace(peer, token="token"), ["rank 0", "rank 1"])
    assert "somebody else answers" in wrong and "rank 1" in wrong


def test_a_name_of_the_store_that_does_not_resolve_is_told_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"no way from .* to no\.such\.host\.invalid:29500 .*: check MASTER_ADDR, or set odc\.interface"):
        choose(None, ("no.such.host.invalid", 29500))


def test_link_local_addresses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "interfaces", lambda: {"eth0": ["fe80::1"], "eth1": ["fe80::2", "fd00::2"]})
    assert choose("eth1", STORE) == ("eth1", "fd00::2")
    with pytest.raises(ConfigError, match="eth0 has link-local addresses only"):
        choose("eth0", STORE)
