"""Reading numbers out of model text: `1,234`, `$18.`, `-3.50`, `−7`.

The verifiers of the number tasks compare what these return, so that spelling does not decide a reward.
"""

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def numbers_in(text: str) -> list[Decimal]:
    """Return every number in `text`, in order; a minus right after a word or digit is an operator, not a sign."""
    plain = text.replace("−", "-").replace("$-", "-$")
    return [Decimal(match.replace(",", "").replace("$", "")) for match in _NUMBER.findall(plain)]


def to_number(value: object) -> Decimal | None:
    """Return the last number in `value` (a number or text), or None when it holds none."""
    found = numbers_in(str(value))
    return found[-1] if found else None
