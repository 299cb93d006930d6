"""What a run prints also goes to its log: all of it, as plain text, without the progress bars."""

import io
import sys

import pytest
from rich.panel import Panel

import pellucid.console
from pellucid.console import console, error_console, log_to, progress
from pellucid.errors import UserError


@pytest.fixture
def terminal(monkeypatch):
    """Let both consoles print to a terminal of 40 columns, with colours and progress bars."""
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    for each in (console, error_console):
        monkeypatch.setattr(each, "_file", screen)
        monkeypatch.setattr(each, "_force_terminal", True)
        monkeypatch.setattr(each, "is_interactive", True)
        monkeypatch.setattr(each, "_width", 40)
    monkeypatch.setattr(pellucid.console._log, "file", io.StringIO())
    return screen


def test_the_log_holds_what_both_consoles_print_before_and_in_the_block(terminal, tmp_path):
    long = "a line that is longer than the terminal is wide, and is not broken in the log"
    console.print("the plan")
    with log_to(tmp_path / "logs" / "controller.log"):
        console.print(f"[bold]{long}[/bold]")
        error_console.print(Panel("an error"), style="red")
    console.print("afterwards")
    lines = (tmp_path / "logs" / "controller.log").read_text().splitlines()
    assert lines[0].startswith("=== 20") and sys.argv[0] in lines[0]
    assert lines[1:3] == ["the plan", long] and "an error" in lines[4] and "afterwards" not in lines
    assert "\x1b" not in "".join(lines) and "afterwards" in terminal.getvalue()


def test_progress_bars_stay_on_the_terminal(terminal, tmp_path):
    with log_to(tmp_path / "log"), progress(transient=True) as bar:
        task = bar.add_task("steps", total=3)
        for _ in range(3):
            bar.advance(task)
            bar.refresh()
        console.print("step 3")
    assert "━" in terminal.getvalue()
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["step 3"]


def test_a_second_start_appends(terminal, tmp_path):
    for name in ("first", "second"):
        with log_to(tmp_path / "log"):
            console.print(name)
    assert [line for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("===")] == ["first", "second"]


def test_the_log_can_be_read_while_the_run_goes_on(terminal, tmp_path):
    with log_to(tmp_path / "log"):
        console.print("step 1")
        assert (tmp_path / "log").read_text().endswith("step 1\n")


def test_an_exception_that_ends_the_run_is_in_the_log(terminal, tmp_path):
    with pytest.raises(ValueError, match="broken"), log_to(tmp_path / "log"):
        raise ValueError("broken")
    text = (tmp_path / "log").read_text()
    assert text.endswith("ValueError: broken\n") and "Traceback" in text


def test_a_mistake_of_the_user_is_in_the_log_without_traceback(terminal, tmp_path):
    with pytest.raises(UserError), log_to(tmp_path / "log"):
        raise UserError("data.train_files", "is missing.", "Set it.")
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["data.train_files: is missing. Set it."]
