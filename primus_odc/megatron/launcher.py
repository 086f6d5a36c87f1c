"""torchrun whose last word is one clear message: ``python -m primus_odc.megatron.launcher WORDS``, with the words of torchrun.

Alone, torchrun ends with a traceback and a report of its own below what the failed rank said. Here the reason of the first rank of this
host that failed stands below that once more; after Ctrl-C or SIGTERM there is no traceback. A rank leaves its reason by
:func:`leave_reason`, in the file that torchrun gives it and shows in its report, also where torchrun is started without this module.

Exit status: that of the first rank that failed, 1 where a signal ended it; 128 and the signal's number where one ended torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

INTERRUPTED = "interrupted"
"""What is told after Ctrl-C."""


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the process of ``environment`` is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in environment


def leave_reason(text: str) -> None:
    """In a rank: leave for torchrun why it ends, in the form of ``torch.distributed.elastic.multiprocessing.errors``; elsewhere nothing.

    The rank has told it before: where the file cannot be written, that stands above torchrun's report only.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}))


def on_this_rank() -> str:
    """Begins a message of something that happened on this rank alone."""
    return f"on rank {os.environ.get('RANK', '0')}: "


def leave_unforeseen(error: BaseException) -> None:
    """In a rank: :func:`leave_reason` of an error whose traceback is printed as well."""
    leave_reason(f"{on_this_rank()}{type(error).__name__}: {error}; its traceback stands above")


def main(words: list[str]) -> int:
    """Run torchrun with ``words`` and return the exit status."""
    try:
        # torch takes seconds, in which Ctrl-C has to be told as later.
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

        try:
            run(parse_args(words))
        except ChildFailedError as error:
            traceback.print_exc()
            rank, failure = error.get_first_failure()
            tell(f"error: {_reason(rank, failure.exitcode, failure.error_file_data)}")
            return failure.exitcode if failure.exitcode > 0 else 1
        except SignalException as error:
            return _ended_by(error.sigval)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return 0


def _reason(rank: int, code: int, left: dict[str, object]) -> str:
    """What the rank left, or how it ended."""
    message = left.get("message")
    if isinstance(message, dict):
        return str(message["message"])
    return f"rank {rank} {how_it_ended(code)}; what it wrote stands above"


def how_it_ended(code: int) -> str:
    """The exit status of a process, or the negative number of the signal that ended it, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"


def _ended_by(number: signal.Signals) -> int:
    tell(INTERRUPTED if number == signal.SIGINT else f"ended by {number.name}")
    return 128 + number


def tell(text: str) -> None:
    """One message of the command on stderr."""
    print(f"primus-odc: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
