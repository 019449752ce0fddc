"""The page: everything of a report is on it, escaped, and it asks nothing of a network; in a real browser it fits."""

import re
from html.parser import HTMLParser

import matplotlib
import pandas as pd
import pytest
from browser import measure, needs_browser
from matplotlib.figure import Figure
from report_every import everything
from report_records import CPU, CUDA, RunFile

from dpbench.report import FIGURES, style, write_report
from dpbench.report.output import files, page
from dpbench.report.output.page import svg
from dpbench.trials import StepTrial

HOSTILE = "<script>alert(1)</script>\"&'"


class Parsed(HTMLParser):
    """Elements, text by element, and what a browser would object to."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "path", "use", "rect", "image", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)

    def text(self, *but):
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style", *but))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Their files take most of the time, and are not what is tested; the page draws its own."""
    monkeypatch.setattr(files, "save_all", lambda drawn: None)


def write(run, *figures):
    """(the page as it lies on the disk, its text parsed)."""
    output = run.path.parent.parent / "out"
    path = write_report(run.path.parent, output, figures or tuple(FIGURES))[-1]
    assert path == output / "report.html"
    return path, Parsed(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of records of every kind, whose model and evidence have a hostile name."""
    folder = tmp_path_factory.mktemp("page")
    run = RunFile(folder / "records" / "a.jsonl", CPU | {"host": HOSTILE}, experiment="mine")
    everything(run, f"net.py:{HOSTILE}")
    with pytest.MonkeyPatch.context() as patch:
        touch = lambda drawn: [path.touch() for _, paths in drawn for path in paths.values()]  # noqa: E731
        patch.setattr(files, "save_all", touch)
        return write(run)


def test_every_figure_has_its_picture_its_words_its_table_and_its_files(whole):
    path, parsed = whole
    text = parsed.text()
    kinds = [kind for name, kind in FIGURES.items() if name != "claims"]  # no record of an experiment of claims
    for kind in kinds:
        assert kind.doc[1:] in text
    assert "ε of each sampling scheme" in text and "Ε" not in text  # the Greek capital looks like an E
    pictures = [attributes for tag, attributes in parsed.elements if tag == "svg"]
    drawn = [kind for kind in kinds if kind.plot is not None]
    assert len(pictures) == len(drawn)
    for picture in pictures:
        assert picture["role"] == "img" and len(picture["aria-labelledby"].split()) == 2
    assert parsed.count("table") == len(kinds) + 2  # the trials without a figure, the environment
    links = [a["href"] for tag, a in parsed.elements if tag == "a" and not a["href"].startswith("#")]
    assert len(links) == 6 * len(drawn) + 3 * (len(kinds) - len(drawn)) + 3
    assert all((path.parent / link).is_file() for link in links)


def test_figures_say_what_they_find(whole):
    """Numbers that can be worked out from the records of `everything`."""
    for finding in (
        "Of 2 accountants PRV is the tightest valid one: 1.091 times the certified lower bound at the median",
        "Ghost is the only private backend on 1 model in 2 settings: 2.00× the time of ordinary training (1 pair of "
        "rounds each) and 1.00× its peak memory (measured, CPU allocator).",
        "At ε = 2, 4 bands take the test loss of batches of 512 from 0.5000 to 0.4000",
        "Ghost takes 1.80× the launches, 1.80× the bytes and 1.80× the operations of ordinary training.",
        "ordinary fine-tuning gives away 13.0 of 13.3 bits, at ε = 8 1.5 (1.4 by chance)",
    ):
        assert finding in whole[1].text()


def test_a_kind_without_a_figure_has_its_table(whole):
    path, parsed = whole
    folder = path.parent / "cpu-test-cpu-2-cpus"
    table = pd.read_csv(folder / "trials-check.csv")
    assert list(table.largest) == [7, 9] and list(table.backend) == ["ghost", "vmap"]
    assert "dtype" not in table  # the same in all
    assert "every trial of kind check"[1:] in parsed.text() and not (folder / "trials-check.svg").exists()


def test_hostile_names_are_text(whole):
    path, parsed = whole
    text = path.read_text(encoding="utf-8")
    assert parsed.count("script") == 1 and "<script>alert" not in text
    told = parsed.text()
    assert told.count(HOSTILE) >= 4  # the cause, the evidence, the host
    shown = style.model(f"net.py:{HOSTILE}")
    assert shown.startswith("script>") and any(tag == "text" and shown in data for tag, data in parsed.texts)
    assert parsed.open == []


def test_the_page_asks_for_nothing(whole):
    _, parsed = whole
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
            value = attributes.get(name) or ""
            assert not re.match(r"(?:\w+:)?//", value), f"<{tag} {name}={value!r}>"
        assert tag not in ("iframe", "object", "embed", "img", "base") and not any(
            n.startswith("on") for n in attributes
        )
    sheets = " ".join(data for tag, data in parsed.texts if tag in ("style", "script"))
    assert not re.search(r"@import|url\(\s*['\"]?(?:\w+:)?//|https?:|fetch\(|XMLHttp|import\(", sheets)


def test_ids_are_one_of_a_kind_and_every_reference_is_met(whole):
    _, parsed = whole
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 30
    said = [value for _, attributes in parsed.elements for value in attributes.values() if value]
    referred = {found for value in said for found in re.findall(r"url\(#([^)]+)\)", value)}
    referred |= {a["href"][1:] for _, a in parsed.elements if (a.get("href") or "").startswith("#")}
    referred |= {name for _, a in parsed.elements for name in (a.get("aria-labelledby") or "").split()}
    assert any("-m" in name for name in referred)  # markers
    assert referred <= set(ids)


def test_the_summary_has_the_machine_and_the_first_finding(run):
    for number in range(3):
        run.step("cnn", "nonprivate", [1.0], 2**30, round=number).step("cnn", "ghost", [2.5], 2**31, round=number)
        run.step("cnn", "bk_mixed", [1.2], 2**30, round=number).step("cnn", "opacus_hooks", [3.6], round=number)
    text = write(run, "memory_speed_table")[0].read_text(encoding="utf-8")
    shown, folded = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.DOTALL)[0].split("<details>")
    assert "After Table 4" in shown and "Device:" not in shown and "<p>Device: cpu Test CPU" in folded
    box = text.partition('class="summary"')[2].partition("</section>")[0]
    assert re.findall(r"<p>(.*?)</p>", box) == [
        "12 trials on cpu Test CPU, 2 CPUs; torch 2.15.0; on 1 January 2026; commit unknown.",
        "BK mixed is the fastest private backend on 1 model: 1.20× the time of ordinary training (3 pairs of rounds "
        "each) and 1.00× its peak memory (measured, CPU allocator); the best of the libraries is Opacus "
        "hooks: 3.60×.",
    ]


def test_ours_is_not_called_the_fastest_where_a_library_is_faster(run):
    for name, seconds in (("nonprivate", 1.0), ("ghost", 2.5), ("bk_mixed", 2.0), ("opacus_hooks", 1.5)):
        run.step("cnn", name, [seconds], 2**30)
    run.step("resnet18", "nonprivate", [1.0], 2**30).step("resnet18", "bk_mixed", [9.0], 2**30)  # compares nothing
    text = write(run, "memory_speed_table")[1].text()
    assert "BK mixed is the fastest of our backends on 1 model: 2.00×" in text
    assert "the best of the libraries is Opacus hooks: 1.50×." in text


def test_simulated_memory_is_called_so(run):
    run.search("cnn", "nonprivate", [8, 200], [201]).search("cnn", "ghost", [8, 100], [101])
    run.search("cnn", "microbatch", [8, 5000], [5001]).search("cnn", "opacus_hooks", [8, 20], [21])
    _, parsed = write(run, "max_batch_throughput")
    text = parsed.text()
    assert (
        "Apart from one sample at a time, Ghost takes the largest batches in 16 GiB (simulated memory): 0.50× ordinary "
        "training's over 1 model; the best of the libraries is Opacus hooks: 0.10×." in text
    )
    assert "4 probes of a search did not fit in the memory budget: a result, not a failure." in text
    assert "No trial failed." in text


def test_the_device_measured_last_comes_first_and_others_stand_closed_after_it(run):
    run.step("cnn", "nonprivate", [1.0]).step("cnn", "ghost", [2.0])
    gpu = RunFile(run.path.with_name("b.jsonl"), CUDA, start=5)
    gpu.step("cnn", "nonprivate", [0.5], device="cuda").step("cnn", "ghost", [2.0], device="cuda")
    path, parsed = write(run, "memory_speed_table")
    text, page = parsed.text(), path.read_text(encoding="utf-8")
    assert "2 trials on cuda Test GPU; torch 2.15.0" in text
    assert "Ghost is the only private backend on 1 model: 4.00×" in text
    assert "cpu Test CPU, 2 CPUs, 2 trials, on 1 January 2026" in text
    assert parsed.count("svg") == 2 and page.count('<details id="device-1" class="other">') == 1
    closed = page.index('<details id="device-1"')
    assert page.index('id="f1-memory_speed_table"') < closed < page.index('id="f2-memory_speed_table"')
    assert page.index("cuda Test GPU") < page.index("cpu Test CPU")


def test_failures_are_grouped_by_cause_with_counts_and_evidence(run):
    for size in (8, 16, 32):
        trial = StepTrial(model="resnet18", backend="vmap", batch_size=size)
        run.add(trial, outcome="error", evidence=f"Traceback: line\nValueError: no room for {size} samples")
    trial = StepTrial(model="resnet18", backend="ghost", batch_size=8)
    run.add(trial, outcome="mismatch", evidence="gradient off by 0.5")
    _, parsed = write(run, "memory_speed_table")
    text = " ".join(parsed.text().split())
    assert "4 results without a number, for 2 causes" in text
    assert text.index("mismatch: wrong gradient · 1 · gradient off by 0.5") < text.index("✕ error · 3 · ")
    assert "ValueError: no room for 8 samples" in text and "no room for 16 samples" not in text.split("Failures")[-1]
    assert "ResNet18 vmap B=8; ResNet18 vmap B=16; ResNet18 vmap B=32" in text
    assert "Traceback: line ValueError: no room for 8 samples" in text


def test_a_failure_that_was_run_again_is_no_failure(run):
    run.add(StepTrial(model="cnn", backend="ghost", batch_size=8), outcome="timeout", evidence="killed after 600 s")
    RunFile(run.path.with_name("b.jsonl"), start=5).step("cnn", "ghost", [1.0])
    text = write(run, "memory_speed_table")[1].text()
    assert "No trial failed." in text and "1 superseded by a newer record" in text and "1 trial on" in text


def test_environments_that_differ_say_so(run):
    run.step("cnn", "ghost", [1.0])
    RunFile(run.path.with_name("b.jsonl"), CPU | {"torch": "2.11.0"}).step("cnn", "vmap", [1.0])
    text = " ".join(write(run, "memory_speed_table")[1].text().split())
    assert "2 runs" in text and "They differ in torch." in text
    assert "torch 2.11.0, 2.15.0 differs between runs" in text


def test_a_figure_is_unchanged_by_standing_in_a_page():
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(3, 2))
        figure.text(0.5, 0.5, "a < b & c")
        before = svg.inline(figure, "one", "T", "D")
        assert svg.inline(figure, "one", "T", "D") == before
    assert "a &lt; b &amp; c" in before and "http" not in before and 'viewBox="0 0 216 144"' in before


_LOOK = """(own, page) => {
  const width = own.innerWidth;
  const cut = Array.from(page.querySelectorAll("body *")).filter(
    (e) => !e.closest(".scroll, pre") && e.getBoundingClientRect().right > width + 1
  );
  const table = page.querySelector("#f2-memory_speed_table table");
  const of = (name) => Array.from(table.tHead.rows[0].cells).findIndex((c) => c.textContent === name);
  const column = (name) => Array.from(table.tBodies[0].rows, (row) => row.cells[of(name)].textContent);
  const sort = (name) => (table.tHead.rows[0].cells[of(name)].querySelector("button").click(), column(name));
  const svg = page.querySelector("svg").getBoundingClientRect();
  const line = page.querySelector("#f2-memory_speed_table .filter");
  const filter = (words) => {
    line.querySelector("input").value = words;
    line.querySelector("input").dispatchEvent(new own.Event("input"));
    const seen = Array.from(table.tBodies[0].rows).filter((row) => row.getClientRects().length);
    return [seen.length, line.querySelector("output").value];
  };
  return {
    width, page: page.documentElement.scrollWidth, cut: cut.map((e) => e.outerHTML.slice(0, 80)),
    requests: own.performance.getEntriesByType("resource").map((r) => r.name),
    filtered: ["  ERROR ", "-error", "error -ghost nothing", "<b>", ""].map(filter),
    before: column("Time/step"), up: sort("Time/step"), down: sort("Time/step"), rows: column("Backend"),
    direction: table.tHead.rows[0].cells[of("Time/step")].getAttribute("aria-sort"), drawn: [svg.width, svg.height],
  };
}"""


@needs_browser
def test_in_a_browser_it_fits_a_phone_and_a_desk_sorts_and_asks_for_nothing(whole, tmp_path):
    for width, seen in measure(whole[0], _LOOK, tmp_path).items():
        assert seen["width"] == width and seen["page"] <= width and seen["cut"] == []
        assert seen["requests"] == []
        assert min(seen["drawn"]) > 100
        counts = [(2, "2 of 5 rows"), (3, "3 of 5 rows"), (0, "0 of 5 rows"), (0, "0 of 5 rows"), (5, "")]
        assert [tuple(each) for each in seen["filtered"]] == counts
        assert seen["before"] == ["1.00 s", "error", "2.50 s", "error", "4.00 s"]
        assert seen["up"] == ["1.00 s", "2.50 s", "4.00 s", "error", "error"]
        assert seen["down"] == ["4.00 s", "2.50 s", "1.00 s", "error", "error"]
        assert seen["rows"][:3] == ["Opacus hooks", "Ghost", "Non-private"] and seen["direction"] == "descending"


def test_a_device_without_a_finding_stands_closed(run):
    run.step("cnn", "nonprivate", [1.0]).step("cnn", "ghost", [2.0])
    RunFile(run.path.with_name("b.jsonl"), CUDA, start=5).step("cnn", "nonprivate", [0.5], device="cuda")
    _, parsed = write(run, "memory_speed_table")
    assert "cuda Test GPU, 1 trial, on 1 January 2026" in parsed.text()


def test_a_long_table_says_where_the_rest_is():
    frame = pd.DataFrame({"A": [str(n) for n in range(page.ROWS + 2)], "Empty": ""})
    table = page.table(frame)
    assert len(table.rows) == page.ROWS and table.more == "The other 2 rows are in the CSV file."
    assert [column["name"] for column in table.columns] == ["A"]
