"""torchrun on machines that come and go; they meet where `launch/rendezvous.py` runs.

    python launch/elastic_torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_endpoint=HOST:29400 \\
        --rdzv_id=mine --max-restarts=20 train_ddp.py resume=auto

The options are torchrun's. While nothing answers at HOST:29400, or fewer machines are there than --nnodes
needs, it says so and tries again, where torchrun would end; its ranks have saved then.
"""

import os
import sys
import time

# torch reads it when it is imported: it would show its C++ stack when the connection is lost.
CPP_LOG_LEVEL = os.environ.get("TORCH_CPP_LOG_LEVEL")
os.environ["TORCH_CPP_LOG_LEVEL"] = CPP_LOG_LEVEL or "ERROR"

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.rendezvous import api as rendezvous  # noqa: E402

SECONDS_BETWEEN_TRIES = 5


def main(arguments: list[str]) -> None:
    if CPP_LOG_LEVEL is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks tell all they have to
    # Ranks of a second start would else find the addresses of the first in the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = run.parse_args(["--rdzv_backend=c10d", "--rdzv_conf=is_host=false", *arguments])
    os.environ["ELASTIC_NNODES"] = options.nnodes
    if not options.rdzv_endpoint:
        sys.exit("--rdzv_endpoint=HOST:PORT is missing: where launch/rendezvous.py runs")
    while True:
        try:
            return run.run(options)
        except rendezvous.RendezvousConnectionError:
            why = "nothing answers there"
        except rendezvous.RendezvousTimeoutError:
            why = f"fewer machines than --nnodes={options.nnodes} are there"
        except rendezvous.RendezvousClosedError:
            sys.exit(
                f"the run --rdzv_id={options.rdzv_id} has ended; a new one needs another --rdzv_id"
            )
        except SignalException as signalled:
            sys.exit(128 + signalled.sigval)
        print(f"tries {options.rdzv_endpoint} again: {why}", file=sys.stderr, flush=True)
        time.sleep(SECONDS_BETWEEN_TRIES)


if __name__ == "__main__":
    main(sys.argv[1:])
