"""Beam search: the likeliest of several texts that are continued side by side, as transformers finds it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass
class _Prompt:
    """What follows one prompt. Texts have a score each: of those that go on, the logarithm of their probability; of
    those that have ended, the same divided by a power of their length."""

    running: list[tuple[float, list[int]]]
    ended: list[tuple[float, list[int]]] = field(default_factory=list)
    # Whether a text that goes on can still become one of the best.
    open: bool = True


class Beams:
    """The texts of all prompts. Each prompt has as many rows of logits as beams.

    Args:
        prompts: How many prompts there are.
        width: How many beams each of them has.
        length_penalty: The power of the length. Above 0, longer texts are preferred.
        ends: The tokens that end a text.
        limit: The most tokens of a text.
    """

    def __init__(self, prompts: int, width: int, length_penalty: float, ends: list[int], limit: int) -> None:
        self.width, self.length_penalty, self.ends, self.limit = width, length_penalty, set(ends), limit
        # At first all beams are the same: only one of them counts.
        first: list[tuple[float, list[int]]] = [(0.0, []), *[(-math.inf, []) for _ in range(width - 1)]]
        self.prompts = [_Prompt(list(first)) for _ in range(prompts)]
        self.length = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to find."""
        return self.length == self.limit or not any(prompt.open for prompt in self.prompts)

    def step(self, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """The next token of each row, and the row whose text it continues."""
        vocabulary = logits.shape[-1]
        scores = torch.tensor([score for prompt in self.prompts for score, _ in prompt.running], device=logits.device)
        joint = (logits.float().log_softmax(-1) + scores[:, None]).view(len(self.prompts), -1)
        # So many that enough are left of which none ends.
        best = joint.topk(min(self.width * max(2, 1 + len(self.ends)), joint.shape[1]))
        self.length += 1
        tokens, sources = [], []
        for number, (prompt, values, places) in enumerate(
            zip(self.prompts, best.values.tolist(), best.indices.tolist(), strict=True)
        ):
            following = [(value, *divmod(place, vocabulary)) for value, place in zip(values, places, strict=True)]
            for beam, token in self._advance(prompt, following):
                tokens.append(token)
                sources.append(number * self.width + beam)
        return tokens, sources

    def _advance(self, prompt: _Prompt, following: list[tuple[float, int, int]]) -> list[tuple[int, int]]:
        """Sort the best continuations into those that have ended and those that go on."""
        last = self.length == self.limit
        texts = [(score, [*prompt.running[beam][1], token]) for score, beam, token in following]
        if prompt.open:
            ended = [
                (score / self.length**self.length_penalty, text)
                for score, text in texts[: self.width]
                if last or text[-1] in self.ends
            ]
            prompt.ended = sorted(prompt.ended + ended, key=lambda one: -one[0])[: self.width]
        going_on = [place for place, (_, text) in enumerate(texts) if text[-1] not in self.ends][: self.width]
        prompt.running = [texts[place] for place in going_on]
        if len(prompt.ended) == self.width:
            hope = prompt.running[0][0] / self.length**self.length_penalty
            prompt.open = prompt.open and hope > prompt.ended[-1][0]
        return [following[place][1:] for place in going_on]

    def texts(self) -> list[list[int]]:
        """The best text of each prompt."""
        return [prompt.ended[0][1] for prompt in self.prompts]
