"""The reward model: a frozen network that gives each whole response one score.

Rollouts come from the controller; the score is the scalar head's value at the last token of prompt and response.
"""

from transformers import PreTrainedTokenizerBase

from pellucid.training.common.heads import ValueHead
from pellucid.training.common.packing import TokenSequence
from pellucid.training.protocol import Progress, TrainingEngine
from pellucid.types import Rollout


class RewardModel:
    """Scores responses with a model that was trained to judge them.

    Args:
        engine: holds the model, whose output head is [1, H].
        tokenizer: the reward model's own, where its vocabulary differs from the policy's: responses are then read as text
            through its chat template (through plain concatenation where it has none). None takes the sampled ids as they are.
    """

    def __init__(self, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.engine, self._tokenizer = engine, tokenizer

    def score(self, rollouts: list[Rollout], on_done: Progress | None = None) -> list[float]:
        """Return one score a rollout, in order."""
        # One made-up response token a sequence: the state that would predict it is that of the last real token.
        sequences = [TokenSequence(self._token_ids(rollout), [0], row) for row, rollout in enumerate(rollouts)]
        values = self.engine.forward(sequences, ValueHead(), on_done=on_done).values
        assert values is not None
        return values[:, 0].tolist()

    def _token_ids(self, rollout: Rollout) -> list[int]:
        prompt, tokenizer = rollout.prompt, self._tokenizer
        if tokenizer is None:
            return prompt.token_ids + rollout.token_ids
        if tokenizer.chat_template is None:
            return tokenizer(prompt.text + rollout.text).input_ids  # pyright: ignore[reportReturnType]
        assert prompt.messages is not None, "data.return_raw_chat keeps the messages"
        chat = [*prompt.messages, {"role": "assistant", "content": rollout.text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids  # pyright: ignore
