"""Advice to use DALI or packed images."""

ALL = {"bottleneck", "loader=dali", "loader=packed"}
ADVICE = [
    (0.0, 0.79, "cuda", [], "host", {*ALL, "compile", "batch"}),
    (0.2, 0.3, "cuda", [], "input", ALL),
    (0.5, None, "cuda", ["loader=dali"], "input", {"bottleneck", "loader=packed"}),
    (0.5, None, "cpu", [], "input", ALL - {"loader=dali"}),
]
