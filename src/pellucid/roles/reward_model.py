"""The reward model: a frozen network that gives each whole response one score.

Rollouts come from the controller; the score is the scalar head's value at the last token of prompt and response.
"""

from transformers import PreTrainedTokenizerBase

from pellucid.errors import UserError
from pellucid.roles.role import Role
from pellucid.training.common.heads import ValueHead
from pellucid.training.common.packing import TokenSequence
from pellucid.training.protocol import Progress, TrainingEngine
from pellucid.types import Rollout


class RewardModel(Role):
    """Scores responses with a model that was trained to judge them.

    Args:
        engine: holds the model, whose output head is [1, H].
        tokenizer: the reward model's own, where its vocabulary differs from the policy's: responses are then read as
            text through its chat template, or plain where it has none. None takes the sampled ids as they are.
        max_tokens: the engine's budget of one micro-batch, or None.
        max_positions: the longest text that the model reads, in tokens, or None.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_tokens: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__(engine)
        self._tokenizer = tokenizer
        self._max_tokens, self._max_positions = max_tokens, max_positions

    def score(self, rollouts: list[Rollout], on_done: Progress | None = None) -> list[float]:
        """Return one score a rollout, in order.

        Raises:
            UserError: a text is longer in the reward model's tokens than the model or its budget allows.
        """
        texts = [self._token_ids(rollout) for rollout in rollouts]
        self._check_length(max(map(len, texts), default=0))
        # One made-up response token a sequence: the state that would predict it is that of the last real token.
        sequences = [TokenSequence(ids, [0], row) for row, ids in enumerate(texts)]
        return self.engine.forward(sequences, ValueHead(), on_done=on_done).values[:, 0].tolist()

    def _token_ids(self, rollout: Rollout) -> list[int]:
        prompt, tokenizer = rollout.prompt, self._tokenizer
        if tokenizer is None:
            return [*prompt.token_ids, *rollout.token_ids]
        if tokenizer.chat_template is None:
            return tokenizer(prompt.text + rollout.text).input_ids  # pyright: ignore[reportReturnType]
        assert prompt.messages is not None, "data.return_raw_chat keeps the messages"
        chat = [*prompt.messages, {"role": "assistant", "content": rollout.text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids  # pyright: ignore

    def _check_length(self, longest: int) -> None:
        """Check what the data section bounds in the policy's tokens only."""
        if self._max_positions is not None and longest > self._max_positions:
            raise UserError(
                "reward_model.model.path",
                f"a text has {longest} tokens, more than the {self._max_positions} that the reward model reads "
                "(max_position_embeddings).",
                "Use a reward model for longer texts, or lower data.max_prompt_length or data.max_response_length.",
            )
        if self._max_tokens is not None and longest > self._max_tokens:
            reason = (
                f"a text has {longest} tokens in the reward model's own vocabulary, over the budget of "
                f"{self._max_tokens}."
            )
            raise UserError("reward_model.forward_max_token_len_per_gpu", reason, f"Set it to at least {longest}.")
