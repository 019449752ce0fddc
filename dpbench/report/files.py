"""The files of one figure: the picture as PNG, SVG and PDF, its table as CSV, Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

from dpbench.report import latex, readable
from dpbench.report.parts import VERDICTS, Claim, Part

# Pixels an inch, and pixels at most: Agg draws no image of 2**16 or more.
_DPI, _TALLEST = 200, 30_000


TABLES = ("csv", "md", "tex")
FORMATS = ("png", "svg", "pdf", *TABLES)


def write(part: Part, folder: Path) -> list[Path]:
    """Write `part` into `folder`, made if missing; the files written.

    Raises:
        OSError: if it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {suffix: folder / f"{part.name}.{suffix}" for suffix in FORMATS}
    if part.figure is None:
        paths = {suffix: path for suffix, path in paths.items() if suffix in TABLES}
    part.frame.to_csv(paths["csv"], index=False, lineterminator="\n")
    lines = [readable.markdown(part.text), part.caption.replace("\n", "\n\n"), *map(_claim, part.claims), *part.causes]
    paths["md"].write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths["tex"].write_text(latex.table(part.text, part.caption, part.name), encoding="utf-8")
    if part.figure is not None:
        # No version and no date in the files: they would differ with nothing measured anew.
        sharpness = min(_DPI, _TALLEST / part.figure.get_figheight())
        part.figure.savefig(paths["png"], dpi=sharpness, metadata={"Software": None})
        part.figure.savefig(paths["svg"], metadata={"Date": None, "Creator": None})
        part.figure.savefig(paths["pdf"], metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return list(paths.values())


def _claim(claim: Claim) -> str:
    return f"\n{VERDICTS[claim.verdict]} {claim.verdict}: {claim.statement} ({claim.source}) {claim.finding}"
