"""Tables of results: `python -m benchmarks.tables` writes those of git into docs/benchmarks.md.

`python -m benchmarks.tables FILE` prints those of another CSV file.
"""

import sys
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.records import (
    Measurement,
    Subject,
    format_interval,
    format_number,
    ratio,
    read,
)

PAGE = REPOSITORY / "docs" / "benchmarks.md"
RESULTS = REPOSITORY / "benchmarks" / "results"
SPEED, STEP_TIME = "speed", "time per step"
BUSY, WAIT = "GPU utilisation", "data wait"
LIMIT, BARE = "limit: decoding alone", "bare loop"

Rows = list[Measurement]
Table = list[list[str]]


def markdown(table: Table) -> str:
    rows = [[*line] for line in table]
    rows.insert(1, ["---"] * len(table[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def by_case(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return groups


def loader_table(case: str, rows: Rows) -> Table:
    """Speeds of a comparison, the fastest first, against its first subject."""
    rows = [row for row in rows if row.quantity == SPEED and row.repeats]
    first = rows[0]
    table = [[case, f"{SPEED} ({first.unit})", f"against {first.subject}"]]
    for row in sorted(rows, key=lambda row: -row.median):
        against = ratio(row, first)
        cells = [row.subject, format_number(row.median)]
        cells.append("1x" if row is first else format_interval(against, "x") if against else "")
        table.append(cells)
    return table


def loop_table(case: str, rows: Rows) -> Table:
    """Time per step of training loops, and what it is more than that of the first."""
    rows = [row for row in rows if row.quantity == STEP_TIME and row.repeats]
    table = [[case, f"{STEP_TIME} (ms)", f"over {rows[0].subject} (%)"]]
    for row in rows:
        over = ratio(row, rows[0])
        more = (
            ""
            if row is rows[0] or over is None
            else format_interval(type(over)(*(100 * (value - 1) for value in over)))
        )
        table.append([row.subject, format_number(row.median), more])
    return table


def gpu_table(rows: Rows) -> Table:
    """A line for each loader, a column for each model."""
    lines: dict[Subject, dict[str, Rows]] = {}
    for row in rows:
        lines.setdefault(row.full_subject, {}).setdefault(row.case, []).append(row)
    cases = list(by_case(rows))
    table = [[f"{rows[0].gpu}, {rows[0].cores} cores", *cases]]
    for subject, found in lines.items():
        table.append([str(subject), *(gpu_cell(found.get(case, [])) for case in cases)])
    return table


def gpu_cell(rows: Rows) -> str:
    """Speed, and shares of the time where they are known: busy GPU / waiting for data."""
    found = {row.quantity: row for row in rows}
    if not found:
        return ""
    if not found[SPEED].repeats:
        return "failed"
    text = f"{found[SPEED].median:,.0f} {found[SPEED].unit.replace('images/s', '')}".strip()
    shares = [f"{found[key].median:.0f}" for key in (BUSY, WAIT) if key in found]
    return f"{text} ({'/'.join(shares)} %)" if shares else text


def tables(rows: Rows) -> str:
    """All tables of the rows of a file, below the machine and the commit."""
    newest = max(rows, key=lambda row: row.date)
    machine = newest.gpu or f"{newest.cpu}, {newest.cores} cores"
    how = "Medians; ratios are taken within rounds, with 95 % intervals."
    if max(row.repeats for row in rows) == 1:
        how = "One measurement each."
    parts = [f"{machine}, at commit {newest.commit} on {newest.date[:10]}. {how}"]
    for case, some in by_case([row for row in rows if row.benchmark == "compare"]).items():
        parts.append(markdown(loader_table(case, some)))
    for case, some in by_case([row for row in rows if row.benchmark == "loop_overhead"]).items():
        parts.append(markdown(loop_table(case, some)))
    on_gpu = [row for row in rows if row.benchmark == "gpu"]
    for is_other in (False, True):
        of_others = ("loader alone, pairs", "loader alone, cells")
        if some := [row for row in on_gpu if (row.case in of_others) == is_other]:
            parts.append(markdown(gpu_table(some)))
    return "\n\n".join(parts)


def with_tables(text: str, name: str) -> str:
    """Replace the tables of a file in a page, between its marks."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{tables(read(RESULTS / f'{name}.csv'))}\n{end}{after}"


def main() -> None:
    if sys.argv[1:]:
        print(tables(read(Path(sys.argv[1]))))
        return
    text = PAGE.read_text()
    for name in ("gpu", "cpu"):
        text = with_tables(text, name)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
