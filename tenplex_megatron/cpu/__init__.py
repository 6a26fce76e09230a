"""How does training code written for CUDA run on a machine without any?"""

from tenplex_megatron.cpu.standin import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
