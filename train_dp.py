"""DataParallel: one process that splits every batch over all visible GPUs.

Start with `python train_dp.py`.
Combines with every technique but `ddp` and `fsdp`, which also split the batch over the GPUs.

When to use it: almost never. `train_ddp.py` is faster even on one machine: here one Python process
drives all GPUs, and copies the whole model to each of them in every step.
"""

import torch

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: says so where nothing is gained
from runtime.distributed import visible_gpus
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
    )
    run.resume()

    # new #: split every batch over all visible GPUs
    model = torch.nn.DataParallel(model, device_ids=visible_gpus(cfg, device))

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

            # update
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()

            # record
            run.step(loss, grad_norm)

        # validation
        totals, shown = evaluate(
            model,
            task,
            val_loader,
        )

        # record
        run.epoch(task, totals, shown)

    run.finish()


if __name__ == "__main__":
    run_main(main)
