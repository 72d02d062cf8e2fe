"""Automatic mixed precision: float16 or bfloat16 where it is safe, float32 elsewhere.
DistributedDataParallel: one process per device, each with its own shard of every batch.

Start with `torchrun --standalone --nproc_per_node=2 train_ddp_amp.py`.
Written by `python -m tools.compose ddp amp`.
"""

import torch

# new #: collectives
import torch.distributed as dist

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: the configured dtype
from runtime.amp import amp_dtype

# new #: what torchrun's processes need
from runtime.distributed import convert_sync_batchnorm, init_process_group, local_rank, sync_buffers
from tasks import build_task


@entry_point
def main(cfg: Config) -> None:
    # new #: one process per device, started by torchrun; the local rank chooses the device
    device = setup(cfg, local_rank())
    group = init_process_group(cfg, device)

    seed_everything(cfg.seed)

    # data
    # new #: every rank reads its own shard of each batch
    train_loader, val_loader = build_loaders(cfg, device, group.rank, group.world_size)

    # model
    task = build_task(cfg, train_loader)
    model = build_model(cfg.model, train_loader.in_channels, task.num_outputs)

    # new #: the dtype of the forward pass
    dtype = amp_dtype(cfg.amp.dtype, device)

    model = model.to(device)

    # new #: BatchNorm statistics over the global batch
    model = convert_sync_batchnorm(cfg, model, device)
    # new #: the ranks have the same weights, but from here on draw other dropout masks
    seed_everything(cfg.seed, group.rank)

    # optimizer
    optimizer, scheduler = build_optimizer(cfg, model, len(train_loader))

    # new #: scales the loss, without which small float16 gradients would vanish
    scaler = torch.amp.GradScaler(device.type, cfg.amp.init_scale, enabled=dtype is torch.float16)

    # state: what a checkpoint holds
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": train_loader}
    # new #: the scale is part of it
    state["scaler"] = scaler

    # run: logs, saves
    run = Run(
        cfg,
        device,
        state,
        # new #: the log says so
        precision=dtype,
        # new #: the ranks log, save and leave together; rank 0 alone writes
        group=group,
    )
    run.resume()

    # new #: average the gradients over all ranks during backward; buffers matter in validation only
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    model.broadcast_buffers = False

    # your own: loggers, callbacks

    for epoch in run.epochs():
        train_loader.set_epoch(epoch)
        model.train()
        for inputs, targets in run.batches(train_loader):
            # your own: changes of inputs and targets

            # forward
            # new #: the forward pass runs in low precision where that is safe
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                outputs = model(inputs)

            # loss
            loss = task.loss(outputs, targets)

            # backward
            # new #: gradients of the scaled loss
            scaler.scale(loss).backward()

            # clip
            # new #: the norm of the true gradients
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)

            # update
            # new #: a step whose gradients overflowed is skipped, and the scale shrinks
            scaler.step(optimizer)
            scaler.update()
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
            # new #: evaluate in the precision of training
            precision=torch.autocast(device.type, dtype, enabled=dtype is not torch.float32),
        )

        # new #: sums over all shards: every rank has the same metrics
        dist.all_reduce(totals)

        # record
        run.epoch(task, totals, shown)

    run.finish()


if __name__ == "__main__":
    run_main(main)
