"""Writes down which ranks were killed: they leave no word themselves, and the attempt after says why there is one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

# What ranks end by when others have failed, or with the whole run.
_CONSEQUENCES = (signal.SIGABRT, signal.SIGINT)


def note_killed(folder: Path) -> None:
    """Has torch elastic look which ranks were killed, before it ends those that are left."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    end_those_left: Any = SubprocessContext.close

    def close(self: Any, *args: Any, **kwargs: Any) -> None:
        # It is called again when those that were left have ended, by a signal: of that, none of them is the cause.
        again, self.was_closed = getattr(self, "was_closed", False), True
        for rank, handler in [] if again else sorted(self.subprocess_handlers.items()):
            code = handler.proc.poll()
            if code is not None and code < 0 and -code not in _CONSEQUENCES:
                env = self.envs[rank]
                note = folder / f"killed-{env['TORCHELASTIC_RESTART_COUNT']}"  # read by `worker.say_attempt`
                name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
                note.write_text(f"rank {env['RANK']} was killed by {name}", encoding="utf-8")
                break
        end_those_left(self, *args, **kwargs)

    SubprocessContext.close = close  # type: ignore[method-assign]
