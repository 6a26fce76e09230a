"""Which operators do known networks consist of?"""

import itertools
from collections.abc import Iterator, Sequence

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.tensoropt.network import Link, Network
from tenplex_megatron.planner.tensoropt.operators import (
    Dim,
    Operator,
    addition,
    attention_core,
    convolution,
    elementwise,
    embedding,
    loss,
    matrix_product,
    normalisation,
    pooling,
)

__all__ = ["mlp", "transformer", "vgg16"]


class _Builder:
    """Appends operators that read the output of the one before them."""

    def __init__(self) -> None:
        self.operators: dict[str, Operator] = {}
        self.links: list[Link] = []
        self.last: str | None = None

    def then(self, name: str, operator: Operator, *, also: str | None = None) -> str:
        """Append; `also` names the operator whose output is the second input."""
        if self.last is not None:
            self.links.append(Link(self.last, name))
        if also is not None:
            self.links.append(Link(also, name, slot=1))
        self.operators[name] = operator
        self.last = name
        return name

    def network(self, name: str) -> Network:
        return Network(name, self.operators, tuple(self.links))


def mlp(batch_size: int, widths: Sequence[int]) -> Network:
    """Linear layers of these widths, input first, with an activation between and a loss at the end.

    >>> list(mlp(64, [32, 128, 8]).operators)
    ['linear0', 'activation0', 'linear1', 'loss']
    """
    batch, builder = Dim("batch", batch_size), _Builder()
    last = len(widths) - 2
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        builder.then(
            f"linear{layer}", matrix_product((batch,), Dim("in", inputs), Dim("out", outputs))
        )
        if layer < last:
            builder.then(f"activation{layer}", elementwise((batch, Dim("feature", outputs))))
    builder.then("loss", loss((batch,), Dim("classes", widths[-1])))
    return builder.network("mlp")


def transformer(model: ModelProfile, batch_size: int) -> Network:
    """Embedding, the model's blocks with their residual edges, final norm, output layer, loss.

    Positions are part of the embedding, and input and output embedding are two tensors.

    Raises:
        ConfigError: for a model with experts.
    """
    if model.num_experts:
        raise ConfigError(
            f"model: expected no experts, got {model.num_experts}; operators route no tokens"
        )
    leading = (Dim("batch", batch_size), Dim("sequence", model.seq_length))
    features = Dim("feature", model.hidden_size)
    tokens = (*leading, features)
    builder = _Builder()
    builder.then("embedding", embedding(leading, model.vocab_size, features))
    for layer in range(model.num_layers):
        for part, operators in (
            ("attention", _attention(model, leading)),
            ("mlp", _mlp(model, leading)),
        ):
            entry = builder.last
            builder.then(f"block{layer}.{part}.norm", normalisation(tokens))
            for name, operator in operators:
                builder.then(f"block{layer}.{part}.{name}", operator)
            # The residual is the second input.
            builder.then(
                f"block{layer}.{part}.add", addition(tokens, dropout=model.dropout), also=entry
            )
    builder.then("norm", normalisation(tokens))
    builder.then("output", matrix_product(leading, features, Dim("out", model.vocab_size)))
    builder.then("loss", loss(leading, Dim("classes", model.vocab_size)))
    return builder.network("transformer")


def _attention(model: ModelProfile, leading: tuple[Dim, Dim]) -> Iterator[tuple[str, Operator]]:
    """Projection to queries, keys and values, the core, and the projection back.

    Query groups are what a split tells apart: a group's queries need its key and value.
    """
    groups, features = Dim("heads", model.num_query_groups), Dim("feature", model.hidden_size)
    query_width = model.num_heads // model.num_query_groups * model.head_size
    input_width = query_width + 2 * model.head_size
    yield "qkv", matrix_product(leading, features, groups, output_width=input_width)
    yield (
        "core",
        attention_core(
            *leading, groups, query_width=query_width, input_width=input_width, is_causal=True
        ),
    )
    yield "projection", matrix_product(leading, groups, features, input_width=query_width)


def _mlp(model: ModelProfile, leading: tuple[Dim, Dim]) -> Iterator[tuple[str, Operator]]:
    features, ffn = Dim("feature", model.hidden_size), Dim("ffn", model.ffn_size)
    gates = 2 if model.is_gated else 1
    yield "up", matrix_product(leading, features, ffn, output_width=gates)
    yield "activation", elementwise((*leading, ffn), width=gates, output_width=1)
    yield "down", matrix_product(leading, ffn, features)


_VGG16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""Convolutions and channels between poolings: column D of Simonyan and Zisserman, arXiv 1409.1556,
table 1."""


def vgg16(batch_size: int, *, image_size: int = 224, classes: int = 1000) -> Network:
    """VGG-16: 13 convolutions, 5 poolings, 3 linear layers, and the loss.

    Raises:
        ConfigError: when the image does not halve five times.
    """
    if image_size % 32:
        raise ConfigError(f"image: expected a size divisible by 32, got {image_size}")
    batch, builder = Dim("batch", batch_size), _Builder()
    channels, size = 3, image_size
    for stage, (count, outputs) in enumerate(_VGG16):
        for number in range(count):
            operator = convolution(batch, channels, outputs, kernel=3, height=size, width=size)
            builder.then(f"conv{stage}_{number}", operator)
            channels = outputs
        builder.then(f"pool{stage}", pooling(batch, channels, height=size, width=size))
        size //= 2
    inputs, input_width = Dim("in", channels), size * size
    for number, outputs in enumerate((4096, 4096, classes)):
        operator = matrix_product((batch,), inputs, Dim("out", outputs), input_width=input_width)
        builder.then(f"linear{number}", operator)
        inputs, input_width = Dim("in", outputs), 1
    builder.then("loss", loss((batch,), Dim("classes", classes)))
    return builder.network("vgg16")
