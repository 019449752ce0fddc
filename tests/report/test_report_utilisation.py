"""Model FLOPs utilisation beside throughputs: of devices whose peak is known, in the precision that was measured."""

import json

import pytest
from report_records import CPU, CUDA, RunFile, save_no_pictures

from dpbench.report import write_report


@pytest.fixture(autouse=True)
def drawn_but_not_saved(monkeypatch):
    save_no_pictures(monkeypatch)


def tables(tmp_path, environment, flops, figure, **fields):
    file = RunFile(tmp_path / "run" / "a.jsonl", environment=environment, experiment="overhead")
    times = {"nonprivate": [0.01] * 3, "ghost": [0.02] * 3}
    if figure == "overhead":
        file.overhead("cnn", times, batch_size=64, **fields)
    else:
        for backend, seconds in times.items():
            file.step("cnn", backend, seconds, batch_size=64, **fields)
    if flops is not None:  # as `dpbench.measure` writes it, into each backend's entry
        head, *lines = map(json.loads, file.path.read_text().splitlines())
        for line in lines:
            for entry in line["result"].get("backends", {"": line["result"]}).values():
                entry["model_flops"] = flops
        file.path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *lines)))
    paths = write_report(file.path.parent, tmp_path / "out", [figure])
    return next(path for path in paths if path.name.startswith(figure) and path.suffix == ".md").read_text()


def test_it_is_of_the_peak_in_the_precision(tmp_path):
    for name, precision, peak in [
        ("NVIDIA H100 80GB HBM3", "float32", 66.9e12),
        ("NVIDIA H100 PCIe", "tf32", 378e12),
        ("NVIDIA H200", "bfloat16-autocast", 989.5e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
    ]:
        for figure in ["overhead", "max_batch_throughput"]:
            environment = CUDA | {"device_name": name}
            found = tables(tmp_path, environment, int(0.4 * peak * 0.01), figure, precision=precision, device="cuda")
            lines = [line for line in found.splitlines() if line.startswith("|")]
            column = [cell.strip() for cell in lines[0].split("|")].index("MFU")
            assert {line.split("|")[column].strip() for line in lines[2:]} == {"40.0%", "20.0%"}
            assert "MFU: operations of ordinary training's" in found and "NVIDIA" in found


@pytest.mark.parametrize(
    ("environment", "flops"),
    [(CPU, 10**9), (CUDA, 10**9), (CUDA | {"device_name": "NVIDIA H200"}, None)],
    ids=["a CPU", "a card whose peak is not known", "a record without a count"],
)
def test_it_is_left_out_where_it_is_not_known(tmp_path, environment, flops):
    found = tables(tmp_path, environment, flops, "overhead", device=environment["device"])
    assert "MFU" not in found
