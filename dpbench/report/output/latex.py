"""Writes a table as LaTeX for \\input: booktabs rules, escaped texts, signs as commands that pdfTeX knows.

The preamble needs ``\\usepackage{booktabs,graphicx,longtable}``. A table that fits on a page floats and is no wider
than the line; a longer one is a longtable.
"""

import re

import pandas as pd

_ONE_PAGE = 45
_SIGNS = {
    **{"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}"},
    **{"|": r"\textbar{}", '"': r"{\char34}", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}"},
    **{"-": "{-}", "[": "{[}", "]": "{]}", "*": "{*}"},  # no ligature; no option of \\ where a row begins
    **{"–": "--", "—": "---", "…": r"\ldots{}", "·": r"$\cdot$", "×": r"$\times$", "±": r"$\pm$", "µ": r"$\mu$"},
    **{"≥": r"$\geq$", "≤": r"$\leq$", "≈": r"$\approx$", "∞": r"$\infty$", "∝": r"$\propto$", "→": r"$\to$"},
    **{"²": r"$^2$", "³": r"$^3$", "Σ": r"$\Sigma$", "†": r"\textdagger{}", "✕": r"$\times$", "✗": r"$\times$"},
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\varepsilon$", "λ": r"$\lambda$"},
    **{"μ": r"$\mu$", "σ": r"$\sigma$", "✓": r"$\surd$", "\u00a0": "~", "é": r"\'e", "ü": r"\"u", "ö": r"\"o"},
}
_TABLE = str.maketrans(_SIGNS)
_OTHERS = re.compile(r"[^ -~]")
_BOLD = re.compile(r"\*\*(.+)\*\*")


def escape(text: str) -> str:
    """Escape `text` for LaTeX; a character unknown to pdfTeX appears as its code."""
    coded = lambda sign: " " if sign[0].isspace() else f"U+{ord(sign[0]):04X}"  # noqa: E731
    return _OTHERS.sub(coded, text.translate(_TABLE))


def table(frame: pd.DataFrame, caption: str, label: str) -> str:
    """The table of `frame` (texts), with its caption's first paragraph and a label.

    Args:
        frame: the table as texts; ``**bold**`` is bold.
        label: ``\\ref{tab:LABEL}`` names it.
    """
    rows = [[_cell(str(cell)) for cell in row] for row in frame.itertuples(index=False)]
    header = " & ".join(escape(str(name)) for name in frame.columns) + r" \\"
    body = [" & ".join(row) + r" \\" for row in rows]
    sentences = frame.astype(str).map(len).max() > 60
    columns = "".join("p{6cm}" if is_long else "l" for is_long in sentences)
    first, *rest = caption.splitlines() or [""]
    titles = [rf"\caption{{{escape(first)}}}", rf"\label{{tab:{re.sub(r'[^A-Za-z0-9:.-]+', '-', label)}}}"]
    notes = [f"% {line}" for line in rest]
    packages = "% \\usepackage{booktabs,graphicx,longtable}"
    if len(rows) > _ONE_PAGE:
        head = [r"\toprule", header, r"\midrule"]
        lines = [
            *("{", r"\scriptsize\setlength{\tabcolsep}{3pt}", rf"\begin{{longtable}}{{{columns}}}"),
            *(titles[0] + titles[1] + r" \\", *head, r"\endfirsthead", *head, r"\endhead"),
            *(r"\bottomrule", r"\endfoot", *body, r"\end{longtable}", "}"),
        ]
    else:
        lines = [
            *(r"\begin{table}", r"\centering", *titles),
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            *(rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule"),
            *(r"\end{tabular}}", r"\end{table}"),
        ]
    return "\n".join([packages, *notes, *lines]) + "\n"


def _cell(text: str) -> str:
    bold = _BOLD.fullmatch(text)
    return rf"\textbf{{{escape(bold[1])}}}" if bold else escape(text)
