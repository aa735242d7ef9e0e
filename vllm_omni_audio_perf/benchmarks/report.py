# SPDX-License-Identifier: Apache-2.0
"""Shows the rows of `harness` to people: a table and a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""The figures of one length, under the names that the JSON has; a figure that could not be had is missing."""


@dataclass(frozen=True)
class Ratio:
    """The seconds of one variant over those of another, round by round, beside the speed-ups over the baseline."""

    field: str
    title: str
    numerator: str
    denominator: str
    smallest: bool = False
    """Whether the figure is the smallest of the rounds, beside which the median stands as ``FIELD_median``; otherwise
    it is the median."""
    least_pairs: int = 1
    """Rounds below which there is no figure."""


def compared(names: Sequence[str], about: str | None = None) -> list[tuple[str, str]]:
    """The variants that are compared with the baseline, each with the prefix of the result.

    That of the one that the benchmark is about has no prefix; with more than two variants each one's own stands under
    its name, too.

    Args:
        names: of the variants, the baseline first.
        about: the one that the benchmark is about; None for the last one.
    """
    _, *others = names
    about = about or names[-1]
    named = [(name, f"{name}_") for name in others] if len(others) > 1 or about not in others else []
    return [*named, *((name, "") for name in others if name == about)]


def add_memory_ratios(row: Row, names: Sequence[str], about: str | None = None) -> None:
    """Add to a row the ratio of each variant's extra memory to the baseline's, where both are there."""
    baseline = row.get(f"{names[0]}_extra_mib")
    for name, prefix in compared(names, about):
        if baseline and f"{name}_extra_mib" in row:
            row[f"{prefix}extra_memory_ratio"] = row[f"{name}_extra_mib"] / baseline


def table(
    rows: Sequence[Row],
    names: Sequence[str],
    length_name: str,
    *,
    about: str | None = None,
    ratios: Sequence[Ratio] = (),
) -> str:
    """The figures for people: a column a length, a line a figure.

    "-" is for a figure that a row does not have; a line without any is left out.
    """
    from prettytable import PrettyTable  # not where a benchmark prints a table of its own

    lines: list[tuple[str, str, str]] = [("rounds", "pairs", "{}")]
    lines += [(f"{name}: seconds", f"{name}_seconds", "{:.4g}") for name in names]
    lines += [
        (f"{name}: times the previous length's", f"{name}_seconds_vs_previous_length", "{:.2f}x") for name in names
    ]
    lines += [(f"{name}: extra MiB", f"{name}_extra_mib", "{:.0f}") for name in names]
    for name, prefix in compared(names, about):
        if not prefix and len(names) > 2:
            continue  # stands under its name already
        lines.append((f"{name}: speed-up over {names[0]}", f"{prefix}speedup", "{:.2f}x"))
        lines.append((f"{name}: extra memory to {names[0]}'s", f"{prefix}extra_memory_ratio", "{:.2f}x"))
        lines.append((f"{name}: max difference to {names[0]}", f"{prefix}max_abs_diff", "{:.1e}"))
        lines.append((f"{name}: relative error to {names[0]}", f"{prefix}rel_error", "{:.1e}"))
    for ratio in ratios:
        smallest = ", smallest" if ratio.smallest else ""
        lines.append((f"{ratio.title}{smallest}", ratio.field, "{:.2f}x"))
        lines.append((f"{ratio.title}, median", f"{ratio.field}_median", "{:.2f}x"))

    def cell(row: Row, field: str, form: str) -> str:
        if field not in row:
            return "-"
        if f"{field}_min" not in row:
            return form.format(row[field])
        spread = " to ".join(form.format(row[f"{field}_{end}"]) for end in ("min", "max"))
        return f"{form.format(row[field])} ({spread})"

    out = PrettyTable([words(length_name), *(str(row[length_name]) for row in rows)], align="r")
    out.align[words(length_name)] = "l"
    for title, field, form in lines:
        if any(field in row for row in rows):
            out.add_row([title, *(cell(row, field, form) for row in rows)])
    return out.get_string()


def plot(rows: Sequence[Row], names: Sequence[str], length_name: str, path: Path, *, title: str = "") -> None:
    """Draw a PNG: seconds over length, with their spread, and extra memory over length, both with logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, ScalarFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(1, 2)
    for axes, field, label in zip(panels, ("seconds", "extra_mib"), ("seconds", "extra memory, MiB"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel=words(length_name), ylabel=label)
        for name in names:
            key = f"{name}_{field}"
            points = [row for row in rows if row.get(key, 0) > 0]  # a logarithmic axis has no 0
            if points:
                values = [row[key] for row in points]
                below = [row[key] - row.get(f"{key}_min", row[key]) for row in points]
                above = [row.get(f"{key}_max", row[key]) - row[key] for row in points]
                x = [row[length_name] for row in points]
                axes.errorbar(x, values, yerr=[below, above], marker="o", capsize=4, label=name)
        axes.set_xticks([row[length_name] for row in rows])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(which="both", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path, format="png", dpi=150)


def waterfall(row: Row, names: Sequence[str], path: Path, *, title: str = "") -> None:
    """Draw a PNG: a bar a variant with its seconds, and above it, lighter, what it gains over the bar before.

    The factors are those of the seconds that are drawn, so that together they give the factor of the last bar.

    Args:
        row: that of one length.
        names: of the variants that have seconds in it, in the order of the bars.
        path: of the PNG.
        title: of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 1.7 * len(names), 4.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots()
    seconds = [row[f"{name}_seconds"] for name in names]
    axes.bar(range(len(names)), seconds, color="tab:blue")
    for position, (value, before) in enumerate(zip(seconds, seconds[:1] + seconds, strict=False)):
        label = f"{value:.3g} s" if position == 0 else f"{value:.3g} s\n{before / value:.2f}x"
        axes.bar(position, max(before - value, 0), bottom=value, color="tab:blue", alpha=0.2)
        axes.annotate(label, (position, max(value, before)), (0, 3), textcoords="offset points", ha="center")
    axes.set(ylabel="seconds", ylim=(0, 1.2 * max(seconds)))
    axes.set_xticks(range(len(names)), [words(name) for name in names])
    figure.savefig(path, format="png", dpi=150)


def words(name: str) -> str:
    """A field's name as words."""
    return name.replace("_", " ")
