"""Which units a schedule captures, against torch's own schedule and by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerAction, schedule

from pellucid.observe.window import Phase, Window
from pellucid.stages import Unit

small = st.integers(0, 4)


@given(small, small, small, st.integers(1, 4), st.integers(0, 3))
def test_phases_are_those_of_torchs_schedule(skip_first, wait, warmup, active, repeat):
    window = Window(Unit.MICRO_BATCH, skip_first, wait, warmup, active, repeat)
    torchs = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
    phase_of = {
        ProfilerAction.NONE: Phase.OFF,
        ProfilerAction.WARMUP: Phase.WARM_UP,
        ProfilerAction.RECORD: Phase.ACTIVE,
        ProfilerAction.RECORD_AND_SAVE: Phase.ACTIVE,
    }
    for index in range(40):
        action = torchs(index)
        assert window.phase(index) is phase_of[action], index
        assert window.ends_with(index) == (action is ProfilerAction.RECORD_AND_SAVE), index


def test_a_window_without_end_goes_on_to_the_end_of_the_stage():
    window = Window(Unit.MINI_BATCH, skip_first=2, active=None)
    assert [window.phase(index) for index in range(5)] == [Phase.OFF] * 2 + [Phase.ACTIVE] * 3
    assert not any(window.ends_with(index) for index in range(5))


@pytest.mark.parametrize(("index", "cycle"), [(3, 1), (6, 1), (7, 2), (10, 2), (11, 3)])
def test_cycles_are_counted_from_the_first_wait(index, cycle):
    assert Window(Unit.DECODE_STEP, skip_first=3, wait=1, warmup=1, active=2, repeat=0).cycle(index) == cycle
