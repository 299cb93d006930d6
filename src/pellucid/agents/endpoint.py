"""Any program as an agent: it is started once a trajectory, asks the policy over OpenAI's API, and is recorded.

    program ─► openai_server (a thread of its own) ─► Recorder, in the trajectory's event loop ─► Llm ─► engine

A request says all of its chat again. What of it was recorded goes on as the tokens that it was, and the rest is
rendered after them; a chat of another past is another sequence of the same trajectory.
"""

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from pellucid.agents.chat import FIELD, Chat, Message
from pellucid.agents.llm import Llm, TrajectoryEndError
from pellucid.agents.openai_server import Ask, OpenAIServer, Reply, RequestError, Said, plain_messages
from pellucid.agents.tools import ToolCall
from pellucid.config.schema.agent import AgentConfig
from pellucid.console import notice
from pellucid.errors import UserError
from pellucid.types import FinishReason, Outcome, Prompt

GRACE_S = 10.0
"""How long a program may go on, to say its reward, after it has met a limit of turns or tokens."""
TAIL_BYTES = 1 << 16
"""How much of its output is looked at, from the end."""


@dataclass(slots=True, eq=False)
class _Sequence:
    llm: Llm
    tools: list[dict[str, Any]]
    said: Said = ""
    """What was said so far, the policy's last turn included."""
    ends: list[int] = field(default_factory=list)
    """How much of it was said at the end of each turn."""
    is_open: bool = True
    """Whether a request may go on with it: none is under way, and none was given up."""


class Recorder:
    """The chats of one trajectory."""

    def __init__(self, llm: Llm, chat: Chat, max_turns: int, longest: int) -> None:
        self.over = asyncio.Event()
        """Set when a limit is reached, or the engine has failed."""
        self.limit: FinishReason | None = None
        self._llm, self._chat, self._max_turns, self._longest = llm, chat, max_turns, longest
        self._sequences: list[_Sequence] = []
        self._under_way: set[asyncio.Task[Any]] = set()
        self._num_calls = 0

    async def answer(self, ask: Ask) -> Reply:
        """Return the policy's turn.

        Raises:
            RequestError: the chat template does not take the request, or a limit is reached.
        """
        task = asyncio.current_task()
        assert task is not None
        if self.over.is_set():
            raise RequestError("the trajectory has ended", "trajectory_ended", 410)
        self._under_way.add(task)
        try:
            return await self._answer(ask)
        except TrajectoryEndError as end:
            self.limit = end.reason
            raise RequestError(f"the trajectory has reached its limit: {end.reason}", end.reason) from end
        except UserError as error:
            raise RequestError(str(error)) from error
        finally:
            self._under_way.discard(task)
            if self.limit is not None or self._llm.engine_error is not None:
                self.over.set()

    async def _answer(self, ask: Ask) -> Reply:
        chat, prompt = self._chat.with_tools(ask.tools), self._llm.sample.prompt
        calls_tools = bool(ask.tools) and ask.may_call
        if calls_tools and chat.parse_calls is None:
            raise RequestError("the model's chat template does not show how it writes calls of tools")
        if sum(len(one.ends) + (not one.is_open) for one in self._sequences) >= self._max_turns:
            raise TrajectoryEndError("max_turns")
        self._tell(ask.ignored)
        sequence, given = self._place(ask, chat, prompt)
        sequence.is_open = False
        answer = await sequence.llm.complete(given, stop=ask.stop, max_tokens=ask.max_tokens)
        sequence.is_open = True
        turn = sequence.llm.turns[-1]
        tokens = sequence.llm.tokens(len(sequence.llm.turns))
        drawn = tokens[turn.start - turn.end :]
        reply: Message | str = answer.text
        if isinstance(ask.said, str):
            sequence.said = ask.said + chat.decode(drawn)
        else:
            content, calls = answer.text, list[ToolCall]()
            if calls_tools and chat.parse_calls is not None:
                content, calls = chat.parse_calls(chat.decode(drawn, special=True), self._num_calls)
            if any(call.error for call in calls):  # there is no form for these: the program reads what was written
                content, calls = answer.text, []
            self._num_calls += len(calls)
            reply = chat.assistant(content, calls)
            sequence.said = [*ask.said, *plain_messages([reply])]
        sequence.ends.append(len(sequence.said))
        return Reply(reply, answer.finish_reason, len(tokens) - len(drawn), len(drawn))

    def _tell(self, ignored: dict[str, Any]) -> None:
        """Say once what a program sets that changes nothing, unless it is as the run has it."""
        params = self._llm.params
        drawn = {"temperature": params.temperature if params.do_sample else 0, "top_p": params.top_p}
        drawn |= {"top_k": params.top_k, "presence_penalty": 0, "frequency_penalty": 0}
        for name, value in ignored.items():
            if name not in drawn or drawn[name] != value:
                said = f"{FIELD}.command: the program sets {name} to {value!r:.60}, which changes nothing: "
                why = "rollout.temperature and the keys beside it say how tokens are drawn."
                notice(said + why, about=f"{FIELD}.command {name}")

    def _place(self, ask: Ask, chat: Chat, prompt: Prompt) -> tuple[_Sequence, Sequence[int]]:
        """Return the sequence that a request belongs to, and the tokens between its last turn and the next one.

        Of the turns up to which the request repeats what was said it goes on from the last. Where something else has
        come after that turn the sequence is a new one, which begins with the tokens up to there.
        """
        found = [
            (end, one.is_open and number == len(one.ends), number, one)
            for one in self._sequences
            if one.tools == ask.tools
            for number, end in enumerate(one.ends, 1)
            if ask.said[:end] == one.said[:end] and _is_added(ask.said[end:])
        ]
        begin: Sequence[int] = ()
        if found:
            end, goes_on, number, one = max(found, key=lambda each: each[:2])
            tokens, added, last = one.llm.tokens(number), ask.said[end:], one.said[end - 1]
            with suppress(UserError):  # the template would write the past anew, and so it does below
                if isinstance(added, str) or isinstance(last, str):
                    given = chat.encode(str(added))
                else:
                    given = chat.added(last, added, tokens[-1])
                if goes_on:
                    return one, given
                begin = [*tokens, *given]
        if not begin:
            first = prompt.text if isinstance(ask.said, str) else prompt.messages and plain_messages(prompt.messages)
            if ask.said == first and not ask.tools:
                begin = prompt.token_ids
            else:
                begin = chat.encode(ask.said) if isinstance(ask.said, str) else chat.start(ask.said)
        self._sequences.append(_Sequence(self._llm.fork(begin, self._longest), ask.tools))
        return self._sequences[-1], ()

    async def close(self) -> None:
        """Refuse further requests, and give up those under way."""
        self.over.set()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)


def _is_added(said: Said) -> bool:
    """Tell whether something can be said after a turn: it holds no other turn."""
    return isinstance(said, str) or all(message["role"] != "assistant" for message in said)


class Endpoint:
    """The agent `endpoint`: runs its program for each trajectory, and the server that these ask.

    Args:
        section: `rollout.agent`.
        chat: renders what is said.
        longest: tokens that a sequence may have, those that it begins with included.
        logs: folder of what programs write to their standard error.

    Raises:
        UserError: there is no such program, or the server's packages are not installed.
    """

    def __init__(self, section: AgentConfig, chat: Chat, longest: int, logs: Path) -> None:
        name = f"{FIELD}.command"
        if section.command is None:
            raise UserError(name, "is not set, and the agent is a program.", "Set it, e.g. to 'python my_agent.py'.")
        try:
            self._command = shlex.split(section.command)
        except ValueError as error:
            raise UserError(name, f"cannot be taken apart ({error}).", "Quote it as in a shell.") from error
        # `python` is the one that runs the trainer, with its packages, also where its environment is not activated.
        self._path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        if not self._command or shutil.which(self._command[0], path=self._path) is None:
            raise UserError(name, f"'{section.command}' names no program that can be run.")
        self._section, self._chat, self._longest, self._logs = section, chat, longest, logs
        self._server = OpenAIServer()
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, prompt: Prompt, llm: Llm, tools: Any) -> Outcome:
        """Run the program."""
        loop, section = asyncio.get_running_loop(), self._section
        async with self._places.setdefault(loop, asyncio.Semaphore(section.max_programs)):
            recorder = Recorder(llm, self._chat, section.max_turns, self._longest)
            key = self._server.admit((recorder.answer, loop))
            try:
                async with asyncio.timeout(section.timeout_s):
                    return await self._run(prompt, llm, recorder, key)
            except TimeoutError as error:
                raise TrajectoryEndError("timeout", f"the agent took longer than {section.timeout_s} s") from error
            finally:
                self._server.dismiss(key)
                await recorder.close()

    async def _run(self, prompt: Prompt, llm: Llm, recorder: Recorder, key: str) -> Outcome:
        environment = {
            "PATH": self._path,
            "OPENAI_BASE_URL": self._server.url,
            "OPENAI_API_KEY": key,
            # openai-agents would send each chat to OpenAI, with this key, and wait for its answer at the end.
            "OPENAI_AGENTS_DISABLE_TRACING": os.environ.get("OPENAI_AGENTS_DISABLE_TRACING", "1"),
            **dict.fromkeys(
                ("NO_PROXY", "no_proxy"), f"{os.environ.get('no_proxy', os.environ.get('NO_PROXY', ''))},127.0.0.1"
            ),
            "PELLUCID_PROMPT": json.dumps(prompt.messages, default=str),
            "PELLUCID_ANSWER": json.dumps(prompt.answer, default=str),
            "PELLUCID_EXTRA": json.dumps(prompt.extra, default=str),
            "PELLUCID_UID": prompt.uid,
            "PELLUCID_SAMPLE": str(llm.sample.sample),
        }
        name = "_".join(map(str, [*llm.sample.stream, prompt.uid, llm.sample.sample]))
        log = self._logs / (re.sub(r"[^\w.-]+", "_", name) + ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w+b") as errors, tempfile.TemporaryFile() as output:
            status = await self._status(recorder, os.environ | environment, output, errors)
            said, complaint = _tail(output), _tail(errors)
        if not complaint:
            log.unlink()
        if recorder.limit is not None:
            llm.last.reason = recorder.limit
        elif status:
            ended = f"ended with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
            why = f"{complaint[-1]} (more in {log})" if complaint else "it wrote nothing to its standard error"
            raise TrajectoryEndError("agent_failed", f"the agent's program {ended}: {why}")
        elif not any(one.turns for one in llm.sequences) and llm.engine_error is None:
            raise TrajectoryEndError("agent_failed", "the agent's program has not asked the policy for anything")
        return _outcome(said)

    async def _status(
        self, recorder: Recorder, environment: dict[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> int:
        """Run the program to its end, and end what it leaves behind; return its exit status."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        ended, over = asyncio.ensure_future(process.wait()), asyncio.ensure_future(recorder.over.wait())
        try:
            await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
            if recorder.limit is not None:
                await asyncio.wait({ended}, timeout=GRACE_S)
        finally:
            over.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = await ended
        return status

    def close(self) -> None:
        """End the server."""
        self._server.close()


def _tail(file: IO[bytes]) -> list[str]:
    """Return the last lines of a file that are not empty."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _outcome(lines: list[str]) -> Outcome:
    """Return what a program says of its trajectory: the last line of its output that is a JSON object.

    Raises:
        TrajectoryEndError: its values are not what they should be.
    """
    said: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError, RecursionError):
            said = value if isinstance(value := json.loads(line), dict) else said
    rewards, columns, text = said.get("reward"), said.get("columns") or {}, said.get("text")
    try:
        if rewards is not None:
            named = rewards if isinstance(rewards, dict) else {"agent": rewards}
            rewards = {name: float(value) for name, value in named.items()}
        is_right = all(map(math.isfinite, (rewards or {}).values()))
    except (TypeError, ValueError, OverflowError):
        is_right = False
    if not is_right or not isinstance(columns, dict) or not isinstance(text, str | None):
        wanted = '{"reward": {"name": number}, "columns": {…}, "text": "…"}, each of which may be left out'
        raise TrajectoryEndError("agent_failed", f"the agent's program said {json.dumps(said)}, and not {wanted}")
    return Outcome(rewards, columns, text=text)
