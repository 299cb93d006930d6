"""Which units a schedule captures, against torch's own schedule."""

from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import schedule

from pellucid.observe.request import Window
from pellucid.stages import Unit

small = st.integers(0, 4)


@given(small, small, small, st.integers(1, 4), st.integers(0, 3))
def test_actions_are_those_of_torchs_schedule(skip_first, wait, warmup, active, repeat):
    window = Window(Unit.MICRO_BATCH, skip_first, wait, warmup, active, repeat)
    torchs = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
    assert [window.action(number) for number in range(40)] == [torchs(number).name for number in range(40)]


def test_a_window_without_end_goes_on_to_the_end_of_the_stage():
    window = Window(Unit.MINI_BATCH, skip_first=2, active=None)
    assert [window.action(number) for number in range(5)] == ["NONE"] * 2 + ["RECORD"] * 3
