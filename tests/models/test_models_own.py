"""Models that are none over images: a file hands in the model, a few records, and perhaps a loss."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from clipping.core.batches import forward
from dpbench.cli.command_line import main
from dpbench.models.loading import load_workload
from dpbench.models.own import EXAMPLE, loss_of_targets, own_workload
from dpbench.models.workload import ModelError

pytestmark = pytest.mark.usefixtures("trials_here", "empty_folder")
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
FILES = {
    "MLP with embeddings": """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.net = nn.Embedding(50, 8), nn.Sequential(nn.Linear(8 + 5, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, category, numbers):
        return self.net(torch.cat([self.words(category), numbers], 1))


def build():
    return Table(), ((torch.randint(0, 50, (6,)), torch.randn(6, 5)), torch.randint(0, 2, (6,)))
""",
    "T5": """
from transformers import T5Config, T5ForConditionalGeneration


def losses(outputs, targets):
    return F.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none").mean(1)


def build():
    config = T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    words, answer = torch.randint(1, 60, (4, 6)), torch.randint(1, 60, (4, 5))
    return T5ForConditionalGeneration(config), ({"input_ids": words, "decoder_input_ids": answer}, answer), losses
""",
}


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text: str) -> str:
    """A reference to the function `build` of the text."""
    Path("mine.py").write_text(HEAD + text)
    return "mine.py:build"


@pytest.fixture(params=FILES)
def reference(request, empty_folder):
    if request.param == "T5":
        pytest.importorskip("transformers", reason="transformers is not installed")
    return write(FILES[request.param])


def test_it_is_explained_and_exact(reference, capsys):
    assert main(["explain", reference, "--format", "json"]) == 0
    assert all(row["choice"] for row in json.loads(capsys.readouterr().out))
    backends = [word for name in ("bk_mixed", "ghost", "fastgradclip") for word in ("--backend", name)]
    assert main(["check", "--model", reference, *backends, "--format", "json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"ok"}


def test_any_batch_size_is_made_of_its_records(reference):
    workload = load_workload(reference)
    for size in (1, 3, 17):
        inputs, targets = workload.batch(size)
        assert workload.loss_fn(forward(workload.model, inputs), targets).shape == (size,)


def test_the_template_is_taken_as_it_stands(capsys):
    assert main(["template", "mine.py"]) == 0
    assert main(["explain", "mine.py:build"]) == 0
    assert main(["template", "mine.py"]) == 2
    assert main(["template", "mine"]) == 2
    assert main(["template", "nowhere/mine.py"]) == 2
    assert "written; next: dpbench recommend mine.py:build" in capsys.readouterr().out


def test_a_loss_is_taken_by_the_kind_of_the_targets():
    scores, classes = torch.randn(4, 3), torch.randint(0, 3, (4,))
    of_each = nn.CrossEntropyLoss(reduction="none")
    torch.testing.assert_close(loss_of_targets(scores, classes), of_each(scores, classes))
    words, tokens = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    torch.testing.assert_close(loss_of_targets(words, tokens), of_each(words.transpose(1, 2), tokens).mean(1))
    pixels, labels = torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4, 6, 6))
    torch.testing.assert_close(loss_of_targets(pixels, labels), of_each(pixels, labels).flatten(1).mean(1))
    numbers = torch.randn(4)
    torch.testing.assert_close(loss_of_targets(torch.ones(4, 1), numbers), (1 - numbers).square())
    assert own_workload("build", (nn.Linear(2, 1), (torch.randn(3, 2), numbers[:3]))).batch(5)[0].shape == (5, 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("): return nn.Linear(20, 3)", "to take 32x32 images, got"),
        ("): return nn.Linear(2, 3), torch.zeros(2, 2)", "to return a model and .inputs, targets."),
        ("): return nn.Linear(2, 3), (torch.zeros(2, 2), torch.zeros(3))", "of B records each"),
        ("): return nn.Linear(2, 3), (torch.zeros(2, 2), torch.zeros(2)), 3", "perhaps with a loss function"),
        ("n): return nn.Linear(20, 3)", "required positional argument"),
        ("): return 'text'", "got 'str'"),
        ("): return nn.Linear(20, 3), (torch.zeros(0, 20), torch.zeros(0))", "at least one record"),
        ("): return nn.Linear(20, 3), (torch.zeros(4, 21), torch.zeros(4))", "takes its own records"),
        ("): return nn.Linear(20, 3), (torch.zeros(4, 20), torch.zeros(4).long()), F.cross_entropy", "shape .2., got"),
    ],
)
def test_what_does_not_fit_is_shown_a_function_that_works(body, words):
    reference = write(f"def build({body}\n{EXAMPLE.replace('build', 'works')}\n")
    with pytest.raises(ModelError, match=words) as error:
        load_workload(reference)
    said = str(error.value)
    assert said.count(EXAMPLE) == 1 and "`python -m dpbench template mine.py`" in said and "\n" not in said
    assert load_workload("mine.py:works").batch(3)[0].shape == (3, 20)


def test_a_function_that_fails_is_one_line_of_check(capsys):
    reference = write("def build():\n    return 3\n")
    for backends in (["--backend", "ghost"], ["--backend", "vmap", "--backend", "ghost"]):
        assert main(["check", "--model", reference, *backends]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("dpbench: expected build() of mine.py to return")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("mine.py", "did you mean 'mine.py:build'?"),
        ("none.py:build", "file, got 'none.py:build'; `python -m dpbench template none.py` writes such a file"),
        ("mine.py:build", "mine.py to import, got 'SyntaxError: invalid syntax (mine.py, line 4)'"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(reference, words, capsys):
    write("def build(:\n")
    assert main(["explain", reference]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_a_model_with_nothing_to_train_is_refused(capsys):
    reference = write("def build():\n    return nn.ReLU(), (torch.zeros(4, 2), torch.zeros(4, 2))\n")
    assert main(["explain", reference]) == 2
    assert capsys.readouterr().err == "dpbench: expected mine.py:build to have parameters to train, got 'none'\n"
