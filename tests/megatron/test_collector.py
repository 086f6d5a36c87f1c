from __future__ import annotations

import gc

import pytest

from primus_odc.megatron.collector import collecting_between_steps


@pytest.mark.parametrize("enabled", [True, False])
def test_off_inside_and_as_before_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), collecting_between_steps() as collect:
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            cycle: list[object] = []
            cycle.append(cycle)
            del cycle
            assert collect() >= 1
            raise ZeroDivisionError
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    finally:
        (gc.enable if before else gc.disable)()
