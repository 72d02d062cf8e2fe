"""Draws the report from the CSV files alone: `python -m benchmarks.report DIR`.

Writes PNG files, `report.md` and `report.html`, which holds its pictures, into the folder of results.
"""

import base64
import html
import sys
from pathlib import Path

from benchmarks.records import latest, read
from benchmarks.sections import SECTIONS, Rows, Section


def draw(folder: Path) -> Path:
    """Draw the report of a folder of results.

    Returns:
        Path of `report.md`.

    Raises:
        FileNotFoundError: there are no results.
        ValueError: a file has wrong columns or values.
    """
    files = {name: folder / f"{name}.csv" for name in SECTIONS}
    measured = {name: latest(read(path)) for name, path in files.items() if path.exists()}
    if not measured:
        raise FileNotFoundError(
            f"{folder} holds no results ({', '.join(path.name for path in files.values())}); run "
            f"python -m benchmarks results={folder}"
        )
    sections = [SECTIONS[name](rows, folder) for name, rows in measured.items()]
    everything = [row for rows in measured.values() for row in rows]
    path = folder / "report.md"
    path.write_text(as_markdown(everything, sections))
    (folder / "report.html").write_text(as_html(everything, sections))
    return path


def facts(rows: Rows) -> list[str]:
    """Where, when and with what all was measured."""
    newest = max(rows, key=lambda row: row.date)
    commits = list(dict.fromkeys(row.commit for row in rows))
    dates = sorted(row.date for row in rows)
    gpu = newest.gpu or "no GPU"
    return [
        f"{newest.cpu}, {newest.cores} cores, {newest.memory_gib:g} GiB memory; {gpu}.",
        f"{newest.versions}.",
        f"Commit {', '.join(commits)}; {dates[0]} to {dates[-1]}.",
        "Figures are medians; in brackets, and as black lines in the pictures, their 95 % confidence "
        "intervals (with fewer than 6 samples, their range). Subjects of one table were measured side "
        "by side, in turn; ratios are medians of the rounds' ratios.",
    ]


def as_markdown(rows: Rows, sections: list[Section]) -> str:
    parts = ["# Benchmarks", "\n\n".join(facts(rows))]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += section.conclusions
        parts += [f"![{section.title}]({path.name})" for path in section.pictures]
        for table in section.tables:
            if table.title:
                parts.append(f"{table.title}:")
            lines = [table.header, ["---"] * len(table.header), *table.rows]
            cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(parts) + "\n"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; } table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { border: 1px solid #ccc; padding: 2px 8px; text-align: left; } th { background: #f3f3f3; }
.conclusion { background: #eef5fb; padding: 4px 10px; margin: 4px 0; }
"""


def as_html(rows: Rows, sections: list[Section]) -> str:
    """One file with its pictures inside."""
    parts = ["<h1>Benchmarks</h1>", *(f"<p>{html.escape(fact)}</p>" for fact in facts(rows))]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f'<p class="conclusion">{html.escape(text)}</p>' for text in section.conclusions]
        for path in section.pictures:
            data = base64.b64encode(path.read_bytes()).decode()
            alt = html.escape(section.title)
            parts.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
        for table in section.tables:
            parts.append(f"<p>{html.escape(table.title)}</p><table>")
            for number_of_line, line in enumerate([table.header, *table.rows]):
                tag = "td" if number_of_line else "th"
                cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
                parts.append(f"<tr>{cells}</tr>")
            parts.append("</table>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Benchmarks</title>'
        f"<style>{STYLE}</style></head><body>{chr(10).join(parts)}</body></html>\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(draw(Path(sys.argv[1])))
