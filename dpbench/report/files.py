"""The files of one figure: the picture as PNG, SVG and PDF, its table as CSV, Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

from dpbench.report import latex, readable
from dpbench.report.parts import VERDICTS, Claim, Part
from dpbench.report.pictures import Pictures

TABLES = ("csv", "md", "tex")
FORMATS = ("png", "svg", "pdf", *TABLES)


def write(part: Part, folder: Path, pictures: Pictures) -> list[Path]:
    """Write `part` into `folder`, made if missing; the files written, those of pictures once `pictures` has ended.

    Raises:
        OSError: if it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    suffixes = FORMATS if part.figure is not None else TABLES
    paths = {suffix: folder / f"{part.name}.{suffix}" for suffix in suffixes}
    if part.figure is not None:
        pictures.save(part.figure, paths)
    part.frame.to_csv(paths["csv"], index=False, lineterminator="\n")
    lines = [readable.markdown(part.text), part.caption.replace("\n", "\n\n"), *map(_claim, part.claims), *part.causes]
    paths["md"].write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths["tex"].write_text(latex.table(part.text, part.caption, part.name), encoding="utf-8")
    return list(paths.values())


def _claim(claim: Claim) -> str:
    return f"\n{VERDICTS[claim.verdict]} {claim.verdict}: {claim.statement} ({claim.source}) {claim.finding}"
