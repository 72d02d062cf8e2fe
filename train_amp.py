"""Automatic mixed precision: float16 or bfloat16 where it is safe, float32 elsewhere.

Start with `python train_amp.py` or `python train_amp.py amp.dtype=bfloat16`.
Combines with every technique.

Small float16 gradients would become zero: GradScaler multiplies the loss, and skips steps whose
gradients overflowed. bfloat16 has the range of float32; the scaler is then disabled.
"""

import torch

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: the configured dtype
from runtime.amp import amp_dtype
from tasks import build_task


@entry_point
def main(cfg: Config) -> None:
    device = setup(cfg)

    seed_everything(cfg.seed)

    # data
    train_loader, val_loader = build_loaders(cfg, device)

    # model
    task = build_task(cfg, train_loader)
    model = build_model(cfg.model, train_loader.in_channels, task.num_outputs)

    # new #: the dtype of the forward pass
    dtype = amp_dtype(cfg.amp.dtype, device)

    model = model.to(device)

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
    )
    run.resume()

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

        # validation
        totals, shown = evaluate(
            model,
            task,
            val_loader,
            # new #: evaluate in the precision of training
            precision=torch.autocast(device.type, dtype, enabled=dtype is not torch.float32),
        )

        # record
        run.epoch(task, totals, shown)

    run.finish()


if __name__ == "__main__":
    run_main(main)
