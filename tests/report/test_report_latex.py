"""Tables as LaTeX: whatever a name holds, LaTeX sets it as it stands; it compiles where there is a LaTeX."""

import re
import shutil
import subprocess

import pandas as pd
import pytest
from report_records import RunFile
from waiting import PATIENCE

from dpbench.report import write_report
from dpbench.report.output import latex

ASCII = "".join(map(chr, range(32, 127)))
SIGNS = "–—…·×±µ≥≤≈∞∝→²³Σ†✕✗αβγδελμσ✓éüö"
_PREAMBLE = r"\usepackage{booktabs,graphicx,longtable}"


def test_escaping():
    for text, latex_text in [
        ("path/net_1.py:make", r"path/net\_1.py:make"),
        ("100% & $5 #1 {a}", r"100\% \& \$5 \#1 \{a\}"),
        ("\\input{/etc/passwd}", r"\textbackslash{}input\{/etc/passwd\}"),
        ("a^b~c<d>e|f", r"a\textasciicircum{}b\textasciitilde{}c\textless{}d\textgreater{}e\textbar{}f"),
        ("1.2×–3×, ε ≥ 1e-5", r"1.2$\times$--3$\times$, $\varepsilon$ $\geq$ 1e{-}5"),
        ("[2mm]", "{[}2mm{]}"),
        ("--a", "{-}{-}a"),
        ("雪\n\t", "U+96EA  "),
    ]:
        assert latex.escape(text) == latex_text


def test_nothing_active_is_left():
    """Every character that LaTeX acts on stands behind a backslash, or is one of our own commands."""
    commands = r"\\text[a-z]+\{\}|\\ldots\{\}|\$[^$]*\$|\\[&%$#_{}'\"]|\{\\char34\}|\{[-*\[\]]\}"
    own = re.sub(commands, "", latex.escape(ASCII + SIGNS))
    assert not set(own) & set("\\{}$&#^_%~<>|\"'`[]*") and own.isascii()


def test_a_short_table_floats_and_a_long_one_breaks():
    short = latex.table(pd.DataFrame({"A_b": ["**wrong**", "x&y"]}), "First: 5 %.\nDevice: cpu.", "t_1")
    assert r"A\_b \\" in short and r"\textbf{wrong} \\" in short and r"x\&y \\" in short
    assert r"\caption{First: 5 \%.}" in short and r"\label{tab:t-1}" in short and "% Device: cpu." in short
    assert short.index(r"\toprule") < short.index(r"\midrule") < short.index(r"\bottomrule")
    assert "longtable}{" not in short
    long = latex.table(pd.DataFrame({"A": ["1"] * 60}), "c", "t")
    assert r"\begin{longtable}{l}" in long and r"\begin{table}" not in long


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on the PATH")
def test_it_compiles(tmp_path):
    name = f"net.py:{ASCII}{SIGNS}"
    run = RunFile(tmp_path / "records" / "a.jsonl").step("cnn", "nonprivate", [1.0]).step(name, "ghost", [1.0])
    paths = write_report(run.path.parent, tmp_path / "out", ["memory_speed_table"])
    (tex,) = [path for path in paths if path.suffix == ".tex"]
    long = tmp_path / "long.tex"
    long.write_text(latex.table(pd.DataFrame({"A": [name] * 60, "[B]": "1×"}), "c", "long"))
    inputs = "".join(rf"\input{{{path.resolve()}}}" for path in (tex, long))
    paper = tmp_path / "paper.tex"
    paper.write_text(
        rf"\documentclass{{article}}{_PREAMBLE}\begin{{document}}{inputs}\end{{document}}", encoding="utf-8"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", paper.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, errors="replace")
    assert done.returncode == 0, done.stdout[-1500:]
    assert "Missing character" not in (tmp_path / "paper.log").read_text(errors="replace")
