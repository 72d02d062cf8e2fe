"""torchrun on a changing number of machines, which connect to `launch/rendezvous.py`.

    python launch/elastic_torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_endpoint=HOST:29400 \\
        --rdzv_id=mine --max-restarts=20 train_ddp.py resume=auto

The options are torchrun's. If torchrun would end because HOST:29400 does not answer or there are
too few machines for --nnodes, it prints the reason and tries again; its ranks have saved before.
It exits with 2, as the ranks, if they met a mistake in the configuration.
"""

import os
import sys
import time

SECONDS_BETWEEN_TRIES = 5
MISTAKE = 2  # exit code of a rank; conf/cli.py has it, but would import Hydra


def main(arguments: list[str]) -> None:
    # Read when torch is imported, also by ranks; else a lost connection prints pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import errors
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import api as rendezvous

    # Otherwise restarted ranks would find the addresses of the first start in the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = run.parse_args(["--rdzv_backend=c10d", *arguments])
    options.rdzv_conf = f"is_host=false,{options.rdzv_conf}".rstrip(",")
    if not options.rdzv_endpoint:
        sys.exit("--rdzv_endpoint= is missing; give HOST:PORT of launch/rendezvous.py")
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
        except errors.ChildFailedError as failed:
            if failed.get_first_failure()[1].exitcode != MISTAKE:
                raise
            sys.exit(MISTAKE)
        except SignalException as signalled:
            sys.exit(128 + signalled.sigval)
        print(f"tries {options.rdzv_endpoint} again: {why}", file=sys.stderr, flush=True)
        time.sleep(SECONDS_BETWEEN_TRIES)


if __name__ == "__main__":
    main(sys.argv[1:])
