"""The public helpers in one place: each name is imported from where it lives when it is first used.

Nothing inside the package imports from here.
"""

from accelerate.lazy import lazy

# At once, because the name is also that of its module: whatever is imported later, the function keeps it.
from accelerate.utils.tqdm import tqdm  # noqa: F401

__getattr__, __dir__, __all__ = lazy(__name__)
