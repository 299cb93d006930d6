"""Launch scripts of verl, read without running them: the words of a shell script become keys and values.

`migrate.py` hands in a script or one command. Variables, defaults, arrays, arithmetic and simple tests are followed;
what only the shell could know (an environment variable, a command's output) stays in the value as a placeholder.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

_ENDS = " \t\n;&|()<>"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"(\d+|&)?(<<-?(?!<)|<<<|>>|>&|<&|>\||<|>)[ \t]*")
_CONTINUATION = re.compile(r"\\[ \t]*\n")
_PARAMETER = re.compile(r"\$\{([A-Za-z_]\w*|[@*#\d])(\[[^\]]*\])?(:?[-=+?])?")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|[@*#?\d])")
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_KEYWORDS = {"if", "then", "elif", "else", "fi", "do", "done", "{", "}", "!", "time"}
_PROGRAM = re.compile(r"(verl|recipe)\.[\w.]*(main|train)\w*|[\w./-]*main_\w+\.py")
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.@/-]*=|~\w")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_TESTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne}
_SIZES = {"-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge, "-le": operator.le}


@dataclass
class Call:
    """One call of a Python program."""

    program: str
    """Its module, or its file."""
    words: list[str]
    """What follows it: overrides, and options that begin with two dashes."""

    def option(self, name: str) -> str:
        """Return the value of `--name=value` or `--name value`, empty where it is not given."""
        for word, following in zip(self.words, [*self.words[1:], ""]):
            if word.partition("=")[0] == name:
                return word.partition("=")[2] or following
        return ""

    @property
    def overrides(self) -> list[str]:
        """The words that set or remove a key."""
        return [word for word in self.words if _OVERRIDE.match(word)]


@dataclass
class Script:
    """A shell script while it is read."""

    text: str
    variables: dict[str, list[str]] = field(default_factory=dict)
    placeholders: dict[str, str] = field(default_factory=dict)
    """Word that stands in values for what is not known → how it is shown."""
    guesses: dict[str, str] = field(default_factory=dict)
    """What is not known but decides which lines run → the value that it is read as."""
    position: int = 0
    branches: list[tuple[bool, bool]] = field(default_factory=list)
    """For each open `if` or `case`: whether a branch was taken, and whether the present one runs."""
    groups: list[bool] = field(default_factory=list)
    """For each open `{`, whether `&&` or `||` skips it."""
    subjects: list[str] = field(default_factory=list)
    status: bool = True
    """Whether the last command succeeds; of all but tests it is assumed."""
    blocked: bool = False
    """Whether `&&` or `||` skips the present command."""

    def calls(self) -> list[Call]:
        """Return the calls of Python programs, also those within a quoted command (`bash -c '…'`)."""
        calls: list[Call] = []
        for words in self._commands():
            if program := next((word for word in words if _PROGRAM.fullmatch(word)), None):
                calls.append(Call(program, words[words.index(program) + 1 :]))
            elif calls and re.match(r"\+{0,2}\w+(\.\w+)+=", words[0]):
                calls[-1].words += words  # a comment or a blank line ended the command too early
            for word in words:
                if re.search(r"-m\s+verl\.", word):
                    calls += Script(word, self.variables, self.placeholders, self.guesses).calls()
        return calls

    def _commands(self) -> Iterator[list[str]]:
        """Yield the words of each command that runs; assignments are made on the way."""
        words: list[str] = []
        here_document = ""
        while self.position < len(self.text):
            char = self.text[self.position]
            if self._skips_blank():
                continue
            if redirection := _REDIRECTION.match(self.text, self.position):
                self.position = redirection.end()
                target = self._word()
                here_document = target[0] if redirection[2] in ("<<", "<<-") and target else here_document
            elif char in _ENDS:
                if words and not self._is_skipped:
                    yield words
                    self.status = self._test(words) if words[0] in ("[", "[[") else True
                words = []
                sign = self.text[self.position : self.position + 2]
                self.blocked = {"&&": not self.status, "||": self.status}.get(sign, False)
                self.position += 2 if sign in ("&&", "||", ";;") else 1
                if char == "\n" and here_document:
                    end = re.compile(rf"^\s*{re.escape(here_document)}$", re.MULTILINE).search(self.text, self.position)
                    self.position, here_document = end.end() if end else len(self.text), ""
                if sign == ";;" and self.subjects:
                    self._choose_pattern()
            elif (assignment := _ASSIGNMENT.match(self.text, self.position)) and set(words) <= _DECLARES:
                self._assign(assignment)
            else:
                words += self._word()
                if len(words) == 1 and words[0] in _KEYWORDS:
                    self._enter(words.pop())
                elif len(words) == 3 and words[0] == "case" and words[2] == "in":
                    self.branches.append((False, False))
                    self.subjects.append(words[1])
                    self._choose_pattern()
                    words = []
        if words and not self._is_skipped:
            yield words

    def _skips_blank(self) -> bool:
        """Move beyond a blank, a line's continuation or a comment, if there is one."""
        start = self.position
        if continuation := _CONTINUATION.match(self.text, start):
            self.position = continuation.end()
        elif self.text[start] in " \t":
            self.position += 1
        elif self.text[start] == "#":
            self._skip_to("\n")
        return self.position > start

    @property
    def _is_skipped(self) -> bool:
        return self.blocked or any(self.groups) or not all(runs for _, runs in self.branches)

    def _enter(self, keyword: str) -> None:
        """Go into a branch or out of it."""
        if keyword == "{":
            self.groups.append(self.blocked)
            self.blocked = False
        elif keyword == "}" and self.groups:
            self.groups.pop()
        elif keyword == "if":
            self.branches.append((False, True))
        elif keyword in ("then", "elif", "else", "fi") and self.branches:
            taken = self.branches.pop()[0]
            if keyword == "then":
                self.branches.append((taken or self.status, not taken and self.status))
            elif keyword != "fi":
                self.branches.append((taken or keyword == "else", not taken))

    def _choose_pattern(self) -> None:
        """Read the patterns before the next branch of a `case`, and tell whether it runs; or end the `case`."""
        patterns: list[str] = []
        taken = self.branches.pop()[0]
        while self.position < len(self.text) and not self.text.startswith(")", self.position):
            if self.text[self.position] in "\n;&|(<>":
                self.position += 1
            elif not self._skips_blank():
                patterns += self._word()
            if patterns == ["esac"]:
                self.subjects.pop()
                return
        self.position += 1
        subject = self.subjects[-1]
        if not taken and patterns and (shown := self.placeholders.get(subject)) and not self._is_skipped:
            self.guesses[subject] = patterns[0]
            self.subjects[-1] = subject = patterns[0] if "argument" not in shown else subject
        runs = not taken and any(fnmatchcase(subject, pattern) for pattern in patterns)
        self.branches.append((taken or runs, runs))

    def _test(self, words: list[str]) -> bool:
        """Return the result of `[ a = b ]` and the like; what is not known is taken as not so."""
        words = [word for word in words if word not in ("[", "[[", "]", "]]")]
        for word in words:
            if word in self.placeholders:
                self.guesses[word] = "something else"
                return False
        match words:
            case [left, sign, right] if sign in _TESTS:
                return _TESTS[sign](left, right)
            case [left, sign, right] if sign in _SIZES and left.isdigit() and right.isdigit():
                return _SIZES[sign](int(left), int(right))
            case ["-n" | "-z" as sign, value]:
                return (value != "") == (sign == "-n")
        return False

    def _placeholder(self, shown: str) -> list[str]:
        known = next((word for word, other in self.placeholders.items() if other == shown), None)
        word = known or f"__shell{len(self.placeholders)}__"
        self.placeholders[word] = shown
        return [word]

    def _skip_to(self, end: str) -> str:
        """Move to the next `end`, and return what is before it."""
        start, found = self.position, self.text.find(end, self.position)
        self.position = found if found >= 0 else len(self.text)
        return self.text[start : self.position]

    def _assign(self, match: re.Match[str]) -> None:
        """Read the value of `NAME=value`, `NAME=(a b)` and either with `+=`."""
        self.position = match.end()
        if self.text.startswith("(", self.position):
            values, self.position = [], self.position + 1
            while self.position < len(self.text) and self.text[self.position] != ")":
                if self.text[self.position] in "\n;&|(<>":
                    self.position += 1
                elif not self._skips_blank():
                    values += self._word()
            self.position += 1
        else:
            values = [" ".join(self._word())]
        if not self._is_skipped:
            old = self.variables.get(match[1], []) if match[2] else []
            self.variables[match[1]] = ["".join(old + values)] if len(old) == len(values) == 1 else old + values

    def _word(self) -> list[str]:
        """Read one word; without quotes an expansion may give several words, or none."""
        return self._read(_ENDS, splits=True)

    def _read(self, ends: str, quoted: bool = False, splits: bool = False) -> list[str]:
        """Read up to one of `ends`, within double quotes or not."""
        parts, holds_quotes = [""], False
        while self.position < len(self.text) and (char := self.text[self.position]) not in ends:
            if char == "\\":
                if continuation := _CONTINUATION.match(self.text, self.position):
                    self.position = continuation.end()
                    continue
                following = self.text[self.position + 1 : self.position + 2]
                parts[-1] += following if not quoted or following in '$`"\\' else f"\\{following}"
                self.position += 2
            elif char == "'" and not quoted:
                self.position, holds_quotes = self.position + 1, True
                parts[-1] += self._skip_to("'")
                self.position += 1
            elif char == '"':
                self.position, holds_quotes = self.position + 1, True
                inner = self._read('"', quoted=True)
                self.position += 1
                parts[-1] += "".join(inner[:1])
                parts += inner[1:]
            elif char in "$`":
                inner = self._expansion()
                inner = " ".join(inner).split() if splits else inner
                parts[-1] += "".join(inner[:1])
                parts += inner[1:]
            else:
                parts[-1] += char
                self.position += 1
        return parts if holds_quotes or quoted or parts != [""] else []

    def _expansion(self) -> list[str]:
        """Read what begins with `$` or a backquote, and return what it stands for."""
        start = self.position
        if self.text[start] == "`" or self.text.startswith("$(", start):
            return self._substitution()
        if match := _PARAMETER.match(self.text, start):
            if match[3] or self.text.startswith("}", match.end()):
                self.position = match.end()
                default = self._read("}")
                self.position += 1
                return self._parameter(match[1], match[2] or "", (match[3] or "")[-1:], default)
        elif match := _VARIABLE.match(self.text, start):
            self.position = match.end()
            return self._parameter(match[1], "", "", [])
        if self.text.startswith("${", start):  # cuts or replaces a part
            shown = f"<{self._skip_to('}')[2:]}>"
            self.position += 1
            return self._placeholder(shown)
        self.position += 1
        return ["$"]

    def _parameter(self, name: str, index: str, default_sign: str, default: list[str]) -> list[str]:
        values = [] if name in ("@", "*") else self.variables.get(name)
        if default_sign == "+":
            return default if values else []
        if default_sign in ("-", "=") and (not values or values == [""]):
            return default
        if values is None:
            return self._placeholder(f"${{oc.env:{name}}}" if name.isidentifier() else f"<argument {name}>")
        if index in ("[@]", "[*]") or name in ("@", "*"):
            return values
        number = int(index[1:-1]) if index[1:-1].isdigit() else 0
        return [self._guessed(value) for value in values[number : number + 1]]

    def _guessed(self, value: str) -> str:
        guess = self.guesses.get(value, value)
        return value if " " in guess else guess

    def _substitution(self) -> list[str]:
        """Read `$((sum))`, `$(command)` or the latter in backquotes; only `pwd` and `basename` are known commands."""
        if self.text[self.position] == "`":
            self.position += 1
            body = self._skip_to("`")
        else:
            start, depth = self.position + 2, 1
            self.position = start
            while depth and self.position < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[self.position], 0)
                self.position += 1
            self.position -= 1
            body = self.text[start : self.position]
        self.position += 1
        if body.startswith("(") and body.endswith(")"):
            value = self._sum(body[1:-1])
            return [str(value)] if value is not None else self._placeholder(f"<{_plain(body[1:-1])}>")
        match Script(body, self.variables, self.placeholders)._word_list():
            case ["pwd"]:
                return self._placeholder("${oc.env:PWD}")
            case ["basename", path]:
                return [PurePosixPath(path).name]
        return self._placeholder(f"<{_plain(body)}>")

    def _word_list(self) -> list[str]:
        return next(self._commands(), [])

    def _sum(self, body: str) -> int | None:
        """Return the value of an arithmetic expression; None where it is not known."""
        text = "".join(Script(body, self.variables, self.placeholders)._read(""))
        text = re.sub(r"[A-Za-z_]\w*", lambda name: (self.variables.get(name[0]) or ["?"])[0], text)
        try:
            return _evaluated(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_evaluated(left), _evaluated(right))
    raise ValueError(node)


def _plain(text: str) -> str:
    """Return text on one line that OmegaConf takes for no link."""
    return " ".join(text.split()).replace("${", "$").replace("}", "")
