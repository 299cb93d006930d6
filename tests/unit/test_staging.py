"""What is written in the background is the state that there was when the writing began."""

import threading
from typing import Any

import pytest
import torch

from pellucid.training.checkpoint import StagedWriter


class HeldBack:
    """A write that begins when `go` is set, and keeps what it was given."""

    def __init__(self) -> None:
        self.go, self.written = threading.Event(), {}

    def __call__(self, state: dict[str, Any]) -> None:
        assert self.go.wait(60)
        self.written = {"values": state["model"]["w"].clone(), "step": int(state["step"])}


def state(fill: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((64, 3), fill)}, "step": torch.tensor(int(fill))}


def test_the_tensors_may_change_before_they_are_written():
    given, write = state(1), HeldBack()
    wait = StagedWriter().start(given, write)
    given["model"]["w"].zero_()
    given["step"].zero_()
    write.go.set()
    wait()
    assert write.written["values"].unique().tolist() == [1] and write.written["step"] == 1


def test_the_next_write_waits_for_the_one_before_and_uses_its_memory():
    writer, first, second, places = StagedWriter(), HeldBack(), HeldBack(), []
    writer.start(state(1), first)
    threading.Timer(0.05, first.go.set).start()
    second.go.set()
    writer.start(state(2), second)()
    assert first.written["values"].unique().tolist() == [1]
    assert second.written["values"].unique().tolist() == [2]
    for fill in (3, 4):
        writer.start(state(fill), lambda state: places.append(state["model"]["w"].data_ptr()))()
    assert places[0] == places[1]


def test_a_tensor_of_another_shape_gets_memory_of_its_own():
    writer, shapes = StagedWriter(), []
    for size in (2, 3):
        given = {"w": torch.ones(size, 2), "more": {str(size): torch.ones(1)}}
        writer.start(given, lambda state: shapes.append((tuple(state["w"].shape), *state["more"])))()
    assert shapes == [((2, 2), "2"), ((3, 2), "3")]


def test_what_fails_is_raised_by_the_wait_and_not_by_the_next_write():
    def broken(_: dict[str, Any]) -> None:
        raise OSError("no")

    writer, write = StagedWriter(), HeldBack()
    wait = writer.start(state(1), broken)
    write.go.set()
    writer.start(state(2), write)()
    assert write.written["step"] == 2
    with pytest.raises(OSError, match="no"):
        wait()
