"""Which units a schedule captures, against torch's own schedule."""

from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import schedule

from pellucid.config.schema.profiler import ScheduleConfig
from pellucid.observe.request import TO_THE_END, num_units, unit_action

small = st.integers(0, 4)


@given(small, small, small, st.integers(1, 4), st.integers(0, 3))
def test_actions_are_those_of_torchs_schedule(skip_first, wait, warmup, active, repeat):
    window = ScheduleConfig("micro_batch", skip_first, wait, warmup, active, repeat)
    torchs = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)
    assert [unit_action(window, number) for number in range(40)] == [torchs(number).name for number in range(40)]


def test_a_window_without_end_goes_on_to_the_end_of_the_stage():
    window = ScheduleConfig("mini_batch", skip_first=2, active=TO_THE_END)
    assert [unit_action(window, number) for number in range(5)] == ["NONE"] * 2 + ["RECORD"] * 3
    assert num_units(window) == 3
