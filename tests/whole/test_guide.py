"""The documentation: its pages say what is true of the code, and the site is whole without a network."""

import importlib
import inspect
import re

import pytest
from browser import measure, needs_browser
from pages import ROOT, assert_extras, assert_taken, blocks, commands
from waiting import python

from accounting import ACCOUNTANTS
from clipping import BACKENDS
from dpbench.experiment import experiment_names

NAMES = ("algorithms", "engine", "backends", "accountants", "experiments")
PAGES = {name: importlib.import_module(f"dpbench.guide.{name}".rstrip(".")) for name in ("", *NAMES)}
TEXTS = {name: inspect.getdoc(page) or "" for name, page in PAGES.items()}


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "```python" in text])
def test_the_programs_of_a_page_run_as_they_stand(name):
    names: dict[str, object] = {}
    for block in blocks(TEXTS[name], "python"):
        exec(block, names)
        for line in block.splitlines():
            expression, found, number = line.partition("  # ")
            if found and re.fullmatch(r"[\d.]+", number):
                assert abs(eval(expression, names) - float(number)) < 0.001, line


def test_the_commands_of_a_page_and_of_the_readme_are_taken_and_extras_exist(monkeypatch):
    texts = [*TEXTS.values(), (ROOT / "README.md").read_text(encoding="utf-8")]
    for line in [line for text in texts for line in commands(text)]:
        assert_taken(line, monkeypatch)
    assert_extras("".join(texts))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_names_is_there(name):
    """Names in backticks that look like ours."""
    for named in re.findall(r"`((?:dpbench|clipping|accounting)(?:\.\w+)+)`", TEXTS[name] + TEXTS[""]):
        module, _, attribute = named.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, attribute) or importlib.import_module(named)


def test_pages_leave_nothing_out():
    assert [each for each in experiment_names() if f"`{each}`" not in TEXTS["experiments"]] == []
    assert [each for each in BACKENDS if f"`{each}`" not in TEXTS["backends"]] == []
    assert [each for each in ACCOUNTANTS if f"`{each}`" not in TEXTS["accountants"]] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    python("-W", "ignore", "-m", "dpbench.guide.site", folder)
    return folder


@pytest.mark.slow
def test_the_site_is_whole_and_small_and_asks_for_no_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 300 and sum(path.stat().st_size for path in site.rglob("*")) < 15e6
    for page in pages:
        text = re.sub("<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*', text) == [], page
        for link in re.findall(r'(?:src|href)="([^"#:]+)(?:#[^"]*)?"', text):
            assert (page.parent / link).exists(), f"{page}: {link}"
    algorithms = (site / "dpbench/guide/algorithms.html").read_text(encoding="utf-8")
    assert "$$" not in algorithms and algorithms.count('<img class="display"') > 4 and "memory.svg" in algorithms
    assert "def trained(" in re.sub("<.*?>", "", (site / "dpbench/integrations/tutorials/digits.html").read_text())
    assert not (site / "dpbench/engine/release.html").exists()
    assert (site / "internal/dpbench/engine/release.html").exists()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("name", ["guide", *(f"guide/{name}" for name in NAMES), "integrations/sharp_edges"])
def test_pages_are_not_cut_at_1400_pixels(site, tmp_path, name):
    page = site / "dpbench" / f"{name}.html"
    inlined = page.read_text(encoding="utf-8")
    sheet = re.search(r'<link rel="stylesheet" href="([^"]+)">', inlined)
    style = f"<style>{(page.parent / sheet[1]).read_text(encoding='utf-8')}</style>"
    alone = tmp_path / "page.html"  # the frame that is measured has no address, and so no style sheet beside it
    alone.write_text(inlined.replace(sheet[0], style), encoding="utf-8")
    function = """(own, page) => [...page.querySelectorAll("main, main table, main pre, main img")]
        .filter(each => each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > 1400)
        .map(each => each.outerHTML.slice(0, 200))"""
    assert measure(alone, function, tmp_path, widths=(1400,))[1400] == []


def test_the_menu_has_every_page():
    source = (ROOT / "dpbench" / "guide" / "site.py").read_text()
    assert all(f'"dpbench.guide.{name}"' in source for name in NAMES)
    there = {path.stem for path in (ROOT / "dpbench" / "guide").glob("*.py")} - {"__init__", "site"}
    assert there == set(NAMES)
