"""What is trained: the sizes of a transformer that decide its time and memory."""

from dataclasses import dataclass

from tenplex_megatron.errors import ConfigError

__all__ = ["LatentAttention", "ModelProfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-latent attention: queries, keys and values are projected down, then up again."""

    query_rank: int
    key_value_rank: int
    rope_head_size: int
    """Channels of a query or key that carry its position, beyond `head_size`."""
    value_head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A decoder-only transformer as Megatron's flags describe it; sizes are counts of elements."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    """Key and value heads; equal to `num_heads` without grouped-query attention."""
    head_size: int
    """Channels of one head, `--kv-channels`."""
    ffn_size: int
    seq_length: int
    vocab_size: int
    """Rows of the embedding, padding included."""
    pads_vocab: bool = True
    """Whether Megatron adds rows until every tensor-parallel size divides them."""
    is_gated: bool = False
    """SwiGLU and its like: the first matrix of the MLP is twice as wide."""
    has_bias: bool = True
    has_learned_positions: bool = True
    is_tied: bool = True
    """Whether input and output embedding are one tensor."""
    has_rms_norm: bool = False
    dropout: bool = True
    """Whether any dropout is above 0, so that its masks are kept."""
    num_experts: int = 0
    """Experts of every layer but the first `num_dense_layers`; 0 for a dense model."""
    experts_per_token: int = 1
    expert_ffn_size: int = 0
    shared_expert_ffn_size: int = 0
    num_dense_layers: int = 0
    """Leading layers without experts in a model that has some."""
    latent: LatentAttention | None = None
    """None: queries, keys and values are projected directly."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_query_groups:
            raise ConfigError(
                f"model: {self.num_heads} heads do not divide into {self.num_query_groups} query "
                "groups"
            )
