"""Process group, collectives, and models that are spread over ranks.

Only the entry points use torch.distributed besides.
"""

# Default arguments of its functions are the process group that exists at its first import. If DDP
# does that import, gloo's threads outlive the group, into the end of Python.
import torch.distributed.nn.functional

from runtime.distributed.group import ProcessGroup
from runtime.distributed.heartbeat import Heartbeat
from runtime.distributed.launch import (
    end_rank,
    init_process_group,
    interface_to,
    leave_process_group,
    local_rank,
    run_stamp,
)
from runtime.distributed.models import convert_sync_batchnorm, sync_buffers
from runtime.distributed.slow_ranks import SlowRanks
