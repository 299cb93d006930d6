"""The shuffling loader: deals prompts out in batches and can be stopped and resumed at the exact position.

The order within an epoch follows from (seed, epoch) alone; a checkpoint keeps the small dictionary of `state_dict`.
"""

import hashlib
import random
from typing import Any

from pellucid.errors import UserError
from pellucid.types import Prompt


class PromptLoader:
    """An endless sequence of batches over a fixed set of prompts.

    Each epoch deals every prompt at most once; the last `len(prompts) % batch_size` of an epoch's order are left out.

    Args:
        prompts: the data set.
        batch_size: prompts a batch.
        shuffle: a new order each epoch; False keeps the order of `prompts`.
        seed: of the orders.

    Raises:
        UserError: fewer prompts than one batch needs.
    """

    def __init__(self, prompts: list[Prompt], batch_size: int, shuffle: bool, seed: int) -> None:
        if len(prompts) < batch_size:
            reason = f"a batch of {batch_size} prompts cannot be filled from {len(prompts)} prompts."
            remedy = f"Set it to {len(prompts)} or less, or bring more data."
            raise UserError("data.train_batch_size", reason, remedy)
        self._prompts, self._batch_size, self._shuffle, self._seed = prompts, batch_size, shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order()
        self._fingerprint = _fingerprint(prompts)
        self._by_uid = {prompt.uid: prompt for prompt in prompts}

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next batch comes from."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one epoch."""
        return len(self._prompts) // self._batch_size

    def prompt(self, uid: str) -> Prompt:
        """Return the prompt of that name."""
        return self._by_uid[uid]

    def next_batch(self) -> list[Prompt]:
        """Return the next `batch_size` prompts; after an epoch's last whole batch the next epoch begins."""
        batch = [self._prompts[index] for index in self._order[self._position : self._position + self._batch_size]]
        self._position += self._batch_size
        self._roll_over()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; the batch size may differ.

        Raises:
            UserError: the state belongs to another data set, or to another order of it.
        """
        now, then = len(self._prompts), state["num_prompts"]
        if then != now or state["fingerprint"] != self._fingerprint:
            same_number = f"{now} prompts then and now, but their content or order differs"
            changed = f"{then} prompts then, {now} now" if then != now else same_number
            reason = f"the checkpoint's position is in another data set ({changed})."
            remedy = "Resume with the data, tokenizer and length filter that the run began with, or start a new run."
            raise UserError("data.train_files", reason, remedy)
        for key, value in (("shuffle", self._shuffle), ("seed", self._seed)):
            if state[key] != value:
                reason = f"is {value}, but the checkpoint's position is in an order made with {state[key]}."
                raise UserError(f"data.{key}", reason, f"Resume with data.{key}={state[key]}, or start a new run.")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()
        self._roll_over()

    def _roll_over(self) -> None:
        if self._position + self._batch_size > len(self._prompts):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(repr((prompt.uid, prompt.token_ids, prompt.answer)).encode())
    return digest.hexdigest()
