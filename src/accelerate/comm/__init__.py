"""How processes talk: communicators on tensors, nesting in `tree`, the public operations in `ops`."""

from accelerate.comm.base import Communicator, current, existing, set_current, set_factory

__all__ = ["Communicator", "current", "existing", "set_current", "set_factory"]
