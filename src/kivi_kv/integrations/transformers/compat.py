"""Names that differ between the transformers versions that we support."""

from typing import Any

import transformers
from packaging.version import Version
from transformers import Cache

CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def cache_argument(cache: Cache) -> dict[str, Any]:
    """The keyword argument by which forward() and generate() take a cache."""
    return {CACHE_ARGUMENT: cache}
