"""DistributedDataParallel + Automatic mixed precision.

Start with `torchrun --standalone --nproc_per_node=2 train_ddp_amp.py`.

Written by `python compose.py ddp amp`.
"""

import hydra

# new #: collectives
import torch.distributed as dist
from torch import nn

# new #: low precision and its loss scaling
from torch.amp import GradScaler, autocast

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime.checkpoint import Checkpoint

# new #: what torchrun's processes need
from runtime.distributed import (
    convert_sync_batchnorm,
    init_process_group,
    local_rank,
    report_by_rank,
)
from runtime.evaluate import evaluate
from runtime.guard import NonFiniteGuard
from runtime.logger import RunLogger
from runtime.optimizer import build_optimizer, clip_grad_norm

# new #: the configured dtype
from runtime.setup import amp_dtype, resolve_device, seed_everything
from runtime.tasks import build_task


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
# new #: a failing rank names itself, and the others do not wait for it
@report_by_rank
def main(cfg: Config) -> None:
    # new #: one process per device, started by torchrun; the local rank chooses the device
    device = resolve_device(cfg.device, local_rank())
    rank, world_size = init_process_group(cfg, device)

    seed_everything(cfg.seed)

    # new #: rank 0 alone reports
    logger = RunLogger(cfg, device, rank, world_size)

    # new #: every rank reads its own shard, chosen by the global rank
    train_loader, val_loader = build_loaders(cfg, device, rank, world_size)
    logger.lap("data")

    task = build_task(cfg)
    model: nn.Module = build_model(cfg.model, train_loader.in_channels, train_loader.num_classes)
    # new #: BatchNorm statistics over the global batch
    model = convert_sync_batchnorm(model, device)
    model = model.to(device)

    optimizer, scheduler = build_optimizer(cfg, model, len(train_loader))
    guard = NonFiniteGuard(cfg, model, optimizer, train_loader)
    logger.lap("model")

    # new #: scales the loss so that small float16 gradients do not vanish
    dtype = amp_dtype(cfg.amp.dtype, device)
    scaler = GradScaler(device.type, cfg.amp.init_scale, enabled=cfg.amp.dtype == "float16")

    checkpoint = Checkpoint(
        cfg,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        # new #: the scale is part of the run's state
        scaler=scaler,
        train_loader=train_loader,
        guard=guard,
        logger=logger,
        # new #: rank 0 alone writes
        rank=rank,
    )
    start_epoch = checkpoint.resume()

    # new #: average the gradients over all ranks during backward
    model = nn.parallel.DistributedDataParallel(model)

    for epoch in range(start_epoch, cfg.epochs):
        train_loader.set_epoch(epoch)
        model.train()
        for inputs, targets in logger.track(train_loader, epoch):
            optimizer.zero_grad(set_to_none=True)

            # new #: the forward pass runs in low precision where that is safe
            with autocast(device.type, dtype):
                outputs = model(inputs)
                loss = task.loss(outputs, targets)

            # new #: gradients of the scaled loss
            scaler.scale(loss).backward()

            # new #: clipping and the logged norm need the true gradients
            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm(optimizer, cfg.clip_grad_norm)
            guard.check(grad_norm)

            # new #: no step if a gradient overflowed; then the scale shrinks
            scaler.step(optimizer)
            scaler.update()

            logger.step(loss, grad_norm, scheduler)
            scheduler.step()
            checkpoint.step()

        # new #: where BatchNorm is per rank, all evaluate with the statistics of rank 0
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

        totals = evaluate(
            model,
            task,
            val_loader,
            # new #: evaluate in the precision of training
            dtype=dtype,
        )
        # new #: sums over all shards, so that every rank holds the same metrics
        dist.all_reduce(totals)

        metrics = logger.epoch(epoch, task, totals)
        checkpoint.save(metrics[task.best_metric])
        if logger.reached_max_steps:
            break

    checkpoint.close()
    logger.finish(guard.num_bad_steps)


if __name__ == "__main__":
    main()
