"""DistributedDataParallel: one process per device, each with its own shard of every batch.

Start with `torchrun --standalone --nproc_per_node=2 train_ddp.py`.

The gradients are averaged while `backward()` still runs, so that communication hides behind
computation. With the same `global_batch_size` it computes what `train.py` computes.
"""

import hydra

# new #: collectives
import torch.distributed as dist
from torch import nn

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
from runtime.setup import resolve_device, seed_everything
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

    checkpoint = Checkpoint(
        cfg,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
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

            outputs = model(inputs)
            loss = task.loss(outputs, targets)

            loss.backward()

            grad_norm = clip_grad_norm(optimizer, cfg.clip_grad_norm)
            guard.check(grad_norm)

            optimizer.step()

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
