"""Activation checkpointing: backward computes again what forward does not keep in memory.

Start with `python train_recompute.py`.
Combines with every technique.

When to use it: where the activations of a batch do not fit on the device. The forward pass of each
block runs twice: a step takes about a third longer. The weights are those of `train.py`.
"""

import torch

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: the blocks that compute twice
from runtime.recompute import recompute
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

    # new #: each block keeps its inputs alone, and computes the rest again in backward
    model = recompute(model)

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
