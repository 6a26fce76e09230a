"""Tiny models with everything that makes state hard to move.

Sizes are odd so that partitions cut rows in the middle and need padding.  Every model learns to say
the next of eleven words, from words alone; its loss does not depend on how the batch is cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, gelu

from tenplex_megatron.core.mesh import ParallelLayout

__all__ = ["BATCH", "Job", "batch_of", "micro_batches", "model_of"]

BATCH = 12
"""Samples per step: divides for 1 to 4 data-parallel ranks."""
WORDS, LENGTH, WIDTH, INNER = 11, 5, 7, 13
HEADS, PAIRS, UNEVEN = 8, 4, 14


@dataclass(frozen=True, order=True)
class Job:
    """One engine of one world."""

    layout: ParallelLayout
    precision: str = "fp32"
    optimizer: str = "adamw"
    model: str = "dense"
    dropout: float = 0.0
    options: str = ""
    """What its configuration of ZeRO has besides the stage: a name in `deepspeed_engines`."""

    @property
    def name(self) -> str:
        """Also the name of its snapshots' folder."""
        layout = str(self.layout).replace(",", ".")
        return f"{self.model}.{self.optimizer}.{self.precision}.{layout}.{self.options}".rstrip(".")


def batch_of(step: int) -> torch.Tensor:
    """The words of one global batch, shape (BATCH, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)


def micro_batches(step: int, micro: int, rank: int, dp: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """What one data-parallel rank gets of a global batch: words, and those that follow."""
    for words in batch_of(step).split(micro)[rank::dp]:
        yield words[:, :-1], words[:, 1:]


def loss_of(scores: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
    """The mean loss over all words of a micro-batch."""
    return cross_entropy(scores.float().view(-1, WORDS), next_words.reshape(-1))


class Block(torch.nn.Module):
    """A norm and two layers beside a residual, with a buffer that only training loops set."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.grow = torch.nn.Linear(WIDTH, INNER)
        self.shrink = torch.nn.Linear(INNER, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape stays."""
        inner = self.shrink(gelu(self.grow(self.norm(hidden))))
        return hidden + self.dropout(inner) * self.scale.to(hidden.dtype)


class Dense(torch.nn.Module):
    """A tied embedding, weights that are frozen, unused or left out, and buffers of all kinds."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.frozen = torch.nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.block = Block(dropout)
        self.temperature = torch.nn.Parameter(torch.rand(1) + 1.0)
        self.unused = torch.nn.Parameter(torch.randn(3))
        self.left_out = torch.nn.Parameter(torch.randn(WIDTH))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.tensor(0.0))
        self.register_buffer("derived", torch.zeros(dist.get_world_size()), persistent=False)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embedding(words) + self.frozen + self.left_out.detach()
        hidden = self.block(hidden) + self.shift
        return loss_of(self.head(hidden.to(self.frozen.dtype)) * self.temperature, next_words)


class Words(torch.nn.Module):
    """First and last layer of a pipeline: the words are tied, their places are the first's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH))
        self.places = torch.nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Words to hidden."""
        return torch.nn.functional.embedding(words, self.weight) + self.places

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden to scores of words."""
        return hidden @ self.weight.t()


class Split(torch.nn.Module):
    """Layers that tensor parallelism cuts in every way: fused evenly and not, rows, uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, HEADS)
        self.norm = torch.nn.LayerNorm(HEADS)
        self.fused = torch.nn.Linear(HEADS, 3 * HEADS)
        self.out = torch.nn.Linear(HEADS, HEADS)
        self.grouped = torch.nn.Linear(HEADS, HEADS + 2 * PAIRS)
        self.merge = torch.nn.Linear(HEADS, HEADS)
        self.grow = torch.nn.Linear(HEADS, UNEVEN)
        self.shrink = torch.nn.Linear(UNEVEN, HEADS)
        self.head = torch.nn.Linear(HEADS, WORDS)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        """The loss; what is local to a tensor-parallel rank is never mixed by hand."""
        hidden = self.embedding(words)
        first, second, third = self.fused(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.out(first * second.sigmoid() + third)
        local = self.grouped(self.norm(hidden))
        groups = local.shape[-1] // 4
        query, key, value = local.split((2 * groups, groups, groups), dim=-1)
        pairs = query.unflatten(-1, (groups, 2)) * key.sigmoid()[..., None] + value[..., None]
        hidden = hidden + self.merge(pairs.flatten(-2))
        hidden = hidden + self.shrink(gelu(self.grow(self.norm(hidden))))
        return loss_of(self.head(hidden), next_words)


class Vocabulary(torch.nn.Module):
    """Tied first and last layers that tensor parallelism cuts by words, eleven of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, HEADS)
        self.norm = torch.nn.LayerNorm(HEADS)
        self.grow = torch.nn.Linear(HEADS, UNEVEN)
        self.shrink = torch.nn.Linear(UNEVEN, HEADS)
        self.lm_head = torch.nn.Linear(HEADS, WORDS)
        self.lm_head.weight = self.embedding.weight
        self.loss_function = self.loss_of_whole

    @staticmethod
    def loss_of_whole(scores: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
        """DeepSpeed puts its own in this place where the scores are cut."""
        return loss_of(scores, shift_labels)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embedding(words)
        hidden = hidden + self.shrink(gelu(self.grow(self.norm(hidden))))
        return self.loss_function(self.lm_head(hidden), shift_labels=next_words)


class Mixture(torch.nn.Module):
    """A mixture of experts between an embedding and a head."""

    def __init__(self, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        expert = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, WIDTH)
        )
        self.experts = MoE(
            WIDTH, expert, num_experts=4, ep_size=ep, drop_tokens=False, use_rts=False
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embedding(words)
        mixed, _, _ = self.experts(hidden)
        return loss_of(self.head(hidden + mixed), next_words)


def _pipeline(job: Job) -> torch.nn.Module:
    """Seven layers over the stages: uneven for two and three of them."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    words = {"tied_weight_attr": "weight"}
    return PipelineModule(
        [
            TiedLayerSpec("words", Words, **words),
            *(LayerSpec(Block, job.dropout) for _ in range(4)),
            LayerSpec(torch.nn.LayerNorm, WIDTH),
            TiedLayerSpec("words", Words, forward_fn=Words.scores, **words),
        ],
        num_stages=job.layout.pp,
        loss_fn=loss_of,
        partition_method="uniform",
    )


def model_of(job: Job) -> torch.nn.Module:
    """What a job trains, before anything is cut."""
    if job.model == "pipeline":
        return _pipeline(job)
    if job.model == "split":
        return Split()
    if job.model == "vocabulary":
        return Vocabulary()
    if job.model == "mixture":
        return Mixture(job.layout.ep)
    return Dense(job.dropout)
