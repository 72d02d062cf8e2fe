"""DataParallel: one process that splits every batch over all visible GPUs.

Start with `python train_dp.py`.

When to use it: almost never. DistributedDataParallel (`train_ddp.py`) is faster even on one machine:
here a single Python process drives all GPUs under one interpreter lock, copies the whole model to
each of them in every step, gathers all outputs on the first GPU, which therefore runs out of memory
first, and keeps the BatchNorm statistics of the first GPU's part only. What speaks for it: it needs
no launcher and one changed line.
"""

import hydra
from torch import nn

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime.checkpoint import Checkpoint

# new #: says so where nothing is gained
from runtime.distributed import visible_gpus
from runtime.evaluate import evaluate
from runtime.guard import NonFiniteGuard
from runtime.logger import RunLogger
from runtime.optimizer import build_optimizer, clip_grad_norm
from runtime.setup import resolve_device, seed_everything
from runtime.tasks import build_task


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: Config) -> None:
    device = resolve_device(cfg.device)

    seed_everything(cfg.seed)

    logger = RunLogger(cfg, device)

    train_loader, val_loader = build_loaders(cfg, device)
    logger.lap("data")

    task = build_task(cfg)
    model: nn.Module = build_model(cfg.model, train_loader.in_channels, train_loader.num_classes)
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
    )
    start_epoch = checkpoint.resume()

    # new #: split every batch over all visible GPUs
    model = nn.DataParallel(model, device_ids=visible_gpus(cfg, device))

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

        totals = evaluate(
            model,
            task,
            val_loader,
        )

        metrics = logger.epoch(epoch, task, totals)
        checkpoint.save(metrics[task.best_metric])
        if logger.reached_max_steps:
            break

    checkpoint.close()
    logger.finish(guard.num_bad_steps)


if __name__ == "__main__":
    main()
