"""Gradient accumulation: splits a batch that does not fit into memory into micro-batches.

Start with `python train_accumulate.py accumulate_steps=4` or `accumulate_steps=auto`.
Combines with every technique.

`global_batch_size` is still the batch of one optimizer step, whose parts pass through the model one
after the other; their gradients add up. Only BatchNorm differs: it normalises each part by itself.
"""

import torch

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime import Run, build_optimizer, entry_point, evaluate, run_main, seed_everything, setup

# new #: the number of parts, and models that are spread over ranks
from runtime.accumulate import MicroBatches, set_gradient_sync
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

    # your own: loggers, callbacks

    for epoch in run.epochs():
        train_loader.set_epoch(epoch)
        model.train()
        # new #: every batch comes in parts; with accumulate_steps=auto, in the fewest that fit
        parts = MicroBatches(run, model, task)
        for inputs, targets in parts.of(run.batches(train_loader)):
            # your own: changes of inputs and targets

            # new #: ranks exchange gradients once per step
            set_gradient_sync(model, parts.is_last)

            # forward
            outputs = model(inputs)

            # loss
            loss = task.loss(outputs, targets)

            # new #: of the mean over the whole batch, each part has its share
            loss = loss / parts.number

            # backward
            loss.backward()

            # new #: gradients add up until the last part
            if not parts.is_last:
                run.record_micro_batch(loss)
                continue

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
