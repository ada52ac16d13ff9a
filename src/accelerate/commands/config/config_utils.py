"""What the parsers of `accelerate config` share."""

from __future__ import annotations

import argparse

from accelerate.config.options.compiling import LEGACY_DYNAMO_BACKENDS as DYNAMO_BACKENDS

__all__ = ["DYNAMO_BACKENDS", "SubcommandHelpFormatter"]


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Format help with its line breaks as they are written."""
