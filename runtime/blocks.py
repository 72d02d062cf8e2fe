"""The blocks of a model, which compute one after another."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
LISTS = (*NOT_CALLED, nn.Sequential)

LARGE = 0.1
"""Share of the parameters of a model above which a child with lists of layers is divided."""


def blocks_of(
    model: nn.Module, with_layers: bool = False, total: int | None = None
) -> list[nn.Module]:
    """Return the blocks of a model, or of a module in a model of `total` parameters, in order.

    Blocks are the model's children and those of a ModuleList; a child with many parameters is
    divided at the ModuleLists and Sequentials inside it. `with_layers` returns single layers, too,
    and divides lists that hold nothing else.
    """
    total = total or num_parameters(model)
    blocks = []
    for child in model.children():
        has_list = any(
            isinstance(inner, LISTS) and (with_layers or any(map(has_layers, inner.children())))
            for inner in child.modules()
        )
        if isinstance(child, NOT_CALLED) or (has_list and num_parameters(child) > LARGE * total):
            blocks += blocks_of(child, with_layers, total)
        elif with_layers or has_layers(child):
            blocks.append(child)
    return blocks


def has_layers(module: nn.Module) -> bool:
    """Return True if there are modules inside this one."""
    return any(True for _ in module.children())


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
