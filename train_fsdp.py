"""Fully sharded data parallelism (FSDP2): DDP whose ranks each keep only a part of the weights.

Start with `torchrun --standalone --nproc_per_node=2 train_fsdp.py`.
Combines with every technique but `dp` and `ddp`, which also split the batch over the GPUs.

When to use it: where weights, gradients and optimizer state do not fit on each device. Each block
of the model is gathered when it computes. Every script resumes from the shards that the ranks save.
"""

import torch

# new #: collectives
import torch.distributed as dist

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: what torchrun's processes need
from runtime.distributed import convert_sync_batchnorm, init_process_group, local_rank, sync_buffers
from runtime.fsdp import shard
from tasks import build_task


@entry_point
def main(cfg: Config) -> None:
    # new #: one process per device, started by torchrun; the local rank chooses the device
    device = setup(cfg, local_rank())
    group = init_process_group(cfg, device)
    dtype = None  # in which the model computes: that of its weights

    seed_everything(cfg.seed)

    # data
    # new #: every rank reads its own shard of each batch
    train_loader, val_loader = build_loaders(cfg, device, group.rank, group.world_size)

    # model
    task = build_task(cfg, train_loader)
    model = build_model(cfg.model, train_loader.in_channels, task.num_outputs)

    # new #: BatchNorm statistics over the global batch
    model = convert_sync_batchnorm(cfg, model, device)
    # new #: block by block to the device, where each rank keeps a shard of every weight; gradients
    # are averaged over all ranks in backward
    model = shard(model, device, dtype)
    # new #: the ranks have the same weights, but from here on draw other dropout masks
    seed_everything(cfg.seed, group.rank)

    model = model.to(device)

    # optimizer
    optimizer, scheduler = build_optimizer(cfg, model, len(train_loader))

    # state: what a checkpoint holds
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": train_loader}

    # run: logs, saves
    run = Run(
        cfg,
        device,
        state,
        # new #: the ranks log, save and leave together; rank 0 alone writes
        group=group,
    )
    run.resume()

    # your own: loggers, callbacks

    for epoch in run.epochs():
        train_loader.set_epoch(epoch)
        model.train()
        for inputs, targets in run.batches(train_loader):
            # your own: changes of inputs and targets

            # forward
            outputs = model(inputs)

            # loss
            loss = task.loss(outputs, targets)

            # backward
            loss.backward()

            # clip
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)

            # new #: the norm over the shards of all ranks
            grad_norm = group.full_tensor(grad_norm)

            # update
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()

            # record
            run.step(loss, grad_norm)

        # new #: where BatchNorm is per rank, all evaluate with the statistics of rank 0
        sync_buffers(state)

        # validation
        totals, shown = evaluate(
            model,
            task,
            val_loader,
            # new #: all gather the weights equally often, also where a shard has fewer batches
            num_batches=val_loader.max_batches,
        )

        # new #: sums over all shards: every rank has the same metrics
        dist.all_reduce(totals)

        # record
        run.epoch(task, totals, shown)

    run.finish()


if __name__ == "__main__":
    run_main(main)
