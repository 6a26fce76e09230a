"""What of Megatron's start does not depend on the job, and can be done once before workers fork?

Megatron describes its flags by parsing the source of its configuration classes, twice per start and
in every rank: 0.7 s of CPU each.  The descriptions never change, so they are kept.
"""

import argparse
import functools

from megatron.training import argument_utils, arguments

__all__ = ["keep_flag_descriptions"]


def keep_flag_descriptions() -> None:
    """Parse the source of every configuration class now, and never again in this process."""
    factory = argument_utils.ArgumentGroupFactory
    parse = factory._get_field_docstrings

    @functools.cache
    def parse_once(config_class: type) -> dict[str, str]:
        bare = object.__new__(factory)
        return dict(parse(bare, config_class))

    factory._get_field_docstrings = lambda _, config_class: parse_once(config_class)
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


keep_flag_descriptions()
