"""Text from a decoder that is spread over tensor- and pipeline-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.engines.megatron.beams import Beams
from accelerate.engines.megatron.layers import has_transformer_engine
from accelerate.errors import NotYetSupported

# What modules of megatron-core call it that each rank has other tokens of a sequence.
_SEQUENCE_PARALLEL = ("sequence_parallel", "reduce_scatter_embeddings", "scatter_to_sequence_parallel")


@torch.no_grad()
def megatron_generate(
    engine: Any,
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    num_beams: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    length_penalty: float | None = None,
    *,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Continue prompts. All ranks of a copy of the model call it with the same arguments.

    Without `temperature`, `top_k` and `top_p` the most likely token is taken each time, else one is drawn.

    Args:
        engine: The engine that `prepare` has returned.
        inputs: The tokens of the prompts, padded on the left.
        attention_mask: 0 where there is padding.
        max_length: The most tokens with the prompt.
        max_new_tokens: The most tokens after the prompt.
        num_beams: How many texts are continued side by side for the likeliest of them. Draws are not mixed with it.
        temperature: What logits are divided by.
        top_k: How many of the most likely tokens are drawn from.
        top_p: Draw from the most likely tokens that have this probability together.
        length_penalty: With beams: above 0, longer texts are preferred. 1.0 unless given.
        eos_token_id: Where a text ends; that of the model's config if left out.
        pad_token_id: What follows the end of a text while others go on; the end itself if left out.
        seed: Of the draws; if left out, they come from torch's global generator.

    Returns:
        Prompts and what follows them, on every rank.
    """
    if (max_length is None) == (max_new_tokens is None):
        raise ValueError("Give either `max_length` or `max_new_tokens`.")
    left = max_new_tokens if max_new_tokens is not None else (max_length or 0) - inputs.shape[1]
    config = engine.model_config
    ends = _ends(eos_token_id if eos_token_id is not None else getattr(config, "eos_token_id", None))
    padding = pad_token_id if pad_token_id is not None else getattr(config, "pad_token_id", None)
    if padding is None:
        padding = ends[0] if ends else 0
    choose = _Choice(temperature, top_k, top_p)
    width = num_beams or 1
    if width > 1 and not choose.greedy:
        raise ValueError(
            "Beam search does not sample: leave out either `num_beams` or `temperature`, `top_k` and `top_p`."
        )
    with _evaluating(engine.chunks):
        pipeline = _Pipeline(engine.chunks, inputs, attention_mask, width)
        pipeline.reserve(left)
        if width > 1 and left > 0:
            beams = Beams(len(inputs), width, 1.0 if length_penalty is None else length_penalty, ends, left)
            return _search(pipeline, beams, padding)
        return _follow(pipeline, choose.seeded(seed, pipeline.device), left, ends, padding)


def _follow(pipeline: _Pipeline, choose: _Choice, left: int, ends: list[int], padding: int) -> torch.Tensor:
    """One token after the other."""
    last = torch.tensor(ends, dtype=torch.long, device=pipeline.device)
    done = torch.zeros(len(pipeline.tokens), dtype=torch.bool, device=pipeline.device)
    for _ in range(left):
        logits = pipeline.logits()
        tokens = torch.empty(len(pipeline.tokens), dtype=torch.long, device=pipeline.device)
        if logits is not None:
            tokens = choose(logits)
        pipeline.agree(tokens)
        tokens = torch.where(done, padding, tokens)
        done |= torch.isin(tokens, last)
        pipeline.append(tokens)
        if ends and bool(done.all()):
            break
    return pipeline.tokens


def _search(pipeline: _Pipeline, beams: Beams, padding: int) -> torch.Tensor:
    """Several texts side by side: one rank keeps the score, all others follow."""
    prompts, rows = pipeline.tokens[:: beams.width], len(pipeline.tokens)
    over = False
    while not over:
        logits = pipeline.logits()
        # Tokens, the rows that they follow, and whether the search is over.
        chosen = torch.empty(3, rows, dtype=torch.long, device=pipeline.device)
        if logits is not None:
            tokens, sources = beams.step(logits)
            chosen = torch.tensor([tokens, sources, [beams.done] * rows], device=pipeline.device)
        pipeline.agree(chosen)
        pipeline.continue_rows(chosen[1])
        pipeline.append(chosen[0])
        over = bool(chosen[2, 0])
    longest = pipeline.tokens.shape[1] - prompts.shape[1]
    # The best texts, each after its length.
    found = torch.full((len(prompts), 1 + longest), padding, device=pipeline.device)
    if pipeline.chooses:
        for row, text in zip(found, beams.texts(), strict=True):
            row[: len(text) + 1] = torch.tensor([len(text), *text], device=pipeline.device)
    pipeline.agree(found)
    return torch.cat([prompts, found[:, 1 : int(found[:, 0].max()) + 1]], 1)


class _Choice:
    """How the next token follows from logits."""

    def __init__(self, temperature: float | None, top_k: int | None, top_p: float | None) -> None:
        if temperature is not None and temperature <= 0:
            raise ValueError(f"`temperature` must be more than 0, not {temperature}: leave it out to decode greedily.")
        if top_k is not None and top_k < 0:
            raise ValueError(f"`top_k` must be 0 (all tokens) or more, not {top_k}.")
        if top_p is not None and not 0 <= top_p <= 1:
            raise ValueError(f"`top_p` must be between 0 and 1, not {top_p}.")
        self.greedy = (temperature is None and top_k is None and top_p is None) or top_k == 1
        self.temperature, self.top_k, self.top_p = temperature or 1.0, top_k or 0, top_p or 0.0
        self.generator: torch.Generator | None = None

    def seeded(self, seed: int | None, device: torch.device) -> _Choice:
        """The same with draws of its own."""
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        return self

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.greedy:
            return logits.argmax(-1)
        probabilities = self.kept(logits.float() / self.temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of those tokens that may be drawn; -inf for all others."""
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if 0 < self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            probabilities = ordered.softmax(-1)
            # A token is left out when those before it suffice.
            left_out = probabilities.cumsum(-1) - probabilities >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)
        return logits


class _Pipeline:
    """The stages of a model one after the other, with the keys and values of the tokens so far."""

    def __init__(
        self, chunks: list[Any], inputs: torch.Tensor, attention_mask: torch.Tensor | None, width: int
    ) -> None:
        from megatron.core import parallel_state

        self.chunks = chunks
        self.device: torch.device = next(chunks[0].parameters()).device
        self.tokens = inputs.to(self.device).long().repeat_interleave(width, 0)
        self.mask: torch.Tensor | None = None
        if attention_mask is not None:
            self.mask = attention_mask.to(self.device).bool().repeat_interleave(width, 0)
        if self.mask is not None and bool(self.mask.all()):
            self.mask = None
        if self.mask is not None and not bool(self.mask[:, -1].all()):
            raise ValueError("Prompts must be padded on the left: the last token of some is padding.")
        if self.mask is not None and has_transformer_engine():
            raise NotYetSupported(
                "Padding of prompts with Transformer Engine", "generate for prompts of one length at a time."
            )
        self.seen = 0
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.ranks_of_stages = dist.get_process_group_ranks(self.group)
        self.copy = parallel_state.get_model_parallel_group()
        # Of all ranks of the copy: the last stage stands last, its first tensor-parallel rank first in it.
        ranks = dist.get_process_group_ranks(self.copy)
        self.chooser = ranks[-parallel_state.get_tensor_model_parallel_world_size()]
        self.chooses = dist.get_rank() == self.chooser

    def reserve(self, new: int) -> None:
        """Make room for a number of new tokens."""
        from megatron.core.inference.contexts import StaticInferenceContext

        length = self.tokens.shape[1] + max(new, 0)
        model = self.chunks[0]
        if model.position_embedding_type == "learned_absolute" and length > model.max_sequence_length:
            raise ValueError(
                f"{length} tokens are more than the {model.max_sequence_length} positions that this model has learned."
            )
        self.cache = StaticInferenceContext(len(self.tokens), length)

    def logits(self) -> torch.Tensor | None:
        """Those of the token that comes next, on the rank that chooses it."""
        tokens = self.tokens[:, self.seen :]
        mask, positions = self._mask(), self._positions()
        output: Any = None
        for number, chunk in enumerate(self.chunks):
            if self.stage > 0 or number > 0:
                shape = (tokens.shape[1], len(tokens), chunk.config.hidden_size)
                received = torch.empty(shape, dtype=chunk.config.params_dtype, device=self.device)
                dist.recv(received, self.ranks_of_stages[self.stage - 1], group=self.group)
                chunk.set_input_tensor(received)
            output = chunk(tokens, positions, mask, inference_context=self.cache, runtime_gather_output=True)
            if self.stage < self.stages - 1 or number < len(self.chunks) - 1:
                following = self.ranks_of_stages[(self.stage + 1) % self.stages]
                dist.send(output.contiguous(), following, group=self.group)
        self.seen = self.cache.sequence_len_offset = self.tokens.shape[1]
        return output[:, -1] if self.chooses else None

    def _mask(self) -> torch.Tensor | None:
        """From the new tokens to all, True where it may not be looked; None is causal."""
        if self.mask is None:
            return None
        length = self.tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=self.device).triu(1)
        return later[None, None, self.seen :] | ~self.mask[:, None, None]

    def _positions(self) -> torch.Tensor:
        if self.mask is None:
            positions = torch.arange(self.tokens.shape[1], device=self.device).expand_as(self.tokens)
        else:
            positions = (self.mask.long().cumsum(1) - 1).clamp_min(0)
        return positions[:, self.seen :]

    def agree(self, chosen: torch.Tensor) -> None:
        """Fill in what one rank has chosen, on all ranks."""
        dist.broadcast(chosen, self.chooser, group=self.copy)

    def continue_rows(self, rows: torch.Tensor) -> None:
        """Let each row be a copy of another one."""
        self.tokens = self.tokens[rows]
        self.cache.swap_key_value_dict(rows)

    def append(self, tokens: torch.Tensor) -> None:
        """Let tokens follow those that there are."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)


def _ends(token: int | Sequence[int] | None) -> list[int]:
    if token is None:
        return []
    return [token] if isinstance(token, int) else list(token)


@contextmanager
def _evaluating(chunks: list[nn.Module]) -> Iterator[None]:
    """Without dropout, and with whole sequences on every rank: a single new token cannot be shared out."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    holders = [*modules, *{id(chunk.config): chunk.config for chunk in chunks}.values()]
    split = [(holder, name) for holder in holders for name in _SEQUENCE_PARALLEL if vars(holder).get(name)]
    training = [module for module in modules if module.training]
    try:
        for chunk in chunks:
            chunk.eval()
        for holder, name in split:
            setattr(holder, name, False)
        yield
    finally:
        for holder, name in split:
            setattr(holder, name, True)
        for module in training:
            module.training = True
