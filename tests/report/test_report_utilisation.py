"""Model FLOPs utilisation beside step times: of devices whose peak is known, in the precision that was measured."""

import pytest
from report_records import CPU, CUDA, RunFile, save_no_pictures

from dpbench.report import write_report


def report(tmp_path, monkeypatch, environment, flops, **fields):
    """The table's cells, and the text below it."""
    save_no_pictures(monkeypatch)
    run = RunFile(tmp_path / "run" / "a.jsonl", environment, experiment="overhead")
    seconds = {"nonprivate": [0.01] * 3, "ghost": [0.02] * 3}
    counted = dict.fromkeys(seconds, {"model_flops": flops} if flops else {})
    run.overhead("cnn", seconds, batch_size=64, more=counted, **fields)
    paths = write_report(run.path.parent, tmp_path / "out", ["overhead"])
    text = next(path for path in paths if path.suffix == ".md").read_text()
    return [[c.strip() for c in line.split("|")] for line in text.splitlines() if line.startswith("|")], text


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "float32", 66.9e12),
        ("NVIDIA H100 PCIe", "tf32", 378e12),
        ("NVIDIA H200", "bfloat16-autocast", 989.5e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
    ],
)
def test_it_is_of_the_peak_in_the_precision(tmp_path, monkeypatch, name, precision, peak):
    environment, flops = CUDA | {"device_name": name}, int(0.4 * peak * 0.01)
    cells, text = report(tmp_path, monkeypatch, environment, flops, precision=precision, device="cuda")
    assert [row[cells[0].index("MFU")] for row in cells[2:]] == ["40.0%", "20.0%"]
    assert "MFU: operations of ordinary training's" in text and "NVIDIA" in text


@pytest.mark.parametrize(
    ("environment", "flops"),
    [(CPU, 10**9), (CUDA, 10**9), (CUDA | {"device_name": "NVIDIA H200"}, None)],
    ids=["a CPU", "a card whose peak is not known", "a record without a count"],
)
def test_it_is_left_out_where_it_is_not_known(tmp_path, monkeypatch, environment, flops):
    assert "MFU" not in report(tmp_path, monkeypatch, environment, flops, device=environment["device"])[1]
