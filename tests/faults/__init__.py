"""Tests of faults, and lines that hit runs."""

NUM_STEPS = 16


def hit(step: int, rank: int, action: str) -> list[str]:
    """Lines of the loop that do something in a step of a rank, but not after a resume."""
    return [
        f"if (step, rank) == ({step}, {rank}) and not os.path.exists('hit-{step}'):",
        f"    open('hit-{step}', 'x').close()",
        f"    {action}",
    ]
