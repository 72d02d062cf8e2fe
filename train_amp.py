"""Automatic mixed precision: float16 or bfloat16 where it is safe, float32 elsewhere.

Start with `python train_amp.py` or `python train_amp.py amp.dtype=bfloat16`.

Small float16 gradients would become zero: GradScaler multiplies the loss, divides the gradients
again before they are used, and skips steps whose gradients overflowed. bfloat16 has the range of
float32 and needs no scaling; the scaler is then disabled and passes everything through.
"""

import hydra
from torch import nn

# new #: low precision and its loss scaling
from torch.amp import GradScaler, autocast

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime.checkpoint import Checkpoint
from runtime.evaluate import evaluate
from runtime.guard import NonFiniteGuard
from runtime.logger import RunLogger
from runtime.optimizer import build_optimizer, clip_grad_norm

# new #: the configured dtype
from runtime.setup import amp_dtype, resolve_device, seed_everything
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
    )
    start_epoch = checkpoint.resume()

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

        totals = evaluate(
            model,
            task,
            val_loader,
            # new #: evaluate in the precision of training
            dtype=dtype,
        )

        metrics = logger.epoch(epoch, task, totals)
        checkpoint.save(metrics[task.best_metric])
        if logger.reached_max_steps:
            break

    checkpoint.close()
    logger.finish(guard.num_bad_steps)


if __name__ == "__main__":
    main()
