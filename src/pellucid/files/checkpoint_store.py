"""A folder of checkpoints in which each one is complete or absent, and known to be unaltered.

The loop hands `save` a function that writes files; here they are made durable, checksummed into `manifest.json` and
renamed into place as `global_step_N`. Nothing else in the project creates, names or deletes checkpoint folders.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pellucid
from pellucid.errors import RunFailedError, UserError
from pellucid.files.rundir import atomic_write, fsync_dir
from pellucid.threads import start_beside

MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"global_step_(\d+)")
_LEFTOVER_NAME = re.compile(r"(global_step_\d+)\.(tmp|trash|replaced)-\d+")


class CheckpointStore:
    """The checkpoints below `directory`: the `keep` last saved stay (None keeps all), and that of step `spared`.

    As a context manager it waits at the end for the checkpoint that is written in the background.
    """

    def __init__(self, directory: Path | str, keep: int | None = None) -> None:
        assert keep is None or keep >= 1, "a store that keeps no checkpoint cannot save one"
        self.directory, self.keep = Path(directory), keep
        self.spared: int | None = None
        self._saving: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def path(self, step: int) -> Path:
        """Return the folder of one step's checkpoint, there or not."""
        return self.directory / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in the order in which they were saved."""
        return sorted(self._folders(), key=lambda step: (_saved_at(self.path(step)), step))

    def latest(self) -> int | None:
        """Return the step of the checkpoint saved last, or None.

        That is not always the highest step: a run that went back to step 10 and saved step 15 continues from 15,
        though 20 of the abandoned attempt may still be there.
        """
        return steps[-1] if (steps := self.steps()) else None

    def latest_since(self, time_ns: int) -> Path | None:
        """Return the checkpoint saved last, verified, or None if it was not saved after `time_ns` (`time.time_ns`)."""
        latest = self.latest()
        return None if latest is None or _saved_at(self.path(latest)) < time_ns else self.verify(latest)

    def save(self, step: int, write: Callable[[Path], Callable[[], None] | None]) -> Path:
        """Save one checkpoint and prune the oldest; whatever goes wrong, the earlier ones stay whole.

        Args:
            step: the training step that the checkpoint follows.
            write: creates the checkpoint's files below the folder it is given. It may leave that to others and return a
                function that waits for them: the rest then happens in the background. Until the checkpoint is complete,
                `steps` and `latest` do not have it, and what goes wrong is raised by the next `save` or `finish`, so a
                program calls `finish` at its end.

        Raises:
            RunFailedError: the disk is full, for this checkpoint or the one before; its folder is removed.
        """
        self.finish()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.recover()
        temporary = self._beside(step, "tmp")
        with self._removed_on_failure(temporary, step):
            temporary.mkdir()
            wait = write(temporary)
        if wait is None:
            self._complete(temporary, step, lambda: None)
        else:
            self._saving = start_beside(lambda: self._complete(temporary, step, wait), "checkpoint")
        return self.path(step)

    def finish(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one.

        Raises:
            RunFailedError: the disk is full; the half-written folder is removed, the earlier checkpoints are whole.
        """
        if (saving := self._saving) is not None:
            wait_for([saving])  # apart from `result`: interrupted here, it is still under way
            self._saving = None
            saving.result()

    @contextmanager
    def _removed_on_failure(self, temporary: Path, step: int) -> Iterator[None]:
        """Remove the folder if the block raises, and turn a full disk into a RunFailedError."""
        try:
            yield
        except BaseException as error:
            free = shutil.disk_usage(self.directory).free
            shutil.rmtree(temporary, ignore_errors=True)
            if not _is_full_disk(error, free):
                raise
            latest = self.latest()
            whole = "there is no earlier checkpoint" if latest is None else f"the one of step {latest} is whole"
            raise RunFailedError(
                f"{self.path(step)}: the disk is full: {free / 2**20:.1f} MiB were left when the checkpoint was "
                f"written; {whole}.\nFree some space, or lower trainer.max_actor_ckpt_to_keep, and start the "
                "same command again to resume."
            ) from error

    def _complete(self, temporary: Path, step: int, wait: Callable[[], None]) -> None:
        """Wait for the files, checksum them, rename the folder into place and prune."""
        with self._removed_on_failure(temporary, step):
            wait()
            self._seal(temporary, step)
        final, replaced = self.path(step), self._beside(step, "replaced")
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        fsync_dir(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.steps()[: -self.keep] if self.keep else []:
            if old == self.spared:
                continue
            trash = self._beside(old, "trash")
            self.path(old).rename(trash)
            fsync_dir(self.directory)
            shutil.rmtree(trash)

    def recover(self) -> None:
        """Clear away what a killed process left behind; call once at start-up, while holding the run's lock."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            if not (name := _LEFTOVER_NAME.fullmatch(path.name)):
                continue
            if name[2] == "replaced" and not (self.directory / name[1]).exists():
                path.rename(self.directory / name[1])
            else:
                shutil.rmtree(path)
        fsync_dir(self.directory)

    def verify(self, checkpoint: int | Path) -> Path:
        """Check every file of a checkpoint (a step of this store, or a folder) against its manifest; return the folder.

        Raises:
            UserError: a file is missing, truncated or altered; it is named, with the checkpoints to fall back to.
        """
        folder = self.path(checkpoint) if isinstance(checkpoint, int) else checkpoint
        files = self._manifest(folder)["files"]
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                raise self._broken(path, "is missing.")
            if (size := path.stat().st_size) != entry["bytes"]:
                raise self._broken(path, f"has {size} bytes instead of {entry['bytes']}.")
        digests = _digests([folder / name for name in files], durable=False)
        for name, digest in zip(files, digests):
            if digest != files[name]["sha256"]:
                raise self._broken(folder / name, "was altered after it was saved (its checksum differs).")
        return folder

    def resolve(self, resume_from_path: str | Path) -> Path:
        """Return the verified checkpoint folder that the user named: a path, or the name of a folder in this store.

        Raises:
            UserError: it is no checkpoint, or `verify` finds it broken.
        """
        return self.verify(self.named(resume_from_path))

    def named(self, resume_from_path: str | Path) -> Path:
        """Return the folder that the user named, as `resolve` does, with nothing in it read."""
        given = Path(resume_from_path).expanduser()
        for folder in (given, self.directory / given):
            if (folder / MANIFEST).is_file():
                return folder
        inside = CheckpointStore(given).steps() or CheckpointStore(given / "checkpoints").steps()
        raise UserError("trainer.resume_from_path", f"'{given}' is not a checkpoint (no {MANIFEST} in it).",
                        f"Name one checkpoint: …/global_step_{inside[-1]}." if inside else self._alternatives(None))

    def _seal(self, folder: Path, step: int) -> None:
        """Checksum and fsync all files, write the manifest last, then fsync the folders."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        assert paths, "a checkpoint writer must create at least one file"
        files = {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
                 for path, digest in zip(paths, _digests(paths, durable=True))}
        newest = max((_saved_at(self.path(other)) for other in self._folders()), default=0)
        manifest = {"step": step, "pellucid": pellucid.__version__, "saved_at": max(time.time_ns(), newest + 1),
                    "files": files}
        for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            fsync_dir(inner)
        atomic_write(folder / MANIFEST, json.dumps(manifest, indent=1))

    def _beside(self, step: int, kind: str) -> Path:
        return self.directory / f"global_step_{step}.{kind}-{os.getpid()}"

    def _folders(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = (_STEP_NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(name[1]) for name in names if name)

    def _manifest(self, folder: Path) -> dict[str, Any]:
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise self._broken(path, "is missing." if folder.is_dir() else "is no checkpoint that exists.") from error
        except ValueError as error:
            raise self._broken(path, "is not readable: truncated or altered.") from error
        if not isinstance(manifest, dict) or not {"step", "saved_at", "files"} <= manifest.keys():
            raise self._broken(path, "lacks its entries: altered.")
        return manifest

    def _broken(self, path: Path, reason: str) -> UserError:
        return UserError(str(path), reason, self._alternatives(path))

    def _alternatives(self, broken: Path | None) -> str:
        folders = map(self.path, self._folders())
        others = [folder for folder in folders if broken is None or not broken.is_relative_to(folder)]
        if not others:
            return "No other checkpoint is here: start anew with trainer.resume_mode=disable."
        return f"Resume from another one: trainer.resume_mode=resume_path trainer.resume_from_path={others[-1]}"


def _digests(paths: list[Path], *, durable: bool) -> list[str]:
    """Return the SHA-256 of each file, read in threads; `durable` also fsyncs it."""
    def digest(path: Path) -> str:
        with path.open("rb") as handle:
            if durable:
                os.fsync(handle.fileno())
            return hashlib.file_digest(handle, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(digest, paths))


def _saved_at(folder: Path) -> int:
    """Return the time of saving in ns; a folder without a readable manifest counts by its own age."""
    try:
        return int(json.loads((folder / MANIFEST).read_bytes())["saved_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.stat().st_mtime_ns


def _is_full_disk(error: BaseException, free: int) -> bool:
    """Tell a full disk from other failures; torch and safetensors report it as their own error types."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    plain = isinstance(error, Exception) and not isinstance(error, UserError)
    return plain and ("No space left on device" in str(error) or free < 2**20)
