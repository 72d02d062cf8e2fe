"""Rendezvous server of elastic runs, in a process of its own: any machine that trains may fail.

    python launch/rendezvous.py [PORT]      default: 29400

Start it on a machine that stays; it needs no GPU. `launch/elastic_torchrun.py` connects to it. It
serves any number of runs with different --rdzv_id, unauthenticated: keep the port in the cluster.
"""

import signal
import sys
from types import FrameType

from torch.distributed import DistNetworkError, TCPStore


def main(arguments: list[str]) -> None:
    port = arguments[0] if arguments else "29400"
    if len(arguments) > 1 or not port.isdigit() or int(port) > 65535:
        sys.exit(f"{' '.join(arguments)} is not a port; use a number up to 65535, such as 29400")
    try:
        store = TCPStore("0.0.0.0", int(port), is_master=True, wait_for_workers=False)
    except DistNetworkError:
        sys.exit(f"port {port} cannot be used: another process may have it; choose another port")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    print(f"rendezvous server on port {store.port}", flush=True)
    while True:
        signal.pause()


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
