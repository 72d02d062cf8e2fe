"""Plain PyTorch: one process, one device. Start with `python plain/train.py`.

On SIGTERM it saves and exits with code 75. Started again, it goes on and ends with the same bits:
batches, dropout masks and learning rate depend on the seed and the step alone. They are not saved.
"""

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def main(args: Namespace) -> int:
    signals = remember_signals()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arrays = {name: torch.from_numpy(array) for name, array in np.load(args.data).items()}
    train_set = TensorDataset(arrays["train_images"][:, None] / 255, arrays["train_labels"].long())
    val_set = TensorDataset(arrays["val_images"][:, None] / 255, arrays["val_labels"].long())
    steps_per_epoch = len(train_set) // args.batch_size  # the last samples of an epoch are dropped
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    settings = vars(args) | {"data": str(args.data), "out": None, "save_every": None}
    step, path = 0, args.out / "last.pt"
    checkpoint = torch.load(path, map_location="cpu") if path.exists() else None
    if checkpoint:
        if changed := settings.items() ^ checkpoint["args"].items():
            sys.exit(f"{path} has other settings: {sorted(changed)}; use them, or another --out")
        step = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        print(f"resumed from {path}: step {step} of {total_steps}", flush=True)

    # An epoch whose steps are all done comes once more: its evaluation may be missing.
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        batches = batches_of(epoch, args.seed, len(train_set), args.batch_size)
        left = batches[step - epoch * steps_per_epoch :]
        model.train()
        for inputs, labels in DataLoader(train_set, batch_size=None, sampler=left):
            torch.manual_seed(1_000_000 * args.seed + step)
            optimizer.param_groups[0]["lr"] = args.lr * (1 - step / total_steps)
            outputs = model(inputs.to(device))
            loss = nn.functional.cross_entropy(outputs, labels.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1  # not in the sampler: the workers of a loader are ahead
            is_stopped = bool(signals)
            if step % args.save_every == 0 or step == total_steps or is_stopped:
                if not all(values.isfinite().all() for values in model.state_dict().values()):
                    sys.exit(f"a weight is not finite after step {step}; {path} stays as it was")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save({"step": step, "args": settings} | state, path)
                print(f"step {step} of {total_steps}: loss {loss.item():.4f}", flush=True)
            if is_stopped:
                return 75  # EX_TEMPFAIL: try again

        val_loss, top1 = evaluate(model, val_set, device)
        print(f"epoch {epoch + 1}: val/loss {val_loss:.4f}, val/top1 {top1:.4f}", flush=True)
    return 0


def batches_of(epoch: int, seed: int, num_samples: int, batch_size: int) -> list[Tensor]:
    """Return the indices of each batch of an epoch, without a last one that is smaller."""
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    return list(torch.from_numpy(order).split(batch_size))[: num_samples // batch_size]


def build_model() -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_in, num_out in ((1, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> list[float]:
    """Return mean loss and accuracy: sums over all samples, as batches may differ in size."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, labels in DataLoader(data, batch_size=500):
        outputs, labels = model(inputs.to(device)), labels.to(device)
        sums[0] += nn.functional.cross_entropy(outputs, labels, reduction="sum")
        sums[1] += (outputs.argmax(1) == labels).sum()
    return (sums / len(data)).tolist()


def save(state: dict, path: Path) -> None:
    """Write a file whole or not at all: a run that is killed meanwhile leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the content is on the disk before it gets the name
    os.replace(f"{path}.tmp", path)


def remember_signals() -> list[int]:
    """Return a list that these signals extend from now on, instead of ending the process."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: received.append(number))
    return received


if __name__ == "__main__":
    parser = ArgumentParser()
    options = {"data": Path("data/mnist_mini.npz"), "out": Path("outputs/plain"), "seed": 0}
    options |= {"epochs": 4, "batch-size": 64, "lr": 0.003, "save-every": 100}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    sys.exit(main(parser.parse_args()))
