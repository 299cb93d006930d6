"""The journal: trajectories that were finished since a checkpoint, each written at once, so that a kill loses none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from pellucid.files.rundir import atomic_write
from pellucid.files.trajectories import newest_version, read_rollout, rollout_record
from pellucid.types import Prompt, Rollout


class Journal:
    """A folder with a file for each checkpoint, named by the version of its weights; one JSON object a line.

    The checkpoint holds what was finished before it. Noted is what those weights, or earlier ones, drew since then: a
    kill takes newer weights with it, and the next ones of their number are others. A file stays until the checkpoint
    after its own is whole.

    Args:
        folder: where the files are.
        version: of the weights that the run begins with.
        resumed: whether they are those of a checkpoint that its files may belong to; if not, the files are removed.
    """

    def __init__(self, folder: Path, version: int, *, resumed: bool) -> None:
        self._folder, self._since = folder, version
        self._found: dict[tuple[int, str], list[dict[str, Any]]] = {}
        old, records = self._files(), []
        for since, file in old.items():
            for line in file.read_text().splitlines() if resumed and since >= version else ():
                with suppress(json.JSONDecodeError):  # a line that a kill has torn
                    records.append(json.loads(line))
        known = [one for one in records if newest_version(one["rollout"]) <= version]
        for one in known:
            self._found.setdefault((one["number"], one["uid"]), []).append(one)
        self.newest = max((one["number"] for one in known), default=-1)
        """The number of the newest group of which something was found."""
        atomic_write(self._file, "".join(json.dumps(one) + "\n" for one in known))
        self._lines = self._file.open("a", buffering=1)  # a line is the file's, whatever becomes of this process
        for file in old.values():
            if file != self._file:
                file.unlink()

    @property
    def _file(self) -> Path:
        return self._folder / f"since_version_{self._since}.jsonl"

    def _files(self) -> dict[int, Path]:
        files = {int(file.stem.rpartition("_")[2]): file for file in self._folder.glob("since_version_*.jsonl")}
        return dict(sorted(files.items()))

    def take(self, number: int, prompt: Prompt) -> list[Rollout]:
        """Return what was found of a group, once."""
        return [read_rollout(record["rollout"], prompt) for record in self._found.pop((number, prompt.uid), [])]

    def note(self, number: int, rollout: Rollout) -> None:
        """Write a finished trajectory of a group, if weights of the last checkpoint or before drew it."""
        if max(max(part.versions, default=-1) for part in rollout.parts) <= self._since:
            self._append([{"number": number, "uid": rollout.prompt.uid, "rollout": rollout_record(rollout)}])

    def _append(self, records: Iterable[dict[str, Any]]) -> None:
        self._lines.writelines(json.dumps(record, default=str) + "\n" for record in records)

    def begin(self, version: int) -> None:
        """Go on, with what no group has taken yet, in the file of a checkpoint that is being written.

        The one before it is whole.
        """
        for file in list(self._files().values())[:-1]:
            file.unlink()
        self.close()
        self._since = version
        self._lines = self._file.open("a", buffering=1)
        self._append(chain.from_iterable(self._found.values()))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
