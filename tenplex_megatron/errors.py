"""Which failures are raised on purpose, and what a caller may do about each."""

__all__ = [
    "ConfigError",
    "LayoutError",
    "SpaceError",
    "StoreError",
    "TenplexError",
    "TransportError",
    "UnsupportedLayoutError",
]


class TenplexError(Exception):
    """Every error this package raises on purpose."""


class ConfigError(TenplexError):
    """Input a person wrote is wrong; the command line ends with exit code 2."""


class LayoutError(TenplexError):
    """Two descriptions of the same state contradict each other; never fall back."""


class UnsupportedLayoutError(TenplexError):
    """The layout is legal but not handled here; reloading from a checkpoint is still right."""


class StoreError(TenplexError):
    """A snapshot is torn, flipped, of another job, or of another format."""


class SpaceError(StoreError):
    """The place that holds snapshots is too small for them."""


class TransportError(TenplexError):
    """A peer did not answer in time, or sent something else than the plan says."""
