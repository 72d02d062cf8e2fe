"""Averaged weights: evaluates and exports an exponential moving average of the weights.

Start with `python train_ema.py` or `python train_ema.py ema.decay=0.99`.
Combines with every technique.

The average leaves out the noise of single steps as a lower learning rate would, at the price of a
second copy of the model. It includes BatchNorm's statistics.
"""

import torch

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: how the average follows
from runtime.ema import EMA
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
    # new #: a copy of the weights, which will follow them slowly, is part of it
    ema = EMA(model, cfg.ema.decay)
    state["ema"] = ema

    # run: logs, saves
    run = Run(
        cfg,
        device,
        state,
        # new #: ... and what is published
        weights=ema.weights,
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

            # new #: the average follows
            ema.update()

            # record
            run.step(loss, grad_norm)

        # new #: the average is what counts
        ema.swap()

        # validation
        totals, shown = evaluate(
            model,
            task,
            val_loader,
        )

        # new #: back to the weights that learn
        ema.swap()

        # record
        run.epoch(task, totals, shown)

    run.finish()


if __name__ == "__main__":
    run_main(main)
